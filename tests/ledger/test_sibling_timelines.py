"""Siblings and hypotheses: their time is theirs from the step in which they part, and all of it is booked."""

from __future__ import annotations

import pytest

from foliolm.core.request import EngineRequest
from foliolm.core.sampling import BeamSearch, SamplingParams
from support.books import round_cost, virtual_engine


@pytest.mark.parametrize("beam", [None, BeamSearch(3)])
def test_parts_of_siblings_sum_to_the_whole_and_they_wait_for_their_leader(beam):
    engine, clock = virtual_engine(round_cost(), num_blocks=60, max_num_batched_tokens=8)
    sampling = SamplingParams(max_tokens=6, beam=beam)
    engine.add([EngineRequest(1 + place, tuple(range(20)), sampling, sibling=place) for place in range(3)])
    while engine.has_work:
        engine.step()
    records = {record.request_id: record for record in engine.take_finished()}
    assert set(records) == {1, 2, 3}
    for record in records.values():
        timeline = record.timeline
        assert timeline.end_ns == clock.now()
        assert sum(value for _, value in timeline.parts) == timeline.total_ns
        assert record.num_output_tokens == 6
    leader, *others = (records[rid].timeline.by_kind() for rid in (1, 2, 3))
    assert leader["own_prefill"] > 0
    for parts, record in zip(others, (records[2], records[3]), strict=True):
        names = dict(record.timeline.parts)
        assert "own_prefill" not in parts
        assert "skipped" not in parts
        # Three chunks of the leader's prompt.
        assert names["queue:sibling"] == leader["own_prefill"]
        assert parts["own_decode"] > 0
