"""What the ledger keeps of a step and of a request; plain data that crosses processes."""

from __future__ import annotations

from foliolm.core.adapter import AdapterRows
from foliolm.core.plan import Closed, Decision, SwapNote
from foliolm.core.request import FinishReason, RequestStamps
from foliolm.core.result import StepSeconds
from foliolm.core.timeline import RequestTimeline
from foliolm.core.valueclass import valueclass

TERMS = (
    "host",
    "sequences",
    "tokens",
    "linears",
    "decode_attention",
    "prefill_attention",
    "prefix_read",
    "all_reduce",
    "lora",
    "swap",
)
"""Names of the step cost's terms, in the order in which records hold them."""


@valueclass
class StepWork:
    """Bytes that a step read and FLOPs that it computed, by cause, from the model's account.

    Attributes:
        weight_bytes, kv_bytes, prefix_bytes: read: weights; KV of the decodes; KV of the chunks' cached tokens.
        linear_flops, attention_flops: matrices; the chunks' attention.
        lora_bytes, lora_flops: of LoRA adapters, each of the step's read once.
        decode_flops: the decodes' attention.
    """

    weight_bytes: float = 0.0
    kv_bytes: float = 0.0
    prefix_bytes: float = 0.0
    linear_flops: float = 0.0
    attention_flops: float = 0.0
    lora_bytes: float = 0.0
    lora_flops: float = 0.0
    decode_flops: float = 0.0


@valueclass
class StepRecord:
    """One step that ran, in counts and seconds.

    Attributes:
        engine: which engine of the client's list.
        step_id, time_ns: of the plan.
        num_rows, num_decodes: rows in all, and how many of them were steady decodes.
        num_tokens: new tokens computed, before padding.
        num_sampled: tokens that were sampled.
        context_tokens: tokens computed before this step, summed over all rows.
        seconds: measured, by part.
        closed: why no more work went in.
        decisions: with their reasons.
        end_ns: the clock when it was committed.
        rows: (request id, new tokens, context, tokens that it sampled) of each row that is no steady decode.
        decode_version: two records with one version had the same steady decodes.
        decode_tick: a steady decode's context is its offset plus this.
        decode_ids, decode_offsets: the steady decodes; None in a record whose version is that of the record before.
        decode_context: summed context of the steady decodes.
        predicted_s: predicted seconds of the whole step; 0 without a cost model.
        terms: predicted seconds by term, in the order of ``TERMS``.
        cost_source: where the cost model's coefficients came from: ``default``, ``file``, ``calibrated``.
        work: bytes and FLOPs.
        num_waiting, kv_blocks_used: the scheduler's state when it was committed.
        swapped: whose blocks moved between device and host.
        adapters: LoRA adapters that its rows used.
        adapter_loads: adapters that were copied into slots for it.
    """

    engine: int
    step_id: int
    time_ns: int
    num_rows: int
    num_decodes: int
    num_tokens: int
    num_sampled: int
    context_tokens: int
    seconds: StepSeconds
    closed: Closed
    decisions: tuple[Decision, ...] = ()
    end_ns: int = 0
    rows: tuple[tuple[int, int, int, int], ...] = ()
    decode_version: int = 0
    decode_tick: int = 0
    decode_ids: tuple[int, ...] | None = None
    decode_offsets: tuple[int, ...] | None = None
    decode_context: int = 0
    predicted_s: float = 0.0
    terms: tuple[float, ...] = ()
    cost_source: str = ""
    work: StepWork = StepWork()
    num_waiting: int = 0
    kv_blocks_used: int = 0
    swapped: tuple[SwapNote, ...] = ()
    adapters: tuple[AdapterRows, ...] = ()
    adapter_loads: int = 0

    @property
    def kind(self) -> str:
        """``decode``, ``prefill`` or ``mixed``."""
        if not self.rows:
            return "decode"
        return "mixed" if self.num_decodes else "prefill"

    @property
    def read_bytes(self) -> float:
        """Bytes that the step had to read; 0 without a model's account."""
        work = self.work
        return work.weight_bytes + work.kv_bytes + work.prefix_bytes + work.lora_bytes

    @property
    def flops(self) -> float:
        """Operations that the step had to compute, attention included."""
        work = self.work
        return work.linear_flops + work.attention_flops + work.decode_flops + work.lora_flops

    @property
    def compute_s(self) -> float:
        """Seconds inside the model's calls; the whole step's where its parts were not measured."""
        return self.seconds.forward or self.seconds.total

    @property
    def read_rate(self) -> float:
        """Achieved bytes a second: ``read_bytes`` over ``compute_s``."""
        return self.read_bytes / self.compute_s if self.compute_s else 0.0

    @property
    def flop_rate(self) -> float:
        """Achieved operations a second: ``flops`` over ``compute_s``."""
        return self.flops / self.compute_s if self.compute_s else 0.0

    @property
    def residual_s(self) -> float:
        """Measured minus predicted seconds."""
        return self.seconds.total - self.predicted_s


@valueclass
class RequestRecord:
    """One request that ended.

    Attributes:
        engine: which engine of the client's list.
        request_id, label: the engine's number and the user's name.
        num_prompt_tokens, num_output_tokens: counts.
        finish_reason: why it ended.
        stamps: monotonic nanoseconds at the turns of its life.
        timeline: where its time went, inside the engine.
        priority: as it asked.
        max_tokens: output tokens that it might have had.
        prefix: a hash for each full block of its prompt and all before it; empty where no ledger is written.
        adapter: load id of its LoRA adapter, or None.
    """

    engine: int
    request_id: int
    label: str
    num_prompt_tokens: int
    num_output_tokens: int
    finish_reason: FinishReason
    stamps: RequestStamps
    timeline: RequestTimeline | None = None
    priority: int = 0
    max_tokens: int | None = None
    prefix: tuple[int, ...] = ()
    adapter: int | None = None
