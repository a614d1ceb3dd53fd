"""All that may happen to KV memory, in any order and with steps in flight, against one whose every cell is known."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from foliolm.core.kvspec import KVSpec
from foliolm.kv import HostPool, KVManager, SwapSpace

GROUPS, BLOCKS, SIZE = 2, 12, 2
SPECS = [KVSpec("near", 1, 4), KVSpec("far", 2, 8)]
GARBAGE = "garbage"
WHICH = st.integers(0, 11)
WANTED = (
    "hit", "hit on the host", "copy on write", "moved to the host", "swap back", "failed step", "abort in flight",
    "swap that took a prefix's slot",
)  # fmt: skip


class Step:
    """A plan in the making, and later a step in flight."""

    def __init__(self):
        self.step_id = 0
        self.out, self.back, self.copies = [], [], []
        self.writes = {}  # (group, block, offset) -> value
        self.rows = {}  # request -> tokens computed with it
        self.reads = {}  # request -> [(place, value)]
        self.swapped_out = []
        self.offloaded = []
        self.copied = []  # (step that wrote what is copied, places that it is copied to)


class MemoryMachine(RuleBasedStateMachine):
    """Requests are admitted over what the device and the host know, forked, written, swapped, aborted; steps run in
    order, are committed or fail; prefixes are evicted, moved to the host, found there and forgotten.

    The twin holds what each place of both memories contains: the tokens up to it, and whose they are. A plan's moves
    and writes reach the memory when it is sealed, as early as can be; what it reads is looked at when it is committed,
    as late as can be. A step that failed leaves garbage wherever it was to write.
    """

    @initialize(depth=st.integers(0, 2), slots=st.sampled_from([0, 3, 5, 8]), every=st.integers(1, 3))
    def begin(self, depth, slots, every):
        self.kv = KVManager(SPECS, BLOCKS, SIZE)
        self.pool = HostPool(slots)
        self.swap = SwapSpace(self.kv, self.pool)
        self.host = self.kv.offload_to(self.pool, lambda node: node.depth % every == 0 or every == 1)
        self.depth = depth
        self.device = {}
        self.slots = {}
        self.writer = {}
        self.paths = {}  # those who hold blocks: their tokens
        self.away = {}  # those who swapped out: their tokens
        self.salts = {}
        self.depends = {}  # steps in flight without which a request's KV is not what it should be
        self.last_step = {}
        self.swap_steps = {}
        self.births = {}  # which residency of a request this is
        self.flights = []
        self.step_id = self.next_id = 0
        self.plan = Step()
        self.happened = Counter()

    # --- what a plan holds; every other plan is run at once, so that more of what needs a history comes about

    @rule(trunk=st.integers(0, 2), length=st.integers(7, 11))
    def serve(self, trunk, length):
        """A request that is admitted, run and ended."""
        self.seal_for_somebody_else()
        self.start([trunk] * length, "", True)
        if self.next_id in self.paths:
            self.seal()
            while self.flights:
                self.commit()
            if self.next_id in self.paths:
                self.end(self.next_id)

    @rule(
        trunk=st.integers(0, 2), length=st.integers(5, 11), salt=st.sampled_from(["", "", "a"]), take=st.integers(0, 3)
    )
    def admit(self, trunk, length, salt, take):
        self.start([trunk] * length, salt, take)

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9))
    def admit_any(self, tokens):
        self.start(tokens, "", True)

    def start(self, tokens, salt, take):
        match = self.kv.match(salt, tokens)
        size = self.kv.blocks_for(len(tokens))
        known = match.num_tokens + SIZE * len(match.on_host)
        assert known < len(tokens)
        self.next_id += 1
        rid = self.next_id
        if size - len(match.nodes) + match.num_idle > self.kv.num_free:
            free = self.kv.num_free
            for way in (self.kv.allocate, self.kv.allocate_from_host):
                try:
                    way(rid, len(tokens), match, salt)
                except ValueError:
                    assert self.kv.num_free == free
                else:
                    raise AssertionError("there was no room for it")
            return
        self.happened["hit"] += bool(match.nodes)
        if match.on_host and take:
            self.happened["hit on the host"] += 1
            _, copies = self.kv.allocate_from_host(rid, len(tokens), match, salt)
            assert len(copies) == GROUPS * len(match.on_host)
            self.plan.back += copies
        else:
            known = match.num_tokens
            self.kv.allocate(rid, len(tokens), match, salt)
        self.salts[rid], self.paths[rid], self.depends[rid] = salt, list(tokens), set()
        self.births[rid] = 1
        self.compute(rid, known)

    @precondition(lambda self: self.idle_rows())
    @rule(which=WHICH, token=st.integers(0, 1))
    def append(self, which, token):
        rid = self.one(self.idle_rows(), which)
        position, before = len(self.paths[rid]), self.kv.num_free
        try:
            if position % SIZE == 0:
                self.kv.grow(rid)
            elif self.kv.is_shared(rid, position):
                _, copies = self.kv.own(rid, position, self.fence(rid))
                self.plan.copies += copies
                self.happened["copy on write"] += 1
        except ValueError:
            assert before == 0, "it was refused although there was room"
            return
        self.paths[rid].append(token)
        self.compute(rid, position)

    @precondition(lambda self: self.idle_rows())
    @rule(which=WHICH, less=st.integers(0, 4), public=st.booleans())
    def fork(self, which, less, public):
        parent = self.one(self.idle_rows(), which)
        # Only hypotheses of a search share less than all, and with them no step is planned while one is in flight.
        count = max(1, len(self.paths[parent]) - (0 if self.depth else less))
        self.next_id += 1
        child = self.next_id
        self.kv.fork(child, parent, count, public)
        self.paths[child], self.salts[child] = self.paths[parent][:count], self.salts[parent]
        self.depends[child], self.births[child] = set(self.depends[parent]), 1
        self.last_step[child] = self.last_step.get(parent, 0)

    @precondition(lambda self: self.paths)
    @rule(which=WHICH, others=st.booleans())
    def swap_out(self, which, others):
        if others:
            self.seal_for_somebody_else()
        if not self.idle_rows():
            return
        rid = self.one(self.idle_rows(), which)
        count = len(self.paths[rid])
        wanted = self.swap.slots_for(rid, count)
        if not wanted:
            return
        room, cached = self.host.room(wanted), len(self.host)
        self.host.reclaim(wanted)
        assert (self.pool.num_free >= wanted) == (room >= wanted)
        if room < wanted:
            return
        self.happened["swap that took a prefix's slot"] += len(self.host) < cached
        self.plan.out += self.swap.out(rid, count)
        self.plan.swapped_out.append(rid)
        self.kv.release(rid, self.fence(rid))
        self.away[rid] = self.paths.pop(rid)
        self.swap_steps[rid] = 0
        self.births[rid] += 1

    @precondition(lambda self: self.away)
    @rule(which=WHICH, token=st.integers(0, 1), wait=st.booleans())
    def swap_in(self, which, token, wait):
        rid = self.one(sorted(self.away), which)
        if wait:
            self.seal_for_somebody_else()
            while self.flights:
                self.commit()
        step = self.swap_steps[rid]
        if not step or any(flight.step_id <= step for flight in self.flights):
            return
        tokens = [*self.away[rid], token]
        match = self.kv.match(self.salts[rid], tokens)
        if not self.swap.usable(rid, match):
            self.end(rid)
            return
        if self.kv.blocks_for(len(tokens)) - len(match.nodes) + match.num_idle > self.kv.num_free:
            return
        self.happened["swap back"] += 1
        _, copies = self.swap.back(rid, len(tokens), match, self.salts[rid])
        self.plan.back += copies
        self.paths[rid] = tokens
        del self.away[rid]
        self.compute(rid, len(tokens) - 1)

    # --- what steps do

    @rule()
    def seal(self):
        """The plan is complete. One without rows is not run: what it is to move waits for the next."""
        plan = self.plan
        if not plan.rows:
            return
        self.plan = Step()
        self.step_id += 1
        plan.step_id = self.step_id
        moves, plan.offloaded = self.host.seal()
        self.pool.seal()
        self.happened["moved to the host"] += len(plan.offloaded)
        self.execute(plan, [*plan.out, *moves])
        for rid in plan.rows:
            self.last_step[rid] = plan.step_id
            self.depends[rid].add(plan.step_id)
            plan.reads[rid] = self.cells(rid)
        for rid in plan.swapped_out:
            if rid in self.swap_steps and not self.swap_steps[rid]:
                self.swap_steps[rid] = plan.step_id
        self.flights.append(plan)
        while len(self.flights) > self.depth:
            self.commit()

    def execute(self, plan, out):
        slots = [(move.group, move.host_block) for move in out]
        assert len(set(slots)) == len(slots), "a slot is written twice in a plan"
        for move in out:
            self.slots[move.group, move.host_block] = [
                self.device.get((move.group, move.device_block, offset)) for offset in range(SIZE)
            ]
            self.writer[move.group, move.host_block] = plan.step_id
        for move in plan.back:
            targets = [(move.group, move.device_block, offset) for offset in range(SIZE)]
            plan.copied.append((self.writer[move.group, move.host_block], targets))
            for offset, value in enumerate(self.slots[move.group, move.host_block]):
                self.store(plan, (move.group, move.device_block, offset), value)
        sources = [
            [self.device.get((copy.group, copy.source, offset)) for offset in range(SIZE)] for copy in plan.copies
        ]
        for copy, values in zip(plan.copies, sources, strict=True):
            for offset, value in enumerate(values):
                self.store(plan, (copy.group, copy.target, offset), value)
        for place, value in plan.writes.items():
            self.store(plan, place, value)

    @precondition(lambda self: self.flights)
    @rule()
    def commit(self):
        flight = self.flights.pop(0)
        self.look(flight)
        self.kv.complete(flight.step_id)
        self.host.written(flight.offloaded)
        for rid, (birth, count) in flight.rows.items():
            if rid in self.paths and self.births[rid] == birth:
                self.kv.publish(rid, self.paths[rid], count)
        for steps in self.depends.values():
            steps.discard(flight.step_id)

    @precondition(lambda self: self.flights)
    @rule()
    def fail(self):
        """The oldest step in flight raised: who depends on it ends, what it was to move is not there."""
        self.seal_for_somebody_else()
        if not self.flights:
            return
        self.happened["failed step"] += 1
        flight = self.flights.pop(0)
        self.look(flight)
        for place, step_id in self.writer.items():
            if step_id == flight.step_id:
                if len(place) == 2:
                    self.slots[place] = [GARBAGE] * SIZE
                else:
                    self.device[place] = GARBAGE
        for later in self.flights:
            for writer, places in later.copied:
                if writer == flight.step_id:
                    self.device.update(dict.fromkeys(places, GARBAGE))
        self.kv.complete(flight.step_id)
        self.host.failed(flight.offloaded)
        for rid in [rid for rid, steps in self.depends.items() if flight.step_id in steps]:
            self.end(rid)
        for rid in flight.swapped_out:
            if self.swap_steps.get(rid) == flight.step_id:
                self.end(rid)

    @precondition(lambda self: len(self.paths) + len(self.away) > 2)
    @rule(which=WHICH)
    def abort(self, which):
        self.seal_for_somebody_else()
        live = sorted([*self.paths, *self.away])
        if live:
            rid = self.one(live, which)
            self.happened["abort in flight"] += bool(self.depends[rid])
            self.end(rid)

    @rule()
    def reset(self):
        self.seal_for_somebody_else()
        kept = self.kv.num_idle
        assert self.kv.reset_prefixes() >= kept
        assert self.kv.num_idle == len(self.host) == 0

    # --- helpers

    @staticmethod
    def one(requests, which):
        return requests[which % len(requests)]

    def seal_for_somebody_else(self):
        """Nobody is aborted and no step fails while a plan is being made."""
        if self.plan.rows:
            self.seal()

    def idle_rows(self):
        return sorted(rid for rid in self.paths if rid not in self.plan.rows)

    def fence(self, rid):
        last = self.last_step.get(rid, 0)
        return last if self.flights and last >= self.flights[0].step_id else None

    def store(self, plan, place, value):
        self.device[place] = value
        self.writer[place] = plan.step_id

    def cells(self, rid):
        path, salt = self.paths[rid], self.salts[rid]
        return [
            ((group, blocks[position // SIZE], position % SIZE), (salt, tuple(path[: position + 1])))
            for group, blocks in enumerate(self.kv.table(rid))
            for position in range(len(path))
        ]

    def compute(self, rid, known):
        """A row of the plan: the request's tokens from ``known`` on."""
        count = len(self.paths[rid])
        self.plan.rows[rid] = (self.births[rid], count)
        for place, value in self.cells(rid):
            if len(value[1]) > known:
                assert place not in self.plan.writes, "two rows of a plan write to one place"
                self.plan.writes[place] = value

    def look(self, flight):
        for cells in flight.reads.values():
            for place, value in cells:
                assert self.device[place] == value, "a block was written while a step still read it"

    def end(self, rid):
        for flight in self.flights:
            if self.depends[rid] and rid in flight.rows and min(self.depends[rid]) < flight.step_id:
                flight.reads.pop(rid, None)  # what it reads may be garbage by now
        if rid in self.away:
            self.swap.drop(rid)
            del self.away[rid]
        self.swap_steps.pop(rid, None)
        if self.paths.pop(rid, None) is not None:
            self.kv.release(rid, self.fence(rid))
            self.kv.release(rid, self.fence(rid))  # a second time is nothing
        del self.depends[rid], self.salts[rid], self.births[rid]

    @invariant()
    def everybody_has_what_is_his(self):
        if not hasattr(self, "kv"):
            return
        for rid in self.idle_rows():
            for place, value in self.cells(rid):
                assert self.device.get(place) == value, f"request {rid} would read another's token"

    @invariant()
    def the_books_are_right(self):
        if not hasattr(self, "kv"):
            return
        assert self.kv.problems(set(self.paths)) == []
        assert self.pool.problems([*self.swap.slots(), *self.host.slots()]) == []
        assert self.swap.request_ids() == set(self.away)
        holders = Counter(block for rid in self.paths for block in set(self.kv.table(rid)[0]))
        usage = self.kv.group_usage()[0]
        assert usage.used == len(holders)
        assert self.kv.num_shared_blocks == sum(count > 1 for count in holders.values())
        assert usage.used + usage.free + usage.fenced == usage.total

    def teardown(self):
        if not hasattr(self, "kv"):
            return
        self.seal_for_somebody_else()
        for rid in sorted([*self.paths, *self.away]):
            self.end(rid)
        while self.flights:
            self.commit()
        assert self.kv.num_free == self.kv.num_usable
        self.kv.reset_prefixes()
        assert self.pool.num_used == 0


MemoryMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=40)
TestMemory = MemoryMachine.TestCase


def test_all_of_it_happens_often():
    """The same machine under seeded draws, which go further than what is made to be shrunk."""
    happened: Counter[str] = Counter()
    for seed in range(40):
        rng = random.Random(seed)
        machine = MemoryMachine()
        machine.begin(seed % 3, rng.choice([0, 3, 5, 8]), rng.randrange(1, 4))
        for _ in range(250):
            drive(machine, rng)
            machine.everybody_has_what_is_his()
            machine.the_books_are_right()
        machine.teardown()
        happened += machine.happened
    assert min(happened[name] for name in WANTED) >= 20, happened


def drive(machine, rng):
    """One thing that may happen now."""
    which, token, coin = rng.randrange(12), rng.randrange(2), rng.random() < 0.5
    may = [
        (4, lambda: machine.admit(rng.randrange(3), rng.randrange(5, 12), rng.choice(["", "", "a"]), rng.randrange(4))),
        (1, lambda: machine.admit_any([rng.randrange(2) for _ in range(rng.randrange(1, 10))])),
        (4, lambda: machine.serve(rng.randrange(3), rng.randrange(7, 12))),
        (5, machine.seal),
    ]
    if machine.idle_rows():
        may += [(8, lambda: machine.append(which, token)), (2, lambda: machine.fork(which, rng.randrange(5), coin))]
    if machine.paths:
        may.append((3, lambda: machine.swap_out(which, coin)))
    if machine.away:
        may.append((3, lambda: machine.swap_in(which, token, coin)))
    if machine.flights:
        may += [(3, machine.commit), (1, machine.fail)]
    if len(machine.paths) + len(machine.away) > 2:
        may.append((3 * (len(machine.paths) + len(machine.away)), lambda: machine.abort(which)))
    if rng.random() < 0.02:
        may = [(1, machine.reset)]
    rng.choices([act for _, act in may], [weight for weight, _ in may])[0]()
