"""Runs one plan: moves of blocks, the batch, the model, the tokens."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from foliolm.core.grammar import Grammars
from foliolm.core.plan import StepPlan
from foliolm.core.request import TokenLogprobs
from foliolm.core.result import StepResult, StepSeconds
from foliolm.executor.torch.adapters import HostAdapters, SlotTable
from foliolm.executor.torch.batch import BatchBuilder, PromptSpan, StepBatch
from foliolm.executor.torch.grouping import Grouping
from foliolm.executor.torch.kv_tensors import KVTensors
from foliolm.executor.torch.requests import RequestTable
from foliolm.executor.torch.sampler import Sampled, Sampler, token_logprobs
from foliolm.model.decoder import Model
from foliolm.model.native import NativeModel
from foliolm.ops.attention import make_attention
from foliolm.ops.lora import LoraRows

PROMPT_LOGPROB_BYTES = 32 << 20
"""Logits of prompt positions held at once."""


class ModelRunner:
    """All that a step touches. Plans must come in order, one at a time.

    Args:
        model: the weights.
        kv: the pool.
        seed: the engine's; None: fresh entropy for requests without a seed.
        grammars: compiles what answers must follow; None: no request may have a grammar.
        adapters: LoRA adapters in host memory; None: no request may have one.
    """

    def __init__(
        self,
        model: Model,
        kv: KVTensors,
        seed: int | None = None,
        grammars: Grammars | None = None,
        adapters: HostAdapters | None = None,
    ) -> None:
        self._model = model
        self._native = model if isinstance(model, NativeModel) else None
        self._kv = kv
        self._attention = None if model.native else make_attention(model.device, kv.block_size)
        self.requests = RequestTable(len(kv.specs), model.num_tokens, seed, grammars)
        self._slots: SlotTable | None = None
        if adapters is not None and model.lora is not None:
            self._slots = SlotTable(model.lora, adapters, model.device)
        spec = kv.specs[0]
        self._batches = BatchBuilder(
            self.requests,
            kv.specs,
            kv.block_size,
            Grouping.of_layer(spec.bytes_per_token // spec.num_layers),
            self._attention is None or self._attention.varlen,
            model.device,
            model.dtype,
            self._slots,
        )
        self._sampler = Sampler(self.requests, self._native.library if self._native else None)

    def run(self, plan: StepPlan, since: float | None = None) -> StepResult:
        """One step.

        Args:
            plan: what to run.
            since: ``time.perf_counter()`` from which the step's total counts; None: now.

        Raises:
            KeyError, ValueError: the plan contradicts what the executor knows.
        """
        if self._model.native:  # nothing of a plain step is PyTorch's then, whose modes it need not enter and leave
            return self._run(plan, since)
        with torch.inference_mode():
            return self._run(plan, since)

    def _run(self, plan: StepPlan, since: float | None) -> StepResult:
        began = time.perf_counter()
        self._take_changes(plan)
        if not plan.num_rows:
            return StepResult(plan.step_id, [], StepSeconds(time.perf_counter() - (since or began)))
        if plan.bucket is not None:
            raise ValueError(f"step {plan.step_id} asks for batch bucket {plan.bucket}; no captured graphs are kept")
        batch = self._batches.build(plan)
        prepared = time.perf_counter()
        hidden = self._model.forward(batch.step, self._kv.layers, self._attention)
        sampling = len(batch.sampled_rows)
        logits: Tensor | None = None
        sampled = Sampled(np.zeros(0, np.int64))
        plain = batch.plain and sampling and self._head_adapters(batch, 0, sampling) is None
        if plain and batch.greedy:
            sampled = self._sampler.plain(*self._model.likeliest(hidden))
        elif plain and self._native is not None:
            sampled = self._sampler.plain(*self._native.drawn(hidden, self._sampler.asked(batch.sampled_slots)))
        elif sampling:
            logits = self._logits(hidden, batch, 0, sampling)
        if self._model.device.type == "cuda":
            torch.cuda.synchronize(self._model.device)
        computed = time.perf_counter()
        prompts = {span.row: self._prompt_logprobs(hidden, batch, span) for span in batch.spans}
        if logits is not None:
            sampled = self._sampler.sample(logits, batch.sampled_slots)
        self.requests.append(batch.sampled_slots, sampled.tokens)
        ended = time.perf_counter()
        seconds = StepSeconds(
            ended - (began if since is None else since), prepared - began, computed - prepared, ended - computed
        )
        return _result(plan, batch, sampled, prompts, seconds)

    def _take_changes(self, plan: StepPlan) -> None:
        for request_id in plan.released:
            self.requests.release(request_id)
        for request_id in plan.preempted:
            self.requests.forget_table(request_id)
        for note in plan.admissions:
            self.requests.admit(note)
        if plan.swaps_out or plan.swaps_in or plan.copies:
            self._kv.swap_out(plan.swaps_out)
            self._kv.swap_in(plan.swaps_in)
            self._kv.copy(plan.copies)
        if self._slots is not None:
            self._slots.take_changes(plan)

    def _logits(self, hidden: Tensor, batch: StepBatch, start: int, count: int) -> Tensor:
        """[count, V] of the step's logit rows from ``start`` on."""
        return self._model.logits(hidden[start : start + count], self._head_adapters(batch, start, count))

    def _head_adapters(self, batch: StepBatch, start: int, count: int) -> LoraRows | None:
        """What adapts the output head in some of those rows; None: nothing does."""
        rows = batch.step.lora_outputs
        if rows is None or self._slots is None or not self._slots.has_head:
            return None
        mine = rows.take(slice(start, start + count))
        return mine if mine.any else None

    def _prompt_logprobs(self, hidden: Tensor, batch: StepBatch, span: PromptSpan) -> list[TokenLogprobs | None]:
        """Entries of a span, a few positions at a time: a long chunk's logits would not fit in memory."""
        requests = self.requests
        params = requests.sampling[span.slot]
        if params is None or params.prompt_logprobs is None:
            raise ValueError(f"row {span.row} wants logits everywhere, its request asked for no prompt logprobs")
        entries: list[TokenLogprobs | None] = [None] if span.context == 0 else []
        step = max(1, PROMPT_LOGPROB_BYTES // (4 * self._model.num_tokens))
        for first in range(0, span.count, step):
            count = min(step, span.count - first)
            start = span.context + first + 1
            successors = requests.tokens[span.slot, start : start + count].astype(np.int64)
            at = span.start + first
            logits = self._logits(hidden, batch, at, count)
            entries += token_logprobs(logits, successors, params.prompt_logprobs)
        return entries


def _result(
    plan: StepPlan,
    batch: StepBatch,
    sampled: Sampled,
    prompts: dict[int, list[TokenLogprobs | None]],
    seconds: StepSeconds,
) -> StepResult:
    """By the plan's rows, what the sampler has by sampled rows."""
    chosen = sampled.tokens.tolist()
    if not (plan.rows or sampled.errors or sampled.logprobs or sampled.ended):
        return StepResult(plan.step_id, [[token] for token in chosen], seconds)
    rows: Sequence[int] = batch.sampled_rows.tolist()
    if rows == list(range(plan.num_rows)) and not sampled.errors:
        tokens = [[token] for token in chosen]
    else:
        tokens = [[] for _ in range(plan.num_rows)]
        for index, (row, token) in enumerate(zip(rows, chosen, strict=True)):
            if index not in sampled.errors:
                tokens[row].append(token)
    logprobs: dict[int, list[TokenLogprobs]] = {}
    for index, entry in sampled.logprobs.items():
        logprobs.setdefault(rows[index], []).append(entry)
    return StepResult(
        plan.step_id,
        tokens,
        seconds,
        logprobs,
        prompts,
        {rows[index]: error for index, error in sampled.errors.items()},
        frozenset(rows[index] for index in sampled.ended),
    )
