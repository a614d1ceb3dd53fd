"""The executor that computes: plans in, tokens out, strictly in order."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from foliolm.core.grammar import Grammars
from foliolm.core.plan import Admission, BlockSwap, DecodeRows, LogitsAt, Row, StepPlan
from foliolm.core.result import StepResult
from foliolm.core.sampling import SamplingParams
from foliolm.executor.torch.adapters import HostAdapters
from foliolm.executor.torch.kv_tensors import KVTensors
from foliolm.executor.torch.runner import ModelRunner
from foliolm.model.decoder import Model

WARM_UP_SEQS = 64
"""Rows of the warm-up's decode step at most."""


class Done:
    """A step that ran, or failed, when it was submitted."""

    def __init__(self, run: Callable[[], StepResult]) -> None:
        self._result: StepResult | None = None
        self._error: BaseException | None = None
        try:
            self._result = run()
        except Exception as error:
            self._error = error

    def wait(self) -> StepResult:
        """The result. Raises what the step raised."""
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result


class Pending:
    """A step that a worker thread runs."""

    def __init__(self, future: Future[StepResult]) -> None:
        self._future = future

    def wait(self) -> StepResult:
        """Block for the result. Raises what the step raised."""
        return self._future.result()


class TorchExecutor:
    """Runs plans on a model in this process.

    A step's input may be a token that the step before it samples: steps run in order, and the tokens are kept here, so
    that it is there when it is needed.

    Args:
        model: the weights.
        num_blocks: KV blocks a group, the null block included.
        block_size: tokens a block.
        depth: 0: a step runs when it is submitted; 1 or more: on one worker thread, while the caller plans on.
        seed: the engine's; None: fresh entropy for requests without a seed.
        num_host_blocks: KV blocks a group in host memory, for swaps.
        grammars: compiles what answers must follow; None: no request may have a grammar.
        max_loras: LoRA adapters that a step may use; 0: none.
        max_lora_rank: largest rank of one.

    Raises:
        ConfigError: the device's kernels cannot use blocks of this size.
    """

    def __init__(
        self,
        model: Model,
        *,
        num_blocks: int,
        block_size: int,
        depth: int = 0,
        seed: int | None = None,
        num_host_blocks: int = 0,
        grammars: Grammars | None = None,
        max_loras: int = 0,
        max_lora_rank: int = 16,
    ) -> None:
        self.model = model
        self.adapters: HostAdapters | None = None
        if max_loras:
            self.adapters = HostAdapters(model.shape, model.enable_lora(max_loras), max_lora_rank)
        self.kv = KVTensors(model.shape, model.kv_dtype, model.device, num_blocks, block_size, num_host_blocks)
        self._runner = ModelRunner(model, self.kv, seed, grammars, self.adapters)
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="foliolm-executor") if depth else None
        self._ended = 0.0

    def submit(self, plan: StepPlan) -> Done | Pending:
        """Begin a step. Failures are raised by the handle."""
        submitted = time.perf_counter()
        if self._worker is None:
            return Done(lambda: self._run(plan, submitted))
        return Pending(self._worker.submit(self._run, plan, submitted))

    def close(self) -> None:
        """End the worker thread; no step may be in flight."""
        if self._worker is not None:
            self._worker.shutdown()

    def measure_prefill_rate(self, chunk: int) -> float:
        """Tokens a second of a step that computes one prompt chunk; runs it twice and takes the faster.

        No request may be live: blocks from 1 on are written.

        Args:
            chunk: tokens; cut to what the pool holds.
        """
        chunk = min(chunk, (self.kv.num_blocks - 1) * self.kv.block_size)
        best = min(self._time_prompts([chunk]) for _ in range(2))
        return chunk / best

    def warm_up(self, max_num_batched_tokens: int, max_num_seqs: int, max_model_len: int) -> float:
        """Run the largest prefill step and a full decode step through the real path; returns seconds.

        What is made once (threads, kernels of a shape, scratch memory) is then made before the first request, and a
        setting that does not fit in memory fails now. No request may be live: blocks from 1 on are written.
        """
        began = time.perf_counter()
        free, left, lengths = self.kv.num_blocks - 1, max_num_batched_tokens, []
        while free and left:
            length = min(max_model_len, left, free * self.kv.block_size)
            lengths.append(length)
            left -= length
            free -= -(-length // self.kv.block_size)
        self._time_prompts(lengths)
        self._time_decodes(min(max_num_seqs, WARM_UP_SEQS, self.kv.num_blocks - 1))
        return time.perf_counter() - began

    def time_rows(self, rows: list[tuple[int, int]]) -> float:
        """Seconds of one step of made-up requests, (new tokens, context) each; all of them sample.

        No request may be live: blocks from 1 on are written.
        """
        return self._time_own(rows)

    def time_swaps(self, blocks: int) -> float:
        """Seconds to move so many logical blocks to the host and back; the fastest of three. None may be in use."""
        swaps = [BlockSwap(group, block + 1, block) for group in range(len(self.kv.specs)) for block in range(blocks)]
        best = float("inf")
        for _ in range(3):
            began = time.perf_counter()
            self.kv.swap_out(swaps)
            self.kv.swap_in(swaps)
            if self.model.device.type == "cuda":
                torch.cuda.synchronize(self.model.device)
            best = min(best, time.perf_counter() - began)
        return best

    def _run(self, plan: StepPlan, submitted: float) -> StepResult:
        # From completion to completion where a step waited for the one before it.
        try:
            return self._runner.run(plan, max(submitted, self._ended))
        finally:
            self._ended = time.perf_counter()

    def _time_prompts(self, lengths: list[int]) -> float:
        """Seconds of one step with whole prompts of these lengths."""
        return self._time_own([(length, 0) for length in lengths])

    def _time_decodes(self, count: int) -> float:
        """Seconds of a step with so many decodes on one block of context each."""
        return self._time_own([(1, self.kv.block_size - 1)] * count)

    def _time_own(self, rows: list[tuple[int, int]]) -> float:
        """Seconds of one step of made-up requests: (new tokens, context) each."""
        blocks = itertools.count(1)
        admissions, plan_rows = [], []
        for request_id, (new, context) in enumerate(rows):
            request_id = -1 - request_id  # never an engine's
            held = tuple(next(blocks) for _ in range(-(-(new + context) // self.kv.block_size)))
            tokens = tuple((7 * i + 11) % self.model.num_tokens for i in range(new + context))
            admissions.append(Admission(request_id, tokens, len(tokens), SamplingParams(temperature=0.0), ()))
            groups = (held,) * len(self.kv.specs)
            plan_rows.append(Row(request_id, new, context, groups, whole_table=True, logits=LogitsAt.LAST))
        plan = StepPlan(0, 0, rows=tuple(plan_rows), admissions=tuple(admissions))
        released = StepPlan(0, 0, decodes=DecodeRows(), released=tuple(note.request_id for note in admissions))
        seconds = self.submit(plan).wait().seconds.total
        self.submit(released).wait()
        return seconds
