"""A scheduler driven step by step, with an executor that makes up tokens: the loop's shape without its process."""

from __future__ import annotations

from collections import deque

from foliolm.core.kvspec import KVSpec
from foliolm.core.plan import LogitsAt, StepPlan
from foliolm.core.request import EngineRequest, TokenLogprobs, TokenOutput
from foliolm.core.resolve import SchedulerConfig
from foliolm.core.result import StepResult, StepSeconds
from foliolm.core.sampling import SamplingParams
from foliolm.kv import KVManager
from foliolm.scheduler import Scheduler
from support.content import ContentKV

SPEC = KVSpec("all", num_layers=1, bytes_per_token=8)


class MadePrices:
    """Round numbers: a swapped block costs ``swap_s``, a computed token ``token_s``."""

    def __init__(self, swap_s: float, token_s: float = 1.0) -> None:
        self.swap_s, self.token_s = swap_s, token_s
        self.known = True

    def swap(self, blocks: int) -> float:
        return self.swap_s * blocks

    def recompute(self, tokens: int, cached: int, num_decodes: int, decode_context: int) -> float:
        return self.token_s * max(0, tokens - cached)

    def decode_step(self, num_decodes: int, decode_context: int) -> float:
        return self.token_s

    def adapter(self, load_id: int) -> float:
        return 0.1 * load_id


def make_scheduler(groups: int = 1, prices: MadePrices | None = None, **settings) -> Scheduler:
    """A scheduler over a pool of its own; ``settings`` as in SchedulerConfig."""
    settings.setdefault("num_blocks", 33)
    settings.setdefault("block_size", 4)
    settings.setdefault("max_num_seqs", 8)
    settings.setdefault("max_num_batched_tokens", 64)
    settings.setdefault("max_model_len", 64)
    settings.setdefault("long_prefill_token_threshold", 1 << 30)
    settings.setdefault("short_prompt_share", 0.0)
    config = SchedulerConfig(**settings)
    return Scheduler(config, KVManager([SPEC] * groups, config.num_blocks, config.block_size), prices=prices)


def request(rid: int, prompt: int, output: int, arrival: int | None = None, eos: tuple[int, ...] = (), **sampling):
    """A request of ``prompt`` tokens that stops after ``output``."""
    priority = sampling.pop("priority", 0)
    return EngineRequest(
        rid,
        tuple(range(1000, 1000 + prompt)),
        SamplingParams(max_tokens=output, **sampling),
        eos_token_ids=eos,
        arrival_ns=rid if arrival is None else arrival,
        priority=priority,
    )


def token_for(rid: int, position: int) -> int:
    """The token that the made-up model puts at a position: depends on nothing but request and position."""
    return (rid * 7919 + position * 104729) % 997


def candidates_for(rid: int, position: int, count: int) -> TokenLogprobs:
    """What the made-up model says may follow a hypothesis: ``count`` tokens, likeliest first."""
    tokens = [token_for(rid, position + 31 * index) for index in range(2 * count)]
    distinct = list(dict.fromkeys(tokens))[:count]
    top = tuple((token, -0.3 * (1 + index) - 0.001 * (token % 97)) for index, token in enumerate(distinct))
    return TokenLogprobs(top[0][0], top[0][1], 1, top)


def result_for(plan: StepPlan, candidates: dict[int, int] | None = None) -> StepResult:
    """What an executor would answer; the sampled token stands right behind the row's tokens.

    ``candidates``: by id of a search's hypotheses, how many continuations are reported.
    """
    tokens = []
    logprobs = {}
    for index, row in enumerate(plan.all_rows()):
        if candidates and row.request_id in candidates and row.logits & LogitsAt.LAST:
            position = row.context + row.num_new_tokens
            logprobs[index] = [candidates_for(row.request_id, position, candidates[row.request_id])]
        sampled = row.logits & LogitsAt.LAST
        position = row.context + row.num_new_tokens
        tokens.append([token_for(rid, position) for rid in (row.request_id, *row.forks)] if sampled else [])
    return StepResult(plan.step_id, tokens, StepSeconds(0.0), logprobs)


class Driver:
    """The engine's loop over made-up tokens, with ``depth`` steps in flight while the next is planned."""

    def __init__(self, scheduler: Scheduler, depth: int = 0, virtual: bool = False) -> None:
        self.scheduler = scheduler
        self.depth = depth
        self.virtual = virtual
        self.now = 0
        self.flights: deque[StepPlan] = deque()
        self.outputs: dict[int, list[int]] = {}
        self.finished: dict[int, TokenOutput] = {}
        self.plans: list[StepPlan] = []
        self.content: ContentKV | None = None
        self.candidates: dict[int, int] = {}

    def watch_content(self, sources: dict[int, EngineRequest]) -> None:
        """From now on every plan is run on a model of the memory's content; ``sources`` by request id."""

        def token(rid: int, position: int) -> int:
            prompt = sources[rid].prompt_token_ids
            return prompt[position] if position < len(prompt) else token_for(rid, position)

        def root(rid: int):
            return sources[rid].adapter, sources[rid].cache_salt

        self.content = ContentKV(self.scheduler.config.block_size, token, root)

    def step(self) -> StepPlan:
        self.now += 1
        plan = self.scheduler.schedule(self.now)
        self.plans.append(plan)
        self.check_admissions(plan)
        if plan.num_rows:
            if self.content is not None:
                self.content.run(plan)
            self.flights.append(plan)
        if self.flights and (len(self.flights) > self.depth or not plan.num_rows):
            self.commit()
        return plan

    def check_admissions(self, plan: StepPlan) -> None:
        """Who enters, or comes back, brings exactly the tokens that its rows then compute."""
        rows = {row.request_id: row for row in plan.rows}
        forked = {fork.request_id for fork in plan.forks}
        for note in plan.admissions:
            rid, prompt = note.request_id, note.num_prompt_tokens
            if rid in forked and rid not in rows:
                continue
            row = rows[rid]
            assert row.whole_table
            assert row.context == note.num_cached_tokens
            if self.virtual:
                continue
            generated = [token_for(rid, position) for position in range(prompt, len(note.token_ids))]
            assert list(note.token_ids[prompt:]) == generated
            if row.logits & LogitsAt.LAST:
                assert row.context + row.num_new_tokens == len(note.token_ids), "a token is not known yet"

    def commit(self) -> None:
        plan = self.flights.popleft()
        result = StepResult(plan.step_id, None, StepSeconds(0.0)) if self.virtual else result_for(plan, self.candidates)
        self.take(self.scheduler.commit(plan, result, self.now))

    def fail(self) -> None:
        if self.content is not None:
            self.content.fail(self.flights[0])
        self.take(self.scheduler.fail(self.flights.popleft(), "it raised", self.now))

    def take(self, outputs: list[TokenOutput]) -> None:
        for output in outputs:
            assert output.request_id not in self.finished, "an output after the end"
            self.outputs.setdefault(output.request_id, []).extend(output.token_ids)
            if output.finish_reason is not None:
                self.finished[output.request_id] = output

    def abort(self, rid: int) -> None:
        for one in self.scheduler.together([rid]):
            output = self.scheduler.abort(one, self.now)
            if output is not None:
                self.take([output])

    def run(self, limit: int = 10_000) -> int:
        """Until nobody lives; returns steps with rows."""
        for count in range(limit):
            if not self.scheduler.has_work and not self.flights:
                return count
            self.step()
            assert self.scheduler.problems() == []
        raise AssertionError(f"{limit} steps and still {self.scheduler.stats()}")
