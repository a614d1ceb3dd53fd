"""Measured steps as calibration needs them: what each did, and how long it took."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from foliolm.core.record import StepRecord
from foliolm.ledger.accounts import ModelAccount
from foliolm.ledger.step_cost import StepCounts, clamped_contexts


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured step.

    Attributes:
        counts: what it did.
        seconds: how long it took.
    """

    counts: StepCounts
    seconds: float

    @property
    def kind(self) -> str:
        """``decode``, ``prefill`` or ``mixed``: a row of one new token counts as a decode."""
        if not self.counts.prefills:
            return "decode"
        return "mixed" if self.counts.sequences > len(self.counts.prefills) else "prefill"


class SampleReader:
    """Turns step records into samples; windows need each decode's context, which records give when it changes.

    Args:
        model: the account whose KV groups count contexts.
    """

    def __init__(self, model: ModelAccount) -> None:
        self.model = model
        self._windowed = any(spec.window for spec in model.kv)
        self._offsets: tuple[int, tuple[int, ...]] = (-1, ())

    def read(self, record: StepRecord) -> Sample | None:
        """A record as a sample; None where its decodes' contexts are not known, or blocks moved to or from the host."""
        if record.decode_offsets is not None:
            self._offsets = (record.decode_version, record.decode_offsets)
        if record.swapped or record.adapter_loads:
            return None
        single = [context for _, new, context, _ in record.rows if new == 1]
        chunks = tuple((new, context) for _, new, context, _ in record.rows if new > 1)
        context = (float(record.decode_context + sum(single)),) * len(self.model.kv)
        if self._windowed:
            version, offsets = self._offsets
            if record.num_decodes and version != record.decode_version:
                return None
            decodes = [offset + record.decode_tick for offset in offsets] if record.num_decodes else []
            context = clamped_contexts(self.model, decodes + single)
        work = record.work
        counts = StepCounts(
            record.num_tokens,
            record.num_sampled,
            record.num_rows,
            context,
            chunks,
            lora_bytes=work.lora_bytes,
            lora_flops=work.lora_flops,
        )
        return Sample(counts, record.seconds.total)


def read_samples(model: ModelAccount, records: Iterable[StepRecord]) -> list[Sample]:
    """All records that can be read as samples and took any time."""
    reader = SampleReader(model)
    samples = (reader.read(record) for record in records)
    return [sample for sample in samples if sample is not None and sample.seconds > 0]
