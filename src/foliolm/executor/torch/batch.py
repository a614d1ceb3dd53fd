"""From a plan to the tensors of one packed, variable-length batch.

Rows with one new token come first, longest context first, so that those of like length lie side by side; chunks follow.
Steady decodes keep their order from step to step; what a step then does for them is a handful of array operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from foliolm.core.kvspec import KVSpec
from foliolm.core.plan import DecodeRows, LogitsAt, Row, StepPlan
from foliolm.executor.torch.adapters import SlotTable
from foliolm.executor.torch.grouping import Grouping
from foliolm.executor.torch.kept_step import KeptStep
from foliolm.executor.torch.requests import RequestTable
from foliolm.model.decoder import StepInput
from foliolm.ops.attention import AttentionLayout, Chunk, DecodeGroup, VarlenRows
from foliolm.ops.lora import LoraRows

Ints = NDArray[np.int64]
REGROUP_TICKS = 64
"""Steady decodes keep their grouping for so many steps: contexts grow alike, so it ages slowly."""


@dataclass(frozen=True, slots=True)
class PromptSpan:
    """Positions of a row whose successors are prompt tokens with logprobs wanted.

    Attributes:
        row: index in the plan.
        slot: of its request.
        context: first position.
        count: positions.
        start: the first one's place in the step's logit rows.
    """

    row: int
    slot: int
    context: int
    count: int
    start: int


@dataclass(frozen=True, slots=True)
class StepBatch:
    """A step's batch.

    Attributes:
        step: the model's input; its first ``len(sampled_rows)`` logit rows sample, those of ``spans`` follow.
        sampled_rows: [S] indices in the plan of the rows that sample, one a token.
        sampled_slots: [S] their requests' slots.
        spans: where prompt logprobs are wanted.
        plain: every row that samples chooses by its logits as they are, and reports nothing.
        greedy: each takes the likeliest token.
    """

    step: StepInput
    sampled_rows: Ints
    sampled_slots: Ints
    spans: tuple[PromptSpan, ...]
    plain: bool
    greedy: bool


@dataclass(slots=True)
class _Singles:
    """Rows of one new token, in batch order.

    Attributes:
        slots, contexts, rows: [B], ``rows`` being their indices in the plan.
        bounds: by KV group, where groups of alike contexts begin and end.
    """

    slots: Ints
    contexts: Ints
    rows: Ints
    bounds: list[list[int]]


@dataclass(slots=True)
class _Steady:
    """What is kept for steady decodes while their version stays.

    Attributes:
        version: of the decodes.
        tick: at which they were grouped.
        singles: with contexts at tick 0.
        token_of_row: [B] each row's token in the batch.
        logit_rows: the same, on the device.
        lora, lora_outputs: the adapters of its tokens, in the batch's order and in that of its rows.
        kept: the batch of the step before, where that held nothing else.
    """

    version: int
    tick: int
    singles: _Singles
    token_of_row: Ints
    logit_rows: torch.Tensor
    lora: LoraRows | None
    lora_outputs: LoraRows | None
    kept: KeptStep | None = None


class BatchBuilder:
    """Makes batches; one instance an executor.

    Args:
        table: the requests' state.
        specs: the model's KV groups.
        block_size: tokens a block.
        grouping: which single-token rows are computed together.
        varlen: lay the batch out for the variable-length kernel.
        device, dtype: of the model.
        adapters: the slots of LoRA adapters; None: no request may have one.
    """

    def __init__(
        self,
        table: RequestTable,
        specs: Sequence[KVSpec],
        block_size: int,
        grouping: Grouping,
        varlen: bool,
        device: torch.device,
        dtype: torch.dtype,
        adapters: SlotTable | None = None,
    ) -> None:
        self._table = table
        self._adapters = adapters
        self._windows = [spec.window for spec in specs]
        self._p = block_size
        self._grouping = grouping
        self._varlen = varlen
        self._device = device
        self._dtype = dtype
        self._steady: _Steady | None = None
        self._keeps = varlen and device.type == "cpu"

    def build(self, plan: StepPlan) -> StepBatch:
        """Take in the plan's new blocks, and lay its rows out.

        Raises:
            KeyError: a row's request was never admitted.
            ValueError: the plan contradicts what the executor knows (tokens, blocks), or asks for what it cannot do.
        """
        table, decodes = self._table, plan.decodes
        slots = [self._take_row(row) for row in plan.rows]
        table.fork(plan.forks, self._p)
        for request_id, blocks in decodes.grown:
            table.add_blocks(table.slot(request_id), blocks, whole_table=False)
        for own in plan.own_blocks:
            table.replace_block(own)
        steady = self._decodes(decodes)
        kept, steady.kept = steady.kept, None
        if kept is not None and not plan.rows and (batch := kept.advanced(decodes.tick)) is not None:
            steady.kept = kept
            return batch
        singles = self._singles(steady, plan, slots)
        chunks = [
            (i, row, slot) for i, (row, slot) in enumerate(zip(plan.rows, slots, strict=True)) if row.num_new_tokens > 1
        ]

        count = len(singles.slots)
        positions, owners, starts = [singles.contexts], [singles.slots], []
        for _, row, slot in chunks:
            starts.append(count)
            positions.append(np.arange(row.context, row.context + row.num_new_tokens))
            owners.append(np.full(row.num_new_tokens, slot))
            count += row.num_new_tokens
        where, who = np.concatenate(positions), np.concatenate(owners)
        self._check(where, who)
        layouts = tuple(self._layout(group, singles, chunks, starts, where, who) for group in range(len(self._windows)))
        rows, sampled_rows, sampled_slots, spans = self._logit_rows(plan, steady, singles, chunks, starts, slots)
        ids = torch.from_numpy(table.tokens[who, where].astype(np.int64))
        lora, lora_outputs = steady.lora, steady.lora_outputs
        if self._adapters is not None and plan.rows:
            lora = self._adapters.rows(table.adapters[who])
            lora_outputs = None if lora is None else lora.take(rows.cpu().numpy())
        step = StepInput(
            ids.to(self._device), torch.from_numpy(where).to(self._device), layouts, rows, lora, lora_outputs
        )
        plain = not spans and bool(table.sampling_rows.plain[sampled_slots].all())
        greedy = bool(table.sampling_rows.greedy[sampled_slots].all())
        batch = StepBatch(step, sampled_rows, sampled_slots, spans, plain, greedy)
        if self._keeps and not plan.rows:
            steady.kept = KeptStep(batch, decodes.tick, who, table, self._p)
        return batch

    # --- rows

    def _take_row(self, row: Row) -> int:
        if row.draft_tokens:
            raise ValueError(f"request {row.request_id}: this executor does not verify draft tokens")
        if row.adapter is not None and self._adapters is None:
            raise ValueError(f"request {row.request_id}: this executor has no adapter {row.adapter}")
        slot = self._table.slot(row.request_id)
        self._table.add_blocks(slot, row.new_blocks, row.whole_table)
        if row.logits & LogitsAt.LAST and row.context + row.num_new_tokens != self._table.lengths[slot]:
            raise ValueError(
                f"request {row.request_id}: a row that samples ends at token {row.context + row.num_new_tokens}, "
                f"the request has {self._table.lengths[slot]}"
            )
        return slot

    def _decodes(self, decodes: DecodeRows) -> _Steady:
        """The steady decodes in batch order, from the step before where their version is the same."""
        steady = self._steady
        if (
            steady is not None
            and steady.version == decodes.version
            and len(steady.singles.slots) == len(decodes)
            and 0 <= decodes.tick - steady.tick < REGROUP_TICKS
        ):
            return steady
        slots = self._table.slots(decodes.request_ids)
        singles = self._ordered(slots, np.array(decodes.offsets, np.int64) + decodes.tick, np.arange(len(slots)))
        token_of_row = np.empty(len(slots), np.int64)
        token_of_row[singles.rows] = np.arange(len(slots))
        singles.contexts -= decodes.tick
        lora = None
        if self._adapters is not None and len(slots):
            lora = self._adapters.rows(self._table.adapters[singles.slots])
        steady = _Steady(
            decodes.version,
            decodes.tick,
            singles,
            token_of_row,
            torch.from_numpy(token_of_row).to(self._device),
            lora,
            None if lora is None else lora.take(token_of_row),
        )
        self._steady = steady
        return steady

    def _singles(self, steady: _Steady, plan: StepPlan, slots: Sequence[int]) -> _Singles:
        """Steady decodes together with other rows of a single token."""
        kept = steady.singles
        now = kept.contexts + plan.decodes.tick
        others = [i for i, row in enumerate(plan.rows) if row.num_new_tokens == 1]
        if not others:
            return _Singles(kept.slots, now, kept.rows, kept.bounds)
        return self._ordered(
            np.concatenate((kept.slots, np.array([slots[i] for i in others], np.int64))),
            np.concatenate((now, np.array([plan.rows[i].context for i in others], np.int64))),
            np.concatenate((kept.rows, np.array(others, np.int64) + len(plan.decodes))),
        )

    def _ordered(self, slots: Ints, contexts: Ints, rows: Ints) -> _Singles:
        order = np.argsort(-contexts, kind="stable")
        if self._varlen and self._adapters is not None:  # attention takes rows in any order there
            order = order[np.argsort(self._table.adapters[slots[order]], kind="stable")]
        contexts = contexts[order]
        bounds = []
        for window in self._windows:
            lengths = contexts + 1
            bounds.append(self._grouping.bounds(lengths if window is None else np.minimum(lengths, window)))
        return _Singles(slots[order], contexts, rows[order], bounds)

    def _check(self, where: Ints, who: Ints) -> None:
        """A plan that runs ahead of its tokens or blocks would read rubbish, or write over the null block."""
        table = self._table
        if (where >= table.lengths[who]).any():
            at = int(np.argmax(where >= table.lengths[who]))
            raise ValueError(
                f"the plan computes position {where[at]} of a request that has {table.lengths[who[at]]} tokens"
            )
        for group, held in enumerate(table.num_blocks):
            if (where // self._p >= held[who]).any():
                at = int(np.argmax(where // self._p >= held[who]))
                raise ValueError(
                    f"the plan computes position {where[at]} of a request that holds {held[who[at]]} blocks "
                    f"of {self._p} tokens in KV group {group}"
                )

    def _logit_rows(
        self,
        plan: StepPlan,
        steady: _Steady,
        singles: _Singles,
        chunks: Sequence[tuple[int, Row, int]],
        starts: Sequence[int],
        slots: Sequence[int],
    ) -> tuple[torch.Tensor, Ints, Ints, tuple[PromptSpan, ...]]:
        """Which tokens go to the output head: one a sampled row in the plan's order, then those of prompt logprobs."""
        decodes = len(plan.decodes)
        decode_slots = np.empty(decodes, np.int64)
        decode_slots[steady.singles.rows] = steady.singles.slots
        if not plan.rows:
            return steady.logit_rows, np.arange(decodes), decode_slots, ()
        first = np.empty(plan.num_rows, np.int64)  # each row's first token in the batch
        first[singles.rows] = np.arange(len(singles.rows))
        for (i, _, _), start in zip(chunks, starts, strict=True):
            first[decodes + i] = start
        last, owners = [], []  # a row with forks is sampled for each of them too
        for i, row in enumerate(plan.rows):
            if row.logits & LogitsAt.LAST:
                last += [i] * (1 + len(row.forks))
                owners += [slots[i], *(self._table.slot(rid) for rid in row.forks)]
        sampled = np.concatenate((np.arange(decodes), np.array(last, np.int64) + decodes))
        sampled_slots = np.concatenate((decode_slots, np.array(owners, np.int64)))
        extra = np.array([plan.rows[i].num_new_tokens - 1 for i in last], np.int64)
        tokens = [first[sampled] + np.concatenate((np.zeros(decodes, np.int64), extra))]
        spans, at = [], len(sampled)
        for i, row in enumerate(plan.rows):
            if row.logits & LogitsAt.ALL:
                known = int(self._table.prompt_lengths[slots[i]]) - 1 - row.context
                count = max(0, min(row.num_new_tokens, known))
                spans.append(PromptSpan(decodes + i, slots[i], row.context, count, at))
                tokens.append(np.arange(first[decodes + i], first[decodes + i] + count))
                at += count
        rows = torch.from_numpy(np.concatenate(tokens)).to(self._device)
        return rows, sampled, sampled_slots, tuple(spans)

    # --- layouts

    def _layout(
        self,
        group: int,
        singles: _Singles,
        chunks: Sequence[tuple[int, Row, int]],
        starts: Sequence[int],
        where: Ints,
        who: Ints,
    ) -> AttentionLayout:
        table, window, p = self._table.tables[group], self._windows[group], self._p
        slots = torch.from_numpy(table[who, where // p] * p + where % p).to(self._device)
        if self._varlen:
            return AttentionLayout(slots, window, varlen=self._varlen_rows(table, singles, chunks))
        bounds = singles.bounds[group]
        groups = [self._decode_group(table, window, singles, start, stop) for start, stop in pairwise(bounds)]
        laid = [
            self._chunk(table, window, row, slot, start) for (_, row, slot), start in zip(chunks, starts, strict=True)
        ]
        return AttentionLayout(slots, window, tuple(groups), tuple(laid))

    def _decode_group(self, table: Ints, window: int | None, singles: _Singles, start: int, stop: int) -> DecodeGroup:
        """Blocks of consecutive single-token rows, and a mask where their lengths differ."""
        p = self._p
        slots, contexts = singles.slots[start:stop], singles.contexts[start:stop]
        if window is None:
            width = int(contexts.max()) // p + 1
            blocks = table[slots, :width]
        else:
            first = np.maximum(contexts + 1 - window, 0) // p
            width = int((contexts // p - first).max()) + 1
            columns = np.minimum(first[:, None] + np.arange(width), table.shape[1] - 1)
            blocks = table[slots[:, None], columns]
            contexts = contexts - first * p  # from here on counted from the first gathered position
        newest = int(contexts.max())
        mask = None
        if newest != int(contexts.min()) or (window is not None and newest >= window):
            columns = np.arange(newest + 1)
            hidden = columns > contexts[:, None]
            if window is not None:
                hidden |= columns <= contexts[:, None] - window
            mask = torch.zeros(hidden.shape, dtype=self._dtype).masked_fill_(torch.from_numpy(hidden), -torch.inf)
            mask = mask[:, None, :]
        return DecodeGroup(start, stop, torch.from_numpy(blocks.ravel()), newest + 1, mask)

    def _chunk(self, table: Ints, window: int | None, row: Row, slot: int, start: int) -> Chunk:
        stop = start + row.num_new_tokens
        if row.context == 0:
            return Chunk(start, stop, None, 0)
        first = 0 if window is None else max(0, row.context + 1 - window) // self._p
        end = -(-(row.context + row.num_new_tokens) // self._p)
        return Chunk(start, stop, torch.from_numpy(table[slot, first:end]), row.context - first * self._p)

    def _varlen_rows(self, table: Ints, singles: _Singles, chunks: Sequence[tuple[int, Row, int]]) -> VarlenRows:
        new = np.concatenate((np.ones(len(singles.slots), np.int64), [row.num_new_tokens for _, row, _ in chunks]))
        context = np.concatenate((singles.contexts, [row.context for _, row, _ in chunks]))
        slots = np.concatenate((singles.slots, [slot for _, _, slot in chunks])).astype(np.int64)
        used = (new + context).astype(np.int32)
        width = -(-int(used.max()) // self._p)
        ends = np.concatenate(([0], np.cumsum(new))).astype(np.int32)

        def place(array: NDArray[np.int32]) -> torch.Tensor:
            return torch.from_numpy(array).to(self._device)

        blocks = table[slots, :width].astype(np.int32)
        return VarlenRows(place(ends), place(blocks), place(used), int(new.max()), int(used.max()))
