"""Workloads that are drawn: what the flags say is what comes, and a seed says everything."""

from __future__ import annotations

import itertools
import random
import statistics
from pathlib import Path

import pytest

from foliolm.core.errors import ConfigError
from foliolm.simulate.workload.distribution import distribution
from foliolm.simulate.workload.item import NS, as_request
from foliolm.simulate.workload.options import WorkloadOptions
from foliolm.simulate.workload.synthetic import Arrivals


@pytest.mark.parametrize(
    ("spec", "mean", "deviation"),
    [
        ("512", 512, 0),
        ("constant:7", 7, 0),
        ("uniform:100:300", 200, 57.7),
        ("lognormal:1000:0.5", 1000, 500),
        ("exponential:40", 40, 40),
    ],
)
def test_a_distribution_has_the_mean_and_spread_that_it_says(spec, mean, deviation):
    rng = random.Random(3)
    values = [distribution("--input-len", spec).real(rng) for _ in range(40_000)]
    assert statistics.fmean(values) == pytest.approx(mean, rel=0.02)
    assert statistics.pstdev(values) == pytest.approx(deviation, rel=0.05, abs=1e-9)


def test_an_empirical_distribution_draws_its_own_values(tmp_path):
    (tmp_path / "lengths").write_text("10\n20\n20\n20\n")
    rng = random.Random(1)
    values = [distribution("--input-len", f"empirical:{tmp_path / 'lengths'}").whole(rng) for _ in range(4000)]
    assert set(values) == {10, 20}
    assert values.count(10) == pytest.approx(1000, rel=0.1)


@pytest.mark.parametrize(
    "spec", ["", "normal:1:2", "uniform:5", "uniform:9:3", "lognormal:0:1", "constant:nan", "-4", "empirical:/nowhere"]
)
def test_a_wrong_distribution_is_named(spec):
    with pytest.raises(ConfigError, match="--input-len"):
        distribution("--input-len", spec)


@pytest.mark.parametrize(("burstiness", "variation"), [(1.0, 1.0), (0.25, 2.0), (16.0, 0.25)])
def test_intervals_have_the_rate_and_the_burstiness(burstiness, variation):
    times = list(Arrivals(rate=50, burstiness=burstiness).times(random.Random(2), 20_000))
    gaps = [(b - a) / NS for a, b in itertools.pairwise(times)]
    assert statistics.fmean(gaps) == pytest.approx(1 / 50, rel=0.05)
    assert statistics.pstdev(gaps) / statistics.fmean(gaps) == pytest.approx(variation, rel=0.05)


def test_another_rate_asks_the_same_questions():
    def lengths(rate):
        work = WorkloadOptions(rate=rate, requests=50, input_len="lognormal:100:1", output_len="uniform:1:9")
        return [(item.num_prompt, item.num_output) for item in work.build(5, 4096).items()]

    assert lengths(1.0) == lengths(80.0)
    assert len(set(lengths(1.0))) > 20


def test_a_closed_loop_sends_again_when_it_was_answered():
    work = WorkloadOptions(concurrency=3, requests=5, input_len="10", output_len="10").build(0, 4096)
    first = list(work.items())
    assert [item.time_ns for item in first] == [0, 0, 0]
    (next_item,) = work.after(first[0], 77)
    assert next_item.time_ns == 77
    assert len(list(work.after(first[1], 78))) == 1
    assert list(work.after(first[2], 79)) == []


def talk(**more):
    options = {"rate": 1.0, "sessions": 2, "turns": "3", "input_len": "40", "output_len": "20", "think_s": "2"}
    return WorkloadOptions(**{**options, **more}).build(1, 4096)


def test_a_turn_repeats_everything_said_before_it():
    work = talk(system_prompt_len=32)
    first = next(iter(work.items()))
    (second,) = work.after(first, 5 * NS)
    assert second.time_ns == 7 * NS
    assert second.num_prompt == first.num_prompt + first.num_output + 40
    one, two = as_request(first, 1), as_request(second, 2)
    said = one.prompt_token_ids + one.answer_token_ids
    assert two.prompt_token_ids[: len(said)] == said


def test_conversations_share_their_system_prompt_and_nothing_else():
    items = list(talk(system_prompt_len=32, system_prompts=1).items())
    one, two = (as_request(item, number).prompt_token_ids for number, item in enumerate(items))
    assert one[:32] == two[:32]
    assert one[32] != two[32]
    apart = list(talk(system_prompt_len=32, system_prompts=2).items())
    assert as_request(apart[0], 1).prompt_token_ids[0] != as_request(apart[1], 2).prompt_token_ids[0]


def test_a_branched_turn_goes_on_when_all_were_answered():
    work = talk(branches=3, sessions=1)
    items = list(work.items())
    assert len(items) == 3
    assert len({as_request(item, 9).prompt_token_ids for item in items}) == 1
    assert list(work.after(items[2], 1)) == []
    assert list(work.after(items[0], 2)) == []
    following = list(work.after(items[1], 3))
    assert len(following) == 3
    assert {item.turn for item in following} == {1}


def test_a_conversation_ends_before_it_is_too_long():
    work = WorkloadOptions(rate=1.0, sessions=1, turns="50", input_len="100", output_len="100").build(0, 450)
    item, turns = next(iter(work.items())), 1
    while following := list(work.after(item, 0)):
        (item,) = following
        turns += 1
        assert item.num_prompt + item.num_output <= 450
    assert turns == 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rate": 1.0, "concurrency": 2}, "either --rate"),
        ({}, "either --rate"),
        ({"rate": 0.0}, "--rate is 0.0"),
        ({"rate": 1.0, "turns": "3"}, "--turns says nothing about independent requests"),
        ({"rate": 1.0, "sessions": 3, "requests": 4}, "--requests says nothing about conversations"),
        ({"trace": Path("x"), "rate": 1.0, "format": "azure"}, "--rate says nothing about a trace"),
        ({"trace": Path("x")}, "--format"),
        ({"rate": 1.0, "requests": 0}, "--requests is 0"),
        ({"rate": 1.0, "burstiness": 0.0}, "--burstiness is 0.0"),
    ],
)
def test_what_contradicts_itself_is_refused(options, said):
    lengths = {} if "trace" in options else {"input_len": "10", "output_len": "10"}
    with pytest.raises(ConfigError, match=said):
        WorkloadOptions(**{**lengths, **options}).build(0, 4096)
