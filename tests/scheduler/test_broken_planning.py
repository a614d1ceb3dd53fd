"""Whatever raises while a step is planned: nobody lives then, the books are right, and others are served."""

from __future__ import annotations

import random

import pytest
from test_sibling_families import random_family

from foliolm.core.errors import RequestError
from foliolm.core.plan import StepPlan
from foliolm.kv import BlockPool, HostPool, HostPrefixes, KVManager, SwapSpace
from foliolm.scheduler import planner
from foliolm.scheduler.admission import Admission
from foliolm.scheduler.budget import PrefillBudget
from foliolm.scheduler.decodes import DecodeSet
from foliolm.scheduler.families import Families
from foliolm.scheduler.offloading import Offloading
from foliolm.scheduler.promises import PrefixPromises
from foliolm.scheduler.queue import WaitingQueue
from foliolm.scheduler.state import SchedulerState
from foliolm.scheduler.treatments import Treatments
from support.script import Driver, make_scheduler, request, token_for
from support.sharing import random_sharing_settings, random_source

PLACES = (
    (KVManager, ("allocate", "allocate_from_host", "grow", "own", "fork", "reserve", "match", "release")),
    (BlockPool, ("allocate",)),
    (HostPool, ("allocate", "seal")),
    (HostPrefixes, ("take", "reclaim", "seal")),
    (SwapSpace, ("out", "back", "drop", "usable")),
    (SchedulerState, ("swap_out", "swap_in", "withdraw", "take_offloaded", "lose_swapped")),
    (WaitingQueue, ("head", "push", "take")),
    (DecodeSet, ("join", "leave", "run", "crossing")),
    (Families, ("at_prompt_end", "blocks_wanted", "shared_positions", "unpark")),
    (PrefixPromises, ("make", "ahead", "withdraw")),
    (Admission, ("attempt",)),
    (Offloading, ("worth_copying", "worth_keeping")),
    (Treatments, ("choose",)),
    (PrefillBudget, ("offer", "grant", "grants", "spread")),
)


TOTALS = (
    "num_preemptions",
    "num_steps",
    "num_swaps",
    "recomputed_tokens",
    "prefix_queries",
    "prefix_hits",
    "host_hits",
    "evicted_blocks",
    "offloaded_blocks",
    "loaded_blocks",
    "swap_out_bytes",
    "swap_in_bytes",
    "copied_blocks",
    "forked_tokens",
)


class BrokenError(Exception):
    """Raised where nobody expects it."""


class Fault:
    """Makes one call of one method raise, while a step is planned."""

    def __init__(self, monkeypatch, owner, name: str, late: bool) -> None:
        self.left: int | None = None
        method = getattr(owner, name)

        def broken(*arguments, **named):
            if self.left is None:
                return method(*arguments, **named)
            self.left -= 1
            if self.left > 0:
                return method(*arguments, **named)
            self.left = None
            if late:
                method(*arguments, **named)
            raise BrokenError(name)

        monkeypatch.setattr(owner, name, broken)


def step_breaks(driver: Driver, fault: Fault, after: int) -> bool:
    """A step whose planning is to raise at the ``after``th call; False where there were fewer."""
    schedule = driver.scheduler.schedule

    def armed(now: int):
        fault.left = after
        try:
            return schedule(now)
        finally:
            fault.left = None

    driver.scheduler.schedule = armed
    try:
        driver.step()
    except BrokenError:
        return True
    finally:
        driver.scheduler.schedule = schedule
    return False


def check_empty(driver: Driver) -> None:
    while driver.flights:
        driver.commit()
        assert driver.scheduler.problems() == []
    assert not driver.scheduler.has_work
    stats = driver.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_blocks_used, stats.host_blocks_used) == (0, 0, 0, 0)
    assert driver.scheduler.load()[0] == 0


def random_driver(rng: random.Random) -> tuple[Driver, dict, list]:
    settings = random_sharing_settings(rng)
    scheduler = make_scheduler(groups=rng.choice([1, 2]), **settings)
    driver = Driver(scheduler, rng.randrange(3))
    sources: dict = {}
    driver.watch_content(sources)
    return driver, sources, [[rng.randrange(4) for _ in range(scheduler.config.max_model_len)] for _ in range(3)]


def arrive(rng: random.Random, driver: Driver, sources: dict, trunks: list) -> None:
    config = driver.scheduler.config
    first = len(sources) + 1
    for one in random_family(rng, first, random_source(rng, first, config, trunks, driver.now), config.max_model_len):
        try:
            driver.scheduler.add(one, driver.now)
        except (RequestError, ValueError):
            return
        sources[one.request_id] = one
        if one.sampling.beam is not None:
            driver.candidates[one.request_id] = one.sampling.beam.num_candidates(0)


def test_others_are_served(monkeypatch):
    """Each place that planning goes through raises, before or after it did its work; those first that did least."""
    rng = random.Random("broken plans")
    faults = [
        [Fault(monkeypatch, owner, name, late) for late in (False, True)] for owner, names in PLACES for name in names
    ]
    broken = [0] * len(faults)
    for _ in range(300):
        if min(broken) >= 1:
            break
        driver, sources, trunks = random_driver(rng)
        lost: set[int] = set()
        place = min(rng.sample(range(len(faults)), 12), key=broken.__getitem__)
        begin = rng.randrange(25)
        for turn in range(45):
            if rng.random() < 0.4:
                arrive(rng, driver, sources, trunks)
            before = driver.scheduler.stats()
            if turn < begin:
                driver.step()
            elif step_breaks(driver, rng.choice(faults[place]), rng.randrange(1, 3)):
                after = driver.scheduler.stats()
                assert all(getattr(before, name) <= getattr(after, name) for name in TOTALS), (before, after)
                broken[place] += 1
                lost |= set(sources) - set(driver.finished)
                check_empty(driver)
                begin = turn + rng.randrange(1, 15)
                place = min(rng.sample(range(len(faults)), 12), key=broken.__getitem__)
        driver.run()
        assert driver.scheduler.problems() == []
        assert set(driver.finished) | lost >= set(sources)
        for rid, source in sources.items():
            prompt = len(source.prompt_token_ids)
            if source.sampling.beam is None:
                produced = driver.outputs.get(rid, [])
                assert produced == [token_for(rid, prompt + index) for index in range(len(produced))]
    names = [f"{owner.__name__}.{name}" for owner, names in PLACES for name in names]
    assert min(broken) >= 1, [name for name, count in zip(names, broken, strict=True) if not count]


def test_a_plan_that_cannot_be_put_together(monkeypatch):
    """The last thing that planning does."""
    driver = Driver(make_scheduler(num_blocks=6, max_model_len=20, num_host_blocks=16, preemption_mode="swap"))
    sources = {rid: request(rid, prompt=8, output=12) for rid in (1, 2, 3)}
    driver.watch_content(sources)
    for rid in (1, 2):
        driver.scheduler.add(sources[rid], 0)
    plan = StepPlan

    def broken(*arguments, **named):
        if named.get("swaps_out"):
            raise BrokenError
        return plan(*arguments, **named)

    monkeypatch.setattr(planner, "StepPlan", broken)
    with pytest.raises(BrokenError):
        driver.run()
    check_empty(driver)
    monkeypatch.undo()
    driver.scheduler.add(sources[3], driver.now)
    driver.run()
    assert len(driver.outputs[3]) == 12
