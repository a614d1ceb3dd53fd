"""The scheduler against a naive twin, over random arrivals, lengths, aborts and pool sizes: at least 200,000 steps."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from foliolm.core.errors import RequestError
from support.script import Driver, make_scheduler, request, token_for
from support.treatments import random_treatments
from support.twin import Twin

MODES = ("chunked", "mixed", "prefill-first", "static")


def random_settings(rng: random.Random, mode: str) -> dict:
    block_size = rng.choice([1, 2, 4, 16])
    usable = rng.randrange(3, 40)
    length = rng.randrange(2, max(3, usable * block_size + 1))
    seqs = rng.randrange(1, 9)
    return {
        "mode": mode,
        "block_size": block_size,
        "num_blocks": usable + 1,
        "max_model_len": length,
        "max_num_seqs": seqs,
        "max_num_batched_tokens": rng.randrange(seqs, seqs + 40) if mode == "chunked" else length + seqs,
        "long_prefill_token_threshold": rng.randrange(1, 20),
        "short_prompt_share": rng.choice([0, 0.25, 0.5]),
        "watermark_blocks": rng.choice([0, 0, 1, 2]),
        "scheduling_policy": rng.choice(["fcfs", "priority"]),
    }


def expected_tokens(source, config) -> list[int]:
    """What the request must have generated when it ends by itself."""
    prompt = len(source.prompt_token_ids)
    limit = min(config.max_model_len, (config.num_blocks - 1) * config.block_size, prompt + source.sampling.max_tokens)
    tokens = []
    while prompt + len(tokens) < limit:
        tokens.append(token_for(source.request_id, prompt + len(tokens)))
        if tokens[-1] in source.eos_token_ids:
            break
    return tokens


def add_random(rng, driver, sources, twin=None, eos=False) -> None:
    config = driver.scheduler.config
    rid = len(sources) + 1
    source = request(
        rid,
        prompt=rng.randrange(1, config.max_model_len + 1),
        output=rng.randrange(1, config.max_model_len),
        arrival=driver.now,
        eos=(5, 17, 123) if eos and rng.random() < 0.3 else (),
        priority=rng.randrange(3),
    )
    try:
        driver.scheduler.add(source, driver.now)
    except RequestError as error:
        prompt = len(source.prompt_token_ids)
        blocks = -(-(prompt + 1) // config.block_size)
        assert prompt >= config.max_model_len or blocks > config.num_blocks - 1, error
        return
    sources[rid] = source
    if twin is not None:
        twin.add(source)


def compare(plan, expected) -> None:
    assert list(plan.decodes.request_ids) == expected.decodes
    assert [(r.request_id, r.context, r.num_new_tokens) for r in plan.rows] == expected.chunks
    assert [note.request_id for note in plan.admissions] == expected.admitted


@pytest.mark.parametrize("mode", MODES)
def test_same_steps_as_the_twin(mode):
    """A seeded driver; each step's rows, chunks, admissions and victims are the twin's."""
    rng = random.Random(f"twin {mode}")
    steps = preemptions = 0
    while steps < 26_000:
        scheduler = make_scheduler(**random_settings(rng, mode))
        driver, twin = Driver(scheduler), Twin(scheduler.config)
        sources: dict = {}
        # A plan without rows is never sent, so that its victims appear in the next one that is.
        unsent: list[int] = []
        rate = rng.choice([0.1, 0.4, 0.7])
        for turn in range(400):
            if turn < 250:
                while rng.random() < rate and len(sources) < 60:
                    add_random(rng, driver, sources, twin)
                if sources and rng.random() < 0.03:
                    rid = rng.choice(list(sources))
                    driver.abort(rid)
                    twin.abort(rid)
            elif not scheduler.has_work:
                break
            expected = twin.step()
            plan = driver.step()
            compare(plan, expected)
            unsent += expected.preempted
            if plan.num_rows:
                assert list(plan.preempted) == unsent
                unsent = []
                steps += 1
            if turn % 7 == 0:
                assert scheduler.problems() == []
        assert scheduler.problems() == []
        preemptions += scheduler.stats().num_preemptions
    assert preemptions > 100, "the pools were too large to press anybody"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_everybody_ends_with_its_own_tokens(mode, depth):
    """End tokens, aborts and failing steps included, with steps in flight; nothing starves, nothing leaks."""
    rng = random.Random(f"drive {mode} {depth}")
    steps = 0
    while steps < 9_000:
        chosen = random_settings(rng, mode)
        treatments = random_treatments(rng, chosen["num_blocks"])
        scheduler = make_scheduler(groups=rng.choice([1, 1, 2]), **chosen, **treatments)
        driver = Driver(scheduler, depth=depth)
        sources: dict = {}
        driver.watch_content(sources)
        for _ in range(rng.randrange(10, 200)):
            while rng.random() < 0.4:
                add_random(rng, driver, sources, eos=True)
            if sources and rng.random() < 0.05:
                driver.abort(rng.choice(list(sources)))
            if driver.flights and rng.random() < 0.01:
                driver.fail()
            driver.step()
            if rng.random() < 0.1:
                assert scheduler.problems() == []
        for _ in range(20_000):
            if not scheduler.has_work and not driver.flights:
                break
            driver.step()
        assert scheduler.problems() == []
        assert set(driver.finished) == set(sources)
        for rid, source in sources.items():
            expected = expected_tokens(source, scheduler.config)
            produced = driver.outputs[rid]
            if driver.finished[rid].finish_reason in ("abort", "error"):
                assert produced == expected[: len(produced)]
            else:
                assert produced == expected
        steps += scheduler.stats().num_steps


def test_virtual_time_makes_the_same_plans():
    """Without token contents the plans are the same, as long as no end token cuts a request short."""
    for seed in range(40):
        rng = random.Random(seed)
        chosen = random_settings(rng, MODES[seed % 4])
        depth = seed % 3
        drivers = [Driver(make_scheduler(**chosen), depth, virtual) for virtual in (False, True)]
        draws = [random.Random(seed) for _ in drivers]
        for driver, draw in zip(drivers, draws, strict=True):
            sources: dict = {}
            for _ in range(60):
                if draw.random() < 0.5:
                    add_random(draw, driver, sources)
                driver.step()
            driver.run()
        real, virtual = ([(p.decodes, p.rows, p.preempted) for p in driver.plans] for driver in drivers)
        assert real == virtual
        assert set(drivers[0].finished) == set(drivers[1].finished)


class SchedulerMachine(RuleBasedStateMachine):
    """Arrivals, aborts, steps, commits and failures in any order that an engine could make; shrinks what it finds."""

    @initialize(
        mode=st.sampled_from(MODES),
        block_size=st.sampled_from([1, 2, 4]),
        usable=st.integers(3, 12),
        seqs=st.integers(1, 4),
        watermark=st.integers(0, 2),
        host=st.integers(0, 12),
        sharing=st.booleans(),
        depth=st.integers(0, 2),
        share=st.sampled_from([0.0, 0.25, 0.5]),
    )
    def begin(self, mode, block_size, usable, seqs, watermark, host, sharing, depth, share) -> None:
        length = max(2, usable * block_size - 1)
        self.depth = depth
        self.driver = Driver(
            make_scheduler(
                mode=mode,
                block_size=block_size,
                num_blocks=usable + 1,
                max_model_len=length,
                max_num_seqs=seqs,
                max_num_batched_tokens=seqs + 3 if mode == "chunked" else length + seqs,
                watermark_blocks=watermark,
                long_prefill_token_threshold=3,
                short_prompt_share=share,
                num_host_blocks=host,
                preemption_mode="swap",
                enable_prefix_caching=sharing,
            ),
            depth=depth,
        )
        self.sources: dict = {}
        self.driver.watch_content(self.sources)

    @rule(prompt=st.integers(1, 12), output=st.integers(1, 12), eos=st.booleans())
    def add(self, prompt: int, output: int, eos: bool) -> None:
        rid = len(self.sources) + 1
        source = request(rid, prompt, output, arrival=self.driver.now, eos=(5, 17, 123, 400) if eos else ())
        try:
            self.driver.scheduler.add(source, self.driver.now)
        except RequestError:
            return
        self.sources[rid] = source

    @rule(data=st.data())
    def abort(self, data) -> None:
        if self.sources:
            self.driver.abort(data.draw(st.sampled_from(sorted(self.sources))))

    @rule(count=st.integers(1, 8))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.driver.step()

    @rule()
    def fail(self) -> None:
        if self.driver.flights:
            self.driver.fail()

    @invariant()
    def books_agree(self) -> None:
        if hasattr(self, "driver"):
            assert self.driver.scheduler.problems() == []

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        self.driver.run(5_000)
        assert set(self.driver.finished) == set(self.sources)
        for rid, source in self.sources.items():
            expected = expected_tokens(source, self.driver.scheduler.config)
            produced = self.driver.outputs[rid]
            cut_short = self.driver.finished[rid].finish_reason in ("abort", "error")
            assert produced == (expected[: len(produced)] if cut_short else expected)


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=60, stateful_step_count=30)
