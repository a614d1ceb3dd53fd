"""The real scheduler over the real executor, step by step and without processes or clocks."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from foliolm.core.grammar import Grammars
from foliolm.core.plan import StepPlan
from foliolm.core.protocols import Prices
from foliolm.core.request import EngineRequest, FinishReason, TokenLogprobs
from foliolm.core.resolve import SchedulerConfig
from foliolm.core.result import StepResult
from foliolm.core.sampling import SamplingParams
from foliolm.executor.torch.executor import TorchExecutor
from foliolm.kv import KVManager
from foliolm.model.decoder import Model
from foliolm.scheduler import Scheduler, SchedulerStats

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=8)


@dataclass
class Generated:
    """What came of a request."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    finish: FinishReason | None = None
    error: str | None = None


@dataclass
class Run:
    """A finished run.

    Attributes:
        by_id: what came of each request.
        plans, results: of every step that ran.
        preemptions: how many there were.
        stats: the scheduler's, at the end.
        executor: closed, but to be looked at.
    """

    by_id: dict[int, Generated]
    plans: list[StepPlan]
    results: list[StepResult]
    preemptions: int
    executor: TorchExecutor
    stats: SchedulerStats | None = None


def request(rid: int, prompt: Sequence[int], eos: tuple[int, ...] = (), **sampling) -> EngineRequest:
    """A greedy request, unless ``sampling`` says otherwise."""
    params = SamplingParams(**{"temperature": 0.0, "ignore_eos": not eos, "max_tokens": 8, **sampling})
    return EngineRequest(rid, tuple(prompt), params, eos, arrival_ns=rid)


def generate(
    model: Model,
    requests: Sequence[EngineRequest],
    *,
    chunk: int = 64,
    block_size: int = 16,
    num_blocks: int = 200,
    depth: int = 0,
    seed: int | None = None,
    max_num_seqs: int | None = None,
    max_model_len: int = 400,
    grammars: Grammars | None = None,
    prices: Prices | None = None,
    adapters: Sequence[Path] = (),
    **settings,
) -> Run:
    """Run requests that arrive together to their ends.

    Args:
        model: the weights.
        requests: what to run.
        chunk: tokens a step beyond one for every running request.
        block_size, num_blocks: of the KV pool, the null block included; a small pool makes preemptions.
        depth: steps in flight while the next is planned.
        seed: the engine's.
        max_num_seqs: most requests in a step; None: all.
        max_model_len: as the flag.
        grammars: compiles what answers must follow.
        prices: of what giving way costs.
        adapters: folders of LoRA adapters, their load ids 1, 2, 3, …; ``max_loras`` (8) of them in a step.
        settings: more of the scheduler's.
    """
    seqs = max_num_seqs or len(requests)
    if adapters:
        settings.setdefault("max_loras", 8)
    config = SchedulerConfig(
        max_model_len=max_model_len,
        block_size=block_size,
        num_blocks=num_blocks,
        max_num_batched_tokens=chunk + seqs - 1,
        max_num_seqs=seqs,
        long_prefill_token_threshold=1 << 30,
        short_prompt_share=0.0,
        **settings,
    )
    executor = TorchExecutor(
        model,
        num_blocks=num_blocks,
        block_size=block_size,
        depth=depth,
        seed=seed,
        grammars=grammars,
        num_host_blocks=config.num_host_blocks,
        max_loras=config.max_loras or 0,
    )
    for load_id, folder in enumerate(adapters, start=1):
        executor.adapters.put(load_id, executor.adapters.read(str(load_id), str(folder))[1])
    scheduler = Scheduler(config, KVManager(executor.kv.specs, num_blocks, block_size), prices=prices)
    for each in requests:
        scheduler.add(each, 0)
    run = Run({each.request_id: Generated() for each in requests}, [], [], 0, executor)
    flights: deque = deque()
    for now in range(1, 100_000):
        if not scheduler.has_work and not flights:
            break
        plan = scheduler.schedule(now)
        if plan.num_rows:
            run.plans.append(plan)
            flights.append((plan, executor.submit(plan)))
        if flights and (len(flights) > depth or not plan.num_rows):
            oldest, handle = flights.popleft()
            result = handle.wait()
            run.results.append(result)
            for output in scheduler.commit(oldest, result, now):
                _take(run.by_id[output.request_id], output)
        assert scheduler.problems() == []
    run.stats = scheduler.stats()
    run.preemptions = run.stats.num_preemptions
    executor.close()
    return run


def _take(into: Generated, output) -> None:
    into.tokens.extend(output.token_ids)
    into.logprobs.extend(output.logprobs)
    into.prompt_logprobs.extend(output.prompt_logprobs)
    into.finish = output.finish_reason or into.finish
    into.error = output.error or into.error
