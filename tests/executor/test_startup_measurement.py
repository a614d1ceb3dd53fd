"""The steps that are timed before the first request."""

import time
from types import SimpleNamespace

from foliolm.executor.torch import measured
from support.books import real_cost


class SlowPrompts:
    """Decodes take no time; a step with a prompt uses up what the measurement may take."""

    kv = SimpleNamespace(num_blocks=2000, block_size=16)

    def time_rows(self, rows):
        if any(new > 1 for new, _ in rows):
            time.sleep(0.06)
        return 0.001 * len(rows)


def test_every_batch_of_decodes_is_timed_even_where_one_prompt_uses_the_time_up(monkeypatch):
    monkeypatch.setattr(measured, "ENOUGH_SECONDS", 0.05)
    samples = measured.measure_steps(SlowPrompts(), real_cost(), 2048, 64, 4096)
    decodes = [sample.counts for sample in samples if sample.kind == "decode"]
    assert {counts.sequences for counts in decodes} == {1, 2, 4, 8, 16}
    assert len({counts.decode_context[0] / counts.sequences for counts in decodes}) == 2, "both contexts"
    assert len(samples) >= 10, "fewer are not fitted"
