"""Work for the ledger's benchmarks: requests that arrive at given seconds, served by an engine in this process."""

from __future__ import annotations

import random
import sys
import time
from dataclasses import dataclass

from foliolm.core.config import EngineConfig
from foliolm.core.request import EngineRequest
from foliolm.core.sampling import SamplingParams
from foliolm.engine.engine import Engine


@dataclass(frozen=True)
class Job:
    """A request: second of arrival, prompt tokens, output tokens."""

    at: float
    prompt: int
    output: int


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def engine_for(model: str, **settings) -> Engine:
    from foliolm.assemble import build_engine
    from foliolm.engine.threads import bound_spinning

    bound_spinning()
    return build_engine(EngineConfig(model=model, **settings), report=say)


def serve(engine: Engine, jobs: list[Job], seed: int = 0) -> list[tuple[int, float]]:
    """Serve the jobs in real time; returns (request id, second) of each token, in order."""
    rng = random.Random(seed)
    known = max((record.request_id for record in engine.ledger.requests), default=0)
    prompts = [tuple(rng.randrange(100, 40000) for _ in range(job.prompt)) for job in jobs]
    order = sorted(range(len(jobs)), key=lambda i: jobs[i].at)
    began, tokens = time.monotonic(), []
    while order or engine.has_work:
        now = time.monotonic() - began
        while order and jobs[order[0]].at <= now:
            index = order.pop(0)
            sampling = SamplingParams(temperature=0, max_tokens=jobs[index].output, ignore_eos=True)
            stamp = time.monotonic_ns()
            request = EngineRequest(known + 1 + index, prompts[index], sampling, arrival_ns=stamp, sent_ns=stamp)
            engine.add([request])
        if not engine.has_work:
            time.sleep(max(0.0, jobs[order[0]].at - now))
            continue
        for output in engine.step():
            assert output.error is None, output.error
            tokens += [(output.request_id - known, time.monotonic() - began)] * len(output.token_ids)
    engine.take_finished()
    return tokens
