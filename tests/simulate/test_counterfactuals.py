"""A recorded run again: the same where nothing changes, and advice that says what a change really does."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from foliolm.assemble import Books, build_virtual_engine
from foliolm.core.resolve import SchedulerConfig
from foliolm.ledger.reading import newest_run
from foliolm.ledger.run_metrics import run_metrics
from foliolm.simulate.advice import advise, relative
from foliolm.simulate.clock import VirtualClock
from foliolm.simulate.counterfactual import changed, recorded, rerun, rerun_records
from foliolm.simulate.run import Arrival, run_arrivals
from support.books import MS, real_cost
from support.script import request

SETTINGS = SchedulerConfig(
    max_model_len=4096, num_blocks=2000, max_num_batched_tokens=2048, max_num_seqs=16, long_prefill_token_threshold=1024
)


def arrivals(count=10, prompt=300, output=40, every=20):
    """Prompts that have nothing in common."""
    return [
        Arrival(
            rid * every * MS,
            replace(
                request(rid, prompt, output, arrival=rid * every * MS),
                prompt_token_ids=tuple(10_000 * rid + i for i in range(prompt)),
            ),
        )
        for rid in range(1, count + 1)
    ]


def run_in(folder, settings=SETTINGS, work=None, host_s=2e-4, itl_target_ms=None):
    clock = VirtualClock(1)
    engine = build_virtual_engine(
        settings, Books(real_cost(), ledger=str(folder), itl_target_ms=itl_target_ms), clock, host_s
    )
    run_arrivals(engine, clock, work or arrivals())
    engine.close()
    return newest_run(folder)


def test_with_nothing_changed_the_run_comes_out_as_it_was(tmp_path):
    run = run_in(tmp_path)
    again = recorded(run, run.cost)
    steps, requests = rerun_records(again)
    assert [(s.num_decodes, s.rows) for s in steps] == [(s.num_decodes, s.rows) for s in run.steps]
    mine, theirs = run_metrics(steps, requests).to_dict(), again.metrics.to_dict()
    assert mine == pytest.approx(theirs, rel=1e-3)


def test_shared_prefixes_are_found_again_by_their_hashes(tmp_path):
    settings = replace(SETTINGS, enable_prefix_caching=True)
    work = arrivals()
    shared = work[0].request.prompt_token_ids[:256]
    work = [
        Arrival(one.time_ns, replace(one.request, prompt_token_ids=shared + one.request.prompt_token_ids[256:]))
        for one in work
    ]
    run = run_in(tmp_path, settings, work)
    again = recorded(run, run.cost)
    steps, _ = rerun_records(again)
    assert sum(step.num_tokens for step in steps) == sum(step.num_tokens for step in run.steps)
    without, _ = rerun_records(again, replace(settings, enable_prefix_caching=False))
    assert sum(step.num_tokens for step in without) > sum(step.num_tokens for step in steps) + 5 * 256


@pytest.mark.parametrize(
    ("name", "settings", "work"),
    [
        (
            "a long prompt among streams",
            SETTINGS,
            [*arrivals(8, 60, 120, 5), *[replace(one, time_ns=400 * MS) for one in arrivals(11, 3500, 4)[10:]]],
        ),
        ("a pool too small", replace(SETTINGS, num_blocks=300), arrivals(12, 400, 120, 5)),
        (
            "too many sequences",
            replace(SETTINGS, num_blocks=300, max_num_seqs=64, max_num_batched_tokens=256),
            arrivals(40, 100, 150, 5),
        ),
        ("too few sequences", replace(SETTINGS, max_num_seqs=2), arrivals(16, 100, 60, 5)),
    ],
)
def test_advice_is_what_a_real_run_with_the_change_shows(tmp_path, name, settings, work):
    run = run_in(tmp_path / "before", settings, work)
    advised = advise(recorded(run, run.cost))
    assert advised.advice, name
    before = recorded(run, run.cost).metrics
    for index, one in enumerate(advised.advice):
        if one.setting == "itl_target_ms":
            after = run_in(tmp_path / f"after{index}", settings, work, itl_target_ms=one.after)
        value = int(one.after) + (1 if one.setting == "num_blocks" else 0)
        value = bool(value) if one.setting == "enable_prefix_caching" else value
        if one.setting != "itl_target_ms":
            after = run_in(tmp_path / f"after{index}", changed(settings, **{one.setting: value}), work)
        real = relative(before, recorded(after, after.cost).metrics)
        for metric, predicted in one.effect.items():
            assert predicted == pytest.approx(real[metric], abs=0.02 + 0.1 * abs(real[metric])), (one.flags, metric)


def test_same_inputs_same_bytes(tmp_path):
    for name in ("a", "b"):
        run_in(tmp_path / name)
    one, other = ((tmp_path / name / "engine-0-000001.jsonl").read_bytes().split(b"\n", 1)[1] for name in ("a", "b"))
    assert one == other


def test_a_changed_setting_takes_along_what_follows_from_it():
    new = changed(SETTINGS, max_num_batched_tokens=512)
    assert new.long_prefill_token_threshold == 256
    assert changed(SETTINGS, max_num_seqs=4096).max_num_batched_tokens == 4096


def test_of_a_long_run_the_end_is_run_again(tmp_path, monkeypatch):
    run = run_in(tmp_path, work=arrivals(every=400))
    assert len(recorded(run, run.cost).arrivals) == 10
    monkeypatch.setattr("foliolm.simulate.counterfactual.MOST_STEPS", len(run.steps) // 2)
    again = recorded(run, run.cost)
    assert 0 < len(again.arrivals) < 10
    assert rerun(again).output_tokens_per_s > 0


def test_explaining_imports_no_torch(tmp_path):
    run_in(tmp_path)
    code = (
        "import sys; sys.argv = ['foliolm', 'explain', sys.argv[1], '--json'];"
        "from foliolm.cli.main import build_app; build_app('explain')(standalone_mode=False);"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, capture_output=True)
