"""A real scheduler and KV manager with an executor that needs no model: its tokens are a function of the prompt.

Importable by an engine's own process, where ``build`` is the factory.
"""

import os
import time

from foliolm.core.clock import MonotonicClock
from foliolm.core.errors import ConfigError
from foliolm.core.kvspec import KVSpec
from foliolm.core.plan import LogitsAt
from foliolm.core.request import TokenLogprobs
from foliolm.core.resolve import SchedulerConfig
from foliolm.core.result import StepResult, StepSeconds
from foliolm.engine.engine import Engine, EngineInfo
from foliolm.kv import KVManager
from foliolm.ledger.ledger import Ledger
from foliolm.scheduler import Scheduler

VOCAB = 256
STEP_FAILS = 250  # a step with this token in a prompt raises
PROCESS_DIES = 251  # a step with this token in a prompt ends the process
SUBMIT_FAILS = 252  # submitting a step with this token in a prompt raises


def expected(prompt, count):
    """The tokens that the fake executor gives for a prompt: the bytes of small letters."""
    return [97 + (7 * (len(prompt) + i) + 3 * prompt[0] + prompt[-1]) % 26 for i in range(count)]


class FakeHandle:
    def __init__(self, work):
        self._work = work

    def wait(self):
        return self._work()


class FakeExecutor:
    def __init__(self, step_seconds=0.0):
        self.step_seconds = step_seconds
        self.tokens = {}
        self.prompts = {}
        self.sampling = {}
        self.submitted = []
        self.closed = False

    def submit(self, plan):
        self.submitted.append(plan.step_id)
        for request_id in plan.released:
            for state in (self.tokens, self.prompts, self.sampling):
                state.pop(request_id, None)
        for admission in plan.admissions:
            self.tokens[admission.request_id] = list(admission.token_ids)
            self.prompts[admission.request_id] = list(admission.token_ids[: admission.num_prompt_tokens])
            self.sampling[admission.request_id] = admission.sampling
        # Sampled here, so that the next plan may follow before this one's result is asked for.
        rows, error = [], None
        logprobs = {}
        for position, row in enumerate(plan.all_rows()):
            prompt = self.prompts[row.request_id]
            if SUBMIT_FAILS in prompt:
                raise RuntimeError("submission refused")
            if STEP_FAILS in prompt:
                error = RuntimeError("kernel exploded")
            if PROCESS_DIES in prompt:
                os._exit(9)
            sampled = []
            if row.logits is not LogitsAt.NONE:
                done = len(self.tokens[row.request_id]) - len(prompt)
                sampled = [expected(prompt, done + 1)[done]]
                for request_id in (row.request_id, *row.forks):
                    self.tokens[request_id] += sampled
                top = self.sampling[row.request_id].logprobs
                if top is not None:
                    ranked = tuple((sampled[0] + i, -0.5 - i) for i in range(top))
                    logprobs[position] = [TokenLogprobs(sampled[0], -0.5, 1, ranked)] * (1 + len(row.forks))
                sampled *= 1 + len(row.forks)
            rows.append(sampled)

        def work():
            if self.step_seconds:
                time.sleep(self.step_seconds)
            if error is not None:
                raise error
            return StepResult(plan.step_id, rows, StepSeconds(max(self.step_seconds, 1e-6)), logprobs=logprobs)

        return FakeHandle(work)

    def close(self):
        self.closed = True


def build(step_seconds=0.0, refuse=None, start_seconds=0.0, engine_index=0, report=lambda text: None, **settings):
    """An engine; keyword arguments beyond the first are ``SchedulerConfig``'s, and ``depth``."""
    report("building a fake engine")
    time.sleep(start_seconds)
    if refuse == "config":
        raise ConfigError("--block-size is 0; it must be at least 1")
    if refuse == "crash":
        raise ZeroDivisionError("a bug in the factory")
    if refuse == "exit":
        os._exit(7)
    depth = settings.pop("depth", 0)
    config = SchedulerConfig(
        **{"max_model_len": 128, "num_blocks": 257, "block_size": 4, "max_num_batched_tokens": 64, "max_num_seqs": 16}
        | {"long_prefill_token_threshold": 32}
        | settings
    )
    spec = KVSpec("all", num_layers=1, bytes_per_token=4)
    scheduler = Scheduler(config, KVManager([spec], config.num_blocks, config.block_size))
    info = EngineInfo("fake", config.max_model_len, VOCAB, config.block_size, config.num_blocks - 1)
    return Engine(scheduler, FakeExecutor(step_seconds), MonotonicClock(), Ledger(engine_index), info, depth)


def build_from(settings, engine_index=0, report=lambda text: None):
    """The factory for an engine's own process: settings as one picklable dict."""
    return build(**settings, engine_index=engine_index, report=report)
