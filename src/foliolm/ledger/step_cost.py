"""What a step costs in seconds: the roofline of its bytes and FLOPs, scaled by efficiencies, plus host time.

One function from a step's counts to named terms. The planner prints them; the budget, the simulator and calibration use
the same object with other coefficients.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields

from foliolm.core.errors import ConfigError
from foliolm.core.record import TERMS
from foliolm.core.valueclass import valueclass
from foliolm.ledger.accounts import (
    ModelAccount,
    all_reduce_bytes,
    attention_pairs,
    linear_flops,
    weight_bytes_per_step,
)
from foliolm.ledger.host_link import HostLink
from foliolm.shape.device import Device


@dataclass(frozen=True, slots=True)
class Coefficients:
    """What is fitted or assumed. The defaults are priors from what other planners publish, until a machine is measured.

    Attributes:
        step_s: t0, host seconds of a step. Prior: 126 µs a step (inference-sim's H100 fit).
        layer_s: host and launch seconds of a layer, part of t0. Prior: 32.1 µs (the same fit).
        sequence_s: ts, host seconds a sequence. Prior: 4.4 µs (the same fit).
        token_s: tt, host seconds a new token. Prior: none.
        chunk_s: seconds to start a prefill chunk's attention, where it runs apart from the decodes'. Prior: none.
        weights: ew, share of the bandwidth at which weights are read. Prior 0.8 (aiconfigurator).
        matmul: ef, share of the peak FLOP/s in matrix products. Prior 0.6, between 0.45 (inference-sim, H100 prefill)
            and 0.7 (llm-analysis).
        kv_decode, kv_mixed: ek, share of the bandwidth at which decodes read KV, in steps without and with prefill.
            Priors 0.9 and 0.5 (measured attention kernels: 0.9 against 0.3 to 0.6, already with a chunk of 16).
        attention: ea, share of the peak FLOP/s in prefill attention. Prior 0.5.
        prefix_reads: r, how often a chunk reads the KV of its cached tokens. Prior 1.
        link: share of a link's rate that copies reach. Prior 0.8 (0.75 to 0.9 measured on PCIe).
        collective_s: seconds to start one all-reduce. Prior 20 µs (Vidur).
    """

    step_s: float = 126e-6
    layer_s: float = 32.1e-6
    sequence_s: float = 4.4e-6
    token_s: float = 0.0
    chunk_s: float = 0.0
    weights: float = 0.8
    matmul: float = 0.6
    kv_decode: float = 0.9
    kv_mixed: float = 0.5
    attention: float = 0.5
    prefix_reads: float = 1.0
    link: float = 0.8
    collective_s: float = 20e-6

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            low_is_open = one.name in ("weights", "matmul", "kv_decode", "kv_mixed", "attention", "link")
            if not math.isfinite(value) or value < 0 or (low_is_open and value == 0):
                bound = "above" if low_is_open else "at least"
                raise ConfigError(f"coefficient {one.name} is {value}; it must be finite and {bound} 0")


@valueclass
class StepCounts:
    """What a step does, in numbers; all that its cost depends on. Means over steps may be fractions.

    Attributes:
        new_tokens: N, padding included.
        sampled: S, rows through the output head.
        sequences: B, rows.
        decode_context: D_l, summed context of the decode rows, one entry a KV group of the model (window-clamped).
        prefills: (new, cached) tokens of each prefill chunk.
        lora_bytes, lora_flops: bytes of the step's distinct adapters, and FLOPs of its adapted rows.
        swap_bytes, swap_blocks: moved between device and host, both ways together, and in how many logical blocks.
    """

    new_tokens: float
    sampled: float
    sequences: float
    decode_context: tuple[float, ...] = ()
    prefills: tuple[tuple[int, int], ...] = ()
    lora_bytes: float = 0.0
    lora_flops: float = 0.0
    swap_bytes: float = 0.0
    swap_blocks: float = 0.0


@valueclass
class StepTerms:
    """Seconds by cause; they sum to ``total``.

    Attributes:
        host: t0.
        sequences, tokens: B · ts, N · tt.
        linears: matrix products: the root of the sum of the squares of reading their weights and computing them, by
            the measured table's factor where there is one.
        decode_attention: decode rows reading their KV (or computing on it, where that takes longer).
        prefill_attention: FLOPs of the chunks' attention, and what it takes to start each.
        prefix_read: chunks reading the KV of their cached tokens.
        all_reduce: tensor parallelism's exchanges.
        lora: adapters' bytes and FLOPs.
        swap: blocks moving between device and host.
        weight_read, matmul: the two sides under the root of ``linears``; not added to the total again.
    """

    host: float
    sequences: float
    tokens: float
    linears: float
    decode_attention: float
    prefill_attention: float
    prefix_read: float
    all_reduce: float
    lora: float
    weight_read: float
    matmul: float
    swap: float = 0.0

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return (
            self.host
            + self.sequences
            + self.tokens
            + self.linears
            + self.decode_attention
            + self.prefill_attention
            + self.prefix_read
            + self.all_reduce
            + self.lora
            + self.swap
        )

    def values(self) -> tuple[float, ...]:
        """The terms that sum to the total, in ``core.record.TERMS``'s order."""
        return (
            self.host,
            self.sequences,
            self.tokens,
            self.linears,
            self.decode_attention,
            self.prefill_attention,
            self.prefix_read,
            self.all_reduce,
            self.lora,
            self.swap,
        )

    def parts(self) -> dict[str, float]:
        """The terms that sum to the total, by name."""
        return dict(zip(TERMS, self.values(), strict=True))

    @property
    def binds(self) -> str:
        """``bandwidth``, ``compute``, ``host`` or ``link``: where most of the time goes."""
        sides = {
            "bandwidth": self.decode_attention + self.prefix_read,
            "compute": self.prefill_attention,
            "host": self.host + self.sequences + self.tokens,
            "link": self.all_reduce + self.swap,
        }
        sides["bandwidth" if self.weight_read >= self.matmul else "compute"] += self.linears + self.lora
        return max(sides, key=lambda name: sides[name])


@dataclass(frozen=True, slots=True)
class StepCost:
    """The step cost of one model on one device (or on as many as share it).

    Attributes:
        model: its bytes and FLOPs on one device.
        bandwidth: BW, bytes a second.
        flops: F, peak operations a second in the model's number type.
        attention_peak: peak operations a second of attention, which runs in 16 bits whatever the weights are.
        peer_link: bytes a second between the devices; only used with tensor parallelism.
        coefficients: host times and efficiencies.
        linear_knots: (new tokens, factor) pairs, tokens ascending: a table measured on the machine that corrects the
            linears' term, whose kernels are not equally good at every size; between knots the factor is linear in the
            logarithm of the tokens, beyond them it stays. Empty: 1.
        host_link: to the host's memory; None: unknown, and swapping is never chosen for its price.
    """

    model: ModelAccount
    bandwidth: float
    flops: float
    attention_peak: float
    peer_link: float | None = None
    coefficients: Coefficients = field(default_factory=Coefficients)
    linear_knots: tuple[tuple[float, float], ...] = ()
    host_link: HostLink | None = None

    def __post_init__(self) -> None:
        for tokens, factor in self.linear_knots:
            if not (tokens >= 1 and math.isfinite(factor) and factor > 0):
                raise ConfigError(
                    f"linear_knots holds ({tokens}, {factor}); it needs tokens of at least 1 and a factor above 0"
                )

    def seconds(self, counts: StepCounts) -> float:
        """Predicted seconds of a step."""
        return self.terms(counts).total

    def terms(self, counts: StepCounts) -> StepTerms:
        """Predicted seconds of a step by term.

        ``t = t0 + B·ts + N·tt + sqrt((W/(ew·BW))² + (2·(P_body·N + P_head·S)/(ef·F))²) + Σ_l D_l·k_l/(ek·BW)
        + Σ_l 2·heads·(d_qk+d_v)·Σ_i(p_i·c_i + p_i²/2)/(ea·F) + P·tc + r·Σ c_i·k/BW + all-reduce + LoRA + swaps``

        The root joins two costs that overlap but for their smaller share near the ridge. A step without rows is free.
        """
        if counts.sequences == 0:
            return StepTerms(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
        c, model = self.coefficients, self.model
        weight_read = weight_bytes_per_step(model, counts.new_tokens, counts.sampled > 0) / (c.weights * self.bandwidth)
        matmul = linear_flops(model, counts.new_tokens, counts.sampled) / (c.matmul * self.flops)
        return StepTerms(
            host=c.step_s + c.layer_s * model.num_layers,
            sequences=c.sequence_s * counts.sequences,
            tokens=c.token_s * counts.new_tokens,
            linears=math.hypot(weight_read, matmul) * self.linear_factor(counts.new_tokens),
            decode_attention=self._decode_attention(counts),
            prefill_attention=self._prefill_attention(counts),
            prefix_read=c.prefix_reads * self.prefix_bytes(counts) / self.bandwidth,
            all_reduce=self._all_reduce(counts),
            lora=counts.lora_bytes / (c.weights * self.bandwidth) + counts.lora_flops / (c.matmul * self.flops),
            weight_read=weight_read,
            matmul=matmul,
            swap=self.swap_seconds(counts),
        )

    def with_contexts(self, terms: StepTerms, counts: StepCounts) -> StepTerms:
        """The terms of a step that differs from another only in the contexts of its decodes.

        Args:
            terms: of the other.
            counts: of this one.
        """
        return StepTerms(
            terms.host,
            terms.sequences,
            terms.tokens,
            terms.linears,
            self._decode_attention(counts),
            terms.prefill_attention,
            terms.prefix_read,
            terms.all_reduce,
            terms.lora,
            terms.weight_read,
            terms.matmul,
            terms.swap,
        )

    def linear_factor(self, tokens: float) -> float:
        """What the measured table makes of the linears' term at ``tokens`` new tokens."""
        knots = self.linear_knots
        if not knots:
            return 1.0
        if tokens <= knots[0][0]:
            return knots[0][1]
        for (low, low_factor), (high, high_factor) in itertools.pairwise(knots):
            if tokens <= high:
                share = math.log(tokens / low) / math.log(high / low)
                return low_factor + share * (high_factor - low_factor)
        return knots[-1][1]

    def counts(
        self,
        decode_contexts: Iterable[int] = (),
        prefills: Sequence[tuple[int, int]] = (),
        padded_decodes: int | None = None,
        sampled_prefills: int | None = None,
    ) -> StepCounts:
        """Count a step from its rows.

        Args:
            decode_contexts: tokens before the new one, one entry a decode row.
            prefills: (new, cached) tokens of each chunk.
            padded_decodes: the batch bucket that the decode rows are padded to, or None.
            sampled_prefills: how many of the chunks end their prompt; None: all.
        """
        contexts = tuple(decode_contexts)
        rows = len(contexts) + len(prefills)
        padding = max(0, (padded_decodes or 0) - len(contexts))
        return StepCounts(
            new_tokens=len(contexts) + padding + sum(new for new, _ in prefills),
            sampled=len(contexts) + padding + (len(prefills) if sampled_prefills is None else sampled_prefills),
            sequences=rows,
            decode_context=clamped_contexts(self.model, contexts),
            prefills=tuple(prefills),
        )

    def decode_seconds(self, batch: float, context: float) -> float:
        """Seconds of a step of ``batch`` decode rows at one context each."""
        return self.seconds(self.decode_counts(batch, context))

    def decode_counts(self, batch: float, context: float) -> StepCounts:
        """Counts of ``batch`` decode rows at one context each."""
        per_group = tuple(batch * min(context, spec.window or context) for spec in self.model.kv)
        return StepCounts(batch, batch, batch, per_group)

    def decode_seconds_per_token(self) -> float:
        """Seconds that each token of context adds to a step of decodes alone, where no layer is windowed."""
        c, model = self.coefficients, self.model
        return sum(
            max(
                spec.bytes_per_token / (c.kv_decode * self.bandwidth),
                spec.num_layers * model.decode_flops_per_pair / (c.attention * self.attention_peak),
            )
            for spec in model.kv
        )

    def _decode_attention(self, counts: StepCounts) -> float:
        c, model = self.coefficients, self.model
        efficiency = c.kv_mixed if counts.prefills else c.kv_decode
        seconds = 0.0
        for spec, context in zip(model.kv, counts.decode_context, strict=False):
            read = context * spec.bytes_per_token / (efficiency * self.bandwidth)
            compute = context * spec.num_layers * model.decode_flops_per_pair / (c.attention * self.attention_peak)
            seconds += max(read, compute)
        return seconds

    def _prefill_attention(self, counts: StepCounts) -> float:
        c = self.coefficients
        computed = self.prefill_attention_flops(counts) / (c.attention * self.attention_peak)
        return computed + c.chunk_s * len(counts.prefills)

    def prefill_attention_flops(self, counts: StepCounts) -> float:
        """FLOPs of the chunks' attention over all layers."""
        return sum(
            spec.num_layers * self.model.attention_flops_per_pair * attention_pairs(new, cached, spec.window)
            for spec in self.model.kv
            for new, cached in counts.prefills
        )

    def decode_attention_flops(self, counts: StepCounts) -> float:
        """FLOPs of the decode rows' attention over all layers."""
        return sum(
            context * spec.num_layers * self.model.decode_flops_per_pair
            for spec, context in zip(self.model.kv, counts.decode_context, strict=False)
        )

    def prefix_bytes(self, counts: StepCounts) -> float:
        """KV bytes of the chunks' cached tokens, each read once."""
        return sum(
            min(cached, spec.window or cached) * spec.bytes_per_token
            for spec in self.model.kv
            for _, cached in counts.prefills
        )

    def swap_seconds(self, counts: StepCounts) -> float:
        """Seconds of the step's moves of KV to the host and back; 0 where the link is not known."""
        if self.host_link is None or not counts.swap_bytes:
            return 0.0
        copies = counts.swap_blocks * sum(self.host_link.copies_per_block or spec.num_layers for spec in self.model.kv)
        return self.host_link.seconds(copies, counts.swap_bytes)

    def _all_reduce(self, counts: StepCounts) -> float:
        if self.model.tensor_parallel_size == 1:
            return 0.0
        assert self.peer_link is not None
        sent = all_reduce_bytes(self.model, counts.new_tokens) / (self.coefficients.link * self.peer_link)
        return sent + 2 * self.model.num_layers * self.coefficients.collective_s


def step_cost(model: ModelAccount, device: Device, coefficients: Coefficients | None = None) -> StepCost:
    """The step cost of ``model`` on ``device``.

    Raises:
        ConfigError: the model is sharded and the device has no link to another.
    """
    if model.tensor_parallel_size > 1 and device.peer_link is None:
        raise ConfigError(
            f"tensor_parallel_size is {model.tensor_parallel_size}; device {device.id} has no peer_link_gbps_one_way"
        )
    return StepCost(
        model=model,
        bandwidth=device.bandwidth,
        flops=device.flops(model.compute),
        attention_peak=device.flops("fp32" if model.compute == "fp32" else "bf16"),
        peer_link=device.peer_link,
        coefficients=coefficients or Coefficients(),
        host_link=None if device.host_link is None else HostLink(device.host_link, copies_per_block=1),
    )


def clamped_contexts(model: ModelAccount, contexts: Sequence[int]) -> tuple[float, ...]:
    """D_l: the summed decode context of each KV group, clamped to its window row by row."""
    return tuple(
        float(sum(contexts)) if spec.window is None else float(sum(min(context, spec.window) for context in contexts))
        for spec in model.kv
    )
