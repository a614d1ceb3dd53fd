"""A step, as data: what runs, where its KV lives, and why.

A plan can be logged, replayed, sent to another process or rank, and compared in a test. It says what *changes*: the
executor keeps, for each request, its tokens, block tables and generator from the plan that admits it to the plan that
lists it in ``released``.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import field

from foliolm.core.adapter import AdapterLoad, AdapterRows
from foliolm.core.sampling import SamplingParams
from foliolm.core.valueclass import valueclass

NOBODY = -2
"""Stands for a request id where blocks are meant that nobody holds."""


class LogitsAt(enum.IntFlag):
    """Where a row needs the output head. LAST: at its last token, which samples. ALL: at all, for prompt logprobs.

    A chunk that ends before its request's last token never has LAST; one that ends there and also reports prompt
    logprobs has both.
    """

    NONE = 0
    LAST = 1
    ALL = 2

    # Asked of every row several times a step; the enum's own answer, a new flag, takes ten times as long.
    __and__ = int.__and__  # type: ignore[assignment]


class Closed(enum.StrEnum):
    """What closed a step's budget: why no more work went in."""

    KV = "kv"
    TOKENS = "tokens"
    SEQUENCES = "sequences"
    COMPUTE = "compute"
    BANDWIDTH = "bandwidth"
    EMPTY = "empty"


class DecisionKind(enum.StrEnum):
    """What the scheduler decided about a request."""

    ADMIT = "admit"
    WAIT = "wait"
    SKIP = "skip"
    REFUSE = "refuse"
    PREEMPT = "preempt"
    EVICT = "evict"


@valueclass
class Decision:
    """One decision with its reason. The log line, the metric's label, the timeline and the live page come from it.

    Attributes:
        kind: what was decided.
        request_id: about whom.
        reason: a short code: ``kv_blocks``, ``token_budget``, ``sequences``, ``batch_closed``, ``prefill_first``,
            ``preempted_this_step``, ``decodes_due``, ``in_flight``, ``fence``, ``prefix_in_flight``, ``idle_prefixes``,
            ``adapter_slots``, ``adapter_drain`` (the next slot is somebody's who waited too long), ``fits``,
            ``swapped_in``, ``recompute``, ``swap``, ``host_full`` (recompute, because swap has no room),
            ``prefix_from_host``, ``prefix_to_host``.
        needed, available: in the unit of the reason (blocks, tokens or sequences).
        blocker: the request that stands in the way, where there is one.
        predicted_s: predicted seconds by treatment (``swap``, ``recompute``, ``copy``, ``compute``, …), where they were
            compared.
    """

    kind: DecisionKind
    request_id: int
    reason: str
    needed: int = 0
    available: int = 0
    blocker: int | None = None
    predicted_s: tuple[tuple[str, float], ...] = ()


@valueclass
class Admission:
    """All that the executor must know of a request that enters (or comes back).

    Attributes:
        request_id: a known id means that it comes back: its generator and penalties' counts stay as they are.
        token_ids: prompt and what was generated so far.
        num_prompt_tokens: how many of them are prompt.
        sampling, eos_token_ids: as in the request.
        adapter: load id, or None.
        num_cached_tokens: leading tokens whose KV is taken from a shared prefix; its first row begins behind them.
    """

    request_id: int
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    sampling: SamplingParams
    eos_token_ids: tuple[int, ...]
    adapter: int | None = None
    num_cached_tokens: int = 0


@valueclass
class Row:
    """A request's part of a step other than a steady decode: a chunk of tokens that are not computed yet.

    Attributes:
        request_id: whose.
        num_new_tokens: tokens computed in this step, at least 1.
        context: tokens computed before this step.
        new_blocks: block ids by KV group: those added since the last plan, or the whole table where ``whole_table``.
        whole_table: the executor must forget what it knew of the table.
        logits: where logits are wanted.
        draft_tokens: speculated tokens at the end of the new ones.
        adapter: load id of its LoRA adapter, or None.
        forks: request ids that sample from this row's last logits too, each for itself; the plan's ``forks`` give them
            the row's blocks.
    """

    request_id: int
    num_new_tokens: int
    context: int
    new_blocks: tuple[tuple[int, ...], ...] = ()
    whole_table: bool = False
    logits: LogitsAt = LogitsAt.NONE
    draft_tokens: tuple[int, ...] = ()
    adapter: int | None = None
    forks: tuple[int, ...] = ()


@valueclass
class DecodeRows:
    """The steady decodes of a step: each has one new token and is sampled. They come before all other rows.

    All of them run in a step or none does, so their contexts advance together: row i's context is
    ``offsets[i] + tick``. Two plans with one ``version`` hold the same requests in the same order, so that an executor
    need not look at each of them again.

    Attributes:
        request_ids: in row order.
        offsets: context minus tick, by row.
        tick: counts the steps in which decodes ran.
        version: changes whenever ids or offsets do.
        context_tokens: sum of the contexts (computed tokens before this step).
        grown: (request id, new block ids by KV group) of those that cross into a new block now.
    """

    request_ids: tuple[int, ...] = ()
    offsets: tuple[int, ...] = ()
    tick: int = 0
    version: int = 0
    context_tokens: int = 0
    grown: tuple[tuple[int, tuple[tuple[int, ...], ...]], ...] = ()

    def __len__(self) -> int:
        return len(self.request_ids)


@valueclass
class BlockCopy:
    """Copy a block within the device before the forward pass (copy-on-write)."""

    group: int
    source: int
    target: int


@valueclass
class Fork:
    """A request goes on from another's tokens and blocks; both share the blocks until one of them writes.

    Attributes:
        request_id: whose tokens and table are replaced.
        parent: whose first tokens and blocks it takes over; may be itself.
        num_tokens: how many of the parent's tokens.
        token_id: the token behind them; None: this step samples it (see ``Row.forks``).
    """

    request_id: int
    parent: int
    num_tokens: int
    token_id: int | None = None


@valueclass
class OwnBlock:
    """A request gets a block of its own in place of one that it shared; ``copies`` fill it.

    Attributes:
        request_id: whose table.
        index: of the logical block.
        blocks: its new physical ids, by KV group.
    """

    request_id: int
    index: int
    blocks: tuple[int, ...]


@valueclass
class BlockSwap:
    """Move a block between device and host before the forward pass; ``host_block`` is the same in every group."""

    group: int
    device_block: int
    host_block: int


@valueclass
class SwapNote:
    """Whose blocks a step moves between device and host.

    Attributes:
        request_id: whose; ``NOBODY``: evicted prefix blocks.
        blocks_out, blocks_in: logical blocks (each moves in every KV group).
        num_bytes: of them all, in all groups.
    """

    request_id: int
    blocks_out: int = 0
    blocks_in: int = 0
    num_bytes: int = 0


@valueclass
class StepPlan:
    """One step.

    Order of work: adapters out and in, swaps out, swaps in, copies, forward, sampling. Tables change in this order:
    whole tables and new blocks of rows, forks, blocks that decodes grow by, own blocks in place of shared ones.

    Attributes:
        step_id: 1, 2, 3, … within an engine.
        time_ns: the clock when it was planned.
        decodes: the steady decodes, rows ``0 … len(decodes) − 1``.
        rows: every other row, after the decodes.
        admissions: requests that enter or come back in this step.
        preempted: requests whose KV was given up; the executor keeps their generators.
        released: requests that the executor may forget, before it runs this step.
        copies, swaps_out, swaps_in: block moves.
        swapped: whose blocks the swaps move.
        forks: requests that take over another's tokens and blocks.
        own_blocks: shared blocks that were replaced, since this step writes in them.
        adapters: LoRA adapters that its rows use, the steady decodes' included.
        adapters_in: copied into slots first; what was there before has no rows any more.
        adapters_out: load ids whose slots are emptied first.
        decisions: with their reasons.
        closed: why no more work went in.
        pending_step: id of the newest step in flight when this was planned: a row's last input token may be one that
            that step samples. None: every input token is known.
        padded_tokens: tokens after padding; equals ``num_tokens`` where nothing is padded.
        bucket: the batch bucket that a captured graph uses, or None.
    """

    step_id: int
    time_ns: int
    decodes: DecodeRows = field(default_factory=DecodeRows)
    rows: tuple[Row, ...] = ()
    admissions: tuple[Admission, ...] = ()
    preempted: tuple[int, ...] = ()
    released: tuple[int, ...] = ()
    copies: tuple[BlockCopy, ...] = ()
    swaps_out: tuple[BlockSwap, ...] = ()
    swaps_in: tuple[BlockSwap, ...] = ()
    swapped: tuple[SwapNote, ...] = ()
    forks: tuple[Fork, ...] = ()
    own_blocks: tuple[OwnBlock, ...] = ()
    adapters: tuple[AdapterRows, ...] = ()
    adapters_in: tuple[AdapterLoad, ...] = ()
    adapters_out: tuple[int, ...] = ()
    decisions: tuple[Decision, ...] = ()
    closed: Closed = Closed.EMPTY
    pending_step: int | None = None
    padded_tokens: int = 0
    bucket: int | None = None

    @property
    def num_rows(self) -> int:
        """Rows in all, decodes first."""
        return len(self.decodes.request_ids) + len(self.rows)

    @property
    def num_tokens(self) -> int:
        """New tokens in all, before padding."""
        count = len(self.decodes.request_ids)
        return count + sum(row.num_new_tokens for row in self.rows) if self.rows else count

    @property
    def num_sampled(self) -> int:
        """Tokens that are sampled."""
        count = len(self.decodes.request_ids)
        if not self.rows:
            return count
        return count + sum(1 + len(row.forks) for row in self.rows if row.logits & LogitsAt.LAST)

    def all_rows(self) -> Iterator[Row]:
        """Every row spelled out, decodes first: for replays, tests and people."""
        grown = dict(self.decodes.grown)
        for request_id, offset in zip(self.decodes.request_ids, self.decodes.offsets, strict=True):
            yield Row(request_id, 1, offset + self.decodes.tick, grown.get(request_id, ()), logits=LogitsAt.LAST)
        yield from self.rows
