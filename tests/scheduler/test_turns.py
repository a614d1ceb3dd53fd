"""Whose turn it is: policies, ages, tenants, and targets that cannot be kept."""

from __future__ import annotations

import statistics

import pytest

from foliolm.assemble import Books, build_virtual_engine
from foliolm.core.errors import TtftTargetError
from foliolm.core.plan import DecisionKind
from foliolm.core.request import EngineRequest
from foliolm.core.resolve import SchedulerConfig
from foliolm.core.sampling import SamplingParams
from foliolm.simulate.clock import VirtualClock
from foliolm.simulate.run import Arrival, run_arrivals
from support.books import real_cost
from support.script import Driver, MadePrices, make_scheduler, request


def prompt_request(rid: int, tokens, output: int = 2, **more) -> EngineRequest:
    return EngineRequest(rid, tuple(tokens), SamplingParams(max_tokens=output), arrival_ns=rid, **more)


# --- ages and prefixes


@pytest.mark.parametrize(("bound_s", "starves"), [(20e-9, False), (1e9, True)])
def test_an_age_bound_ends_the_wait_of_the_less_important(bound_s, starves):
    driver = Driver(make_scheduler(scheduling_policy="priority", age_bound_s=bound_s, max_num_seqs=1))
    driver.scheduler.add(request(1, prompt=4, output=2, priority=5), 0)
    for rid in range(2, 60):  # an endless supply of more important ones; a step takes a nanosecond
        driver.scheduler.add(request(rid, prompt=4, output=2, priority=0), driver.now)
        driver.step()
    assert (1 not in driver.finished) is starves


def test_who_has_its_prefix_resident_goes_before_one_that_would_evict_it():
    orders = {}
    for policy in ("fcfs", "prefix"):
        driver = Driver(
            make_scheduler(
                scheduling_policy=policy, enable_prefix_caching=True, num_blocks=11, max_model_len=40, max_num_seqs=1
            )
        )
        driver.scheduler.add(prompt_request(1, range(28)), 0)
        driver.run()
        driver.scheduler.add(prompt_request(2, range(100, 128)), driver.now)  # would evict what 3 finds
        driver.scheduler.add(prompt_request(3, [*range(28), 7]), driver.now)
        driver.run()
        orders[policy] = (list(driver.finished), driver.finished[3].stamps.num_cached_tokens)
    assert orders["fcfs"][0] == [1, 2, 3]
    assert orders["prefix"] == ([1, 3, 2], 28)
    assert orders["fcfs"][1] < 28


def test_the_prefix_policy_starves_nobody():
    driver = Driver(
        make_scheduler(
            scheduling_policy="prefix",
            enable_prefix_caching=True,
            age_bound_s=30e-9,
            num_blocks=21,
            max_model_len=40,
            max_num_seqs=1,
        )
    )
    driver.scheduler.add(prompt_request(1, range(28)), 0)
    driver.run()
    driver.scheduler.add(prompt_request(2, range(100, 128)), driver.now)
    for rid in range(3, 80):
        driver.scheduler.add(prompt_request(rid, [*range(28), rid]), driver.now)
        driver.step()
        driver.step()
    assert 2 in driver.finished


# --- tenants


def test_tenants_take_turns_by_served_tokens():
    driver = Driver(make_scheduler(fairness=True, max_num_seqs=1, num_blocks=60))
    for rid in range(1, 9):
        driver.scheduler.add(prompt_request(rid, range(rid * 100, rid * 100 + 8), tenant="flood"), 0)
    driver.step()
    for rid in (20, 21):
        driver.scheduler.add(prompt_request(rid, range(rid * 100, rid * 100 + 8), tenant="quiet"), 0)
    driver.run()
    order = list(driver.finished)
    assert order.index(20) <= 1 + 1
    assert order.index(21) <= 4


def test_a_tenant_saves_up_no_turns():
    driver = Driver(make_scheduler(fairness=True, max_num_seqs=1, num_blocks=60))
    for rid in range(1, 5):
        driver.scheduler.add(prompt_request(rid, range(8), tenant="early"), 0)
    driver.run()  # "late" was not there: it owes nobody's past
    for rid in range(11, 15):
        driver.scheduler.add(prompt_request(rid, range(8), tenant="late"), driver.now)
        driver.scheduler.add(prompt_request(rid + 10, range(8), tenant="early"), driver.now)
    driver.run()
    order = ["late" if rid < 20 else "early" for rid in list(driver.finished)[4:]]
    assert order.count("late") == 4
    assert "early" in order[:3], order


def test_a_flooding_tenant_gives_way_for_one_below_its_share():
    driver = Driver(make_scheduler(fairness=True, max_num_seqs=4, num_blocks=60))
    for rid in range(1, 9):
        driver.scheduler.add(prompt_request(rid, range(rid * 100, rid * 100 + 4), output=40, tenant="flood"), 0)
    driver.step()
    driver.scheduler.add(prompt_request(20, range(8), output=4, tenant="quiet"), driver.now)
    plan = driver.step()
    (gave_way,) = (d for d in plan.decisions if d.kind is DecisionKind.PREEMPT)
    assert (gave_way.request_id, gave_way.blocker) == (4, 20)
    assert [note.request_id for note in plan.admissions] == [20]
    driver.run()
    assert driver.scheduler.problems() == []
    assert all(len(driver.outputs[rid]) == 40 for rid in range(1, 9))


def served_engine(fairness: bool):
    settings = SchedulerConfig(
        max_model_len=4096,
        num_blocks=1201,
        max_num_batched_tokens=512,
        max_num_seqs=16,
        long_prefill_token_threshold=1 << 30,
        short_prompt_share=0.0,
        fairness=fairness,
        preemption_mode="auto",
        num_host_blocks=2000,
        max_queued_requests=10_000,
    )
    clock = VirtualClock()
    return build_virtual_engine(settings, Books(real_cost()), clock), clock


def quiet_ttfts(fairness: bool, flood: bool) -> tuple[float, float]:
    """The quiet tenant's p90 TTFT in seconds, and the longest step."""
    engine, clock = served_engine(fairness)
    steps = []
    engine.ledger.on_step.append(steps.append)

    def arrival(rid: int, at: float, prompt: int, output: int, tenant: str) -> Arrival:
        time_ns = round(at * 1e9)
        tokens = tuple(rid * 10_000 + i for i in range(prompt))
        sampling = SamplingParams(temperature=0.0, max_tokens=output)
        return Arrival(time_ns, EngineRequest(rid, tokens, sampling, arrival_ns=time_ns, tenant=tenant))

    arrivals = [arrival(rid, 3.0 + 2.0 * rid, 400, 16, "quiet") for rid in range(1, 13)]
    if flood:
        arrivals += [arrival(rid, 0.001 * rid, 600, 200, "flood") for rid in range(100, 220)]
    run = run_arrivals(engine, clock, arrivals)
    ttfts = [
        (record.stamps.first_token_ns - record.stamps.arrival_ns) / 1e9
        for record in run.finished
        if record.request_id < 100
    ]
    assert len(ttfts) == 12
    return statistics.quantiles(ttfts, n=10)[-1], max(step.seconds.total for step in steps)


def test_a_flood_leaves_the_quiet_tenant_its_time_to_first_token():
    unloaded, _ = quiet_ttfts(True, flood=False)
    fair, longest = quiet_ttfts(True, flood=True)
    unfair, _ = quiet_ttfts(False, flood=True)
    assert fair <= 2 * unloaded + longest
    assert unfair > 5 * (2 * unloaded + longest), "the flood was no flood"


# --- targets


def busy(ttft_target_s: float | None = None) -> Driver:
    """Two streams, and a prompt of forty tokens in the queue; a token costs a second to compute, so does a step."""
    driver = Driver(
        make_scheduler(
            prices=MadePrices(1.0, token_s=1.0), max_num_batched_tokens=16, num_blocks=60, ttft_target_s=ttft_target_s
        )
    )
    for rid in (1, 2):
        driver.scheduler.add(request(rid, prompt=4, output=30), 0)
    driver.step()
    driver.step()
    driver.scheduler.add(request(3, prompt=40, output=2, arrival=3), 0) if ttft_target_s is None else None
    return driver


def test_a_first_token_that_would_come_too_late_is_refused_with_the_numbers():
    driver = busy()
    # 40 tokens before it and 8 of its own, in steps of 14 beside two streams: 48 + 4 steps.
    wanted = EngineRequest(4, tuple(range(8)), SamplingParams(max_tokens=2), arrival_ns=4, ttft_target_s=51.9)
    with pytest.raises(TtftTargetError) as refused:
        driver.scheduler.add(wanted, 0)
    text = str(refused.value)
    assert "52000 ms" in text
    assert "51900 ms of ttft_target_ms" in text
    assert "40 prompt tokens of 1 requests before it and 8 of its own" in text
    driver.scheduler.add(EngineRequest(5, tuple(range(8)), wanted.sampling, arrival_ns=5, ttft_target_s=52.1), 0)
    driver.run()
    assert set(driver.finished) == {1, 2, 3, 5}


def test_the_servers_target_holds_for_all_and_room_counts_too():
    driver = busy(ttft_target_s=25.0)
    driver.scheduler.add(request(5, prompt=10, output=2, arrival=5), 0)  # 10 + a step
    with pytest.raises(TtftTargetError, match="--ttft-target-ms"):
        driver.scheduler.add(request(6, prompt=30, output=2, arrival=6), 0)
    small = Driver(make_scheduler(prices=MadePrices(1.0), num_blocks=11, max_model_len=40, ttft_target_s=20.0))
    small.scheduler.add(request(1, prompt=8, output=30), 0)
    small.step()
    small.step()
    # The blocks of the one that runs are not free before it ends.
    with pytest.raises(TtftTargetError, match=r"[23]\d000 ms until there is room"):
        small.scheduler.add(request(2, prompt=35, output=2), 0)


def test_without_prices_nobody_is_refused():
    driver = Driver(make_scheduler(ttft_target_s=1e-9))
    driver.scheduler.add(request(1, prompt=30, output=2), 0)
    driver.run()
    assert 1 in driver.finished
