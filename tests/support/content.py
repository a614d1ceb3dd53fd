"""KV memory by content: every position of every block holds the fingerprint of the prefix that it was written for."""

from __future__ import annotations

from foliolm.core.plan import Fork, Row, StepPlan


class ContentKV:
    """Follows plans as an executor does, and fails as soon as a row would read what is not its own prefix.

    ``tokens_of`` gives a request's token at a position, ``root_of`` what keeps its prefixes apart from others'.
    """

    def __init__(self, block_size: int, tokens_of, root_of) -> None:
        self.block_size = block_size
        self.tokens_of = tokens_of
        self.root_of = root_of
        self.tables: dict[int, list[list[int]]] = {}
        self.memory: dict[tuple[int, int, int], int | None] = {}
        self.prints: dict[int, list[int]] = {}
        self.host: dict[tuple[int, int], list[int | None]] = {}
        self.writer: dict[tuple, int] = {}  # the step that wrote a place of either memory last
        self.computed_tokens = 0
        self.swapped_blocks = [0, 0]

    def fingerprint(self, rid: int, position: int) -> int:
        known = self.prints.setdefault(rid, [])
        while len(known) <= position:
            before = known[-1] if known else hash(self.root_of(rid))
            known.append(hash((before, self.tokens_of(rid, len(known)))))
        return known[position]

    def run(self, plan: StepPlan) -> None:
        for rid in (*plan.released, *plan.preempted):
            self.tables.pop(rid, None)
        self.move(plan)
        rows = list(plan.all_rows())
        for row in plan.rows:
            self.extend(row)
        for fork in plan.forks:
            self.fork(fork)
        for row in rows[: len(plan.decodes)]:
            self.extend(row)
        for own in plan.own_blocks:
            for table, block in zip(self.tables[own.request_id], own.blocks, strict=True):
                table[own.index] = block
        self.write_and_read(plan, rows)

    def extend(self, row: Row) -> None:
        if row.whole_table:
            self.tables[row.request_id] = [[] for _ in row.new_blocks]
        for table, blocks in zip(self.tables[row.request_id], row.new_blocks or ((),) * 9, strict=False):
            table.extend(blocks)

    def fork(self, fork: Fork) -> None:
        """The tokens and blocks of another; a hypothesis of a search knows its tokens from here alone."""
        child, parent, count = fork.request_id, fork.parent, fork.num_tokens
        if child != parent:
            blocks = -(-count // self.block_size)
            self.tables[child] = [table[:blocks] for table in self.tables[parent]]
        if fork.token_id is not None:
            known = [self.fingerprint(parent, position) for position in range(count)]
            self.prints[child] = [*known, hash((known[-1], fork.token_id))]

    def write_and_read(self, plan: StepPlan, rows: list[Row]) -> None:
        # A step writes first and reads then; rows of one step must not write where others read or write.
        written: set[tuple[int, int, int]] = set()
        for row in rows:
            for position in range(row.context, row.context + row.num_new_tokens):
                for place in self.places(row.request_id, position):
                    assert place not in written, "two rows of a step write to one place"
                    written.add(place)
                    self.memory[place] = self.fingerprint(row.request_id, position)
                    self.writer[place] = plan.step_id
            self.computed_tokens += row.num_new_tokens
        for row in rows:
            for position in range(row.context + row.num_new_tokens):
                for place in self.places(row.request_id, position):
                    assert self.memory.get(place) == self.fingerprint(row.request_id, position), (
                        f"step {plan.step_id}: request {row.request_id} reads another's KV at position {position}"
                    )

    def move(self, plan: StepPlan) -> None:
        """Swaps out come first, then swaps in; each slot is written, and each block filled, at most once a step."""
        for number, swaps in enumerate((plan.swaps_out, plan.swaps_in)):
            self.swapped_blocks[number] += len(swaps)
            targets = [(s.group, s.host_block if swaps is plan.swaps_out else s.device_block) for s in swaps]
            assert len(set(targets)) == len(targets), "two copies of a step have one target"
        assert len(plan.swaps_out) + len(plan.swaps_in) == (
            sum(note.blocks_out + note.blocks_in for note in plan.swapped) * self.num_groups(plan)
        )
        for swap in plan.swaps_out:
            self.host[swap.group, swap.host_block] = [
                self.memory.get((swap.group, swap.device_block, slot)) for slot in range(self.block_size)
            ]
            self.writer[swap.group, swap.host_block] = plan.step_id
        for swap in plan.swaps_in:
            for slot, value in enumerate(self.host[swap.group, swap.host_block]):
                place = (swap.group, swap.device_block, slot)
                self.memory[place], self.writer[place] = value, plan.step_id
        assert len({(copy.group, copy.target) for copy in plan.copies}) == len(plan.copies), "copies with one target"
        read = [
            [self.memory.get((copy.group, copy.source, slot)) for slot in range(self.block_size)]
            for copy in plan.copies
        ]
        for copy, values in zip(plan.copies, read, strict=True):
            for slot, value in enumerate(values):
                place = (copy.group, copy.target, slot)
                self.memory[place], self.writer[place] = value, plan.step_id

    def fail(self, plan: StepPlan) -> None:
        """The step raised, and nothing that it was to write may be relied upon."""
        for place, step_id in self.writer.items():
            if step_id == plan.step_id:
                if len(place) == 2:
                    self.host[place] = [-1] * self.block_size
                else:
                    self.memory[place] = -1

    @staticmethod
    def num_groups(plan: StepPlan) -> int:
        return 1 + max((swap.group for swap in (*plan.swaps_out, *plan.swaps_in)), default=0)

    def places(self, rid: int, position: int):
        for group, table in enumerate(self.tables[rid]):
            block = table[position // self.block_size]
            assert block != 0, "the null block is written"
            yield group, block, position % self.block_size
