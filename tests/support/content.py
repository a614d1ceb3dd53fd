"""KV memory by content: every position of every block holds the fingerprint of the prefix that it was written for."""

from __future__ import annotations

from foliolm.core.plan import StepPlan


class ContentKV:
    """Follows plans as an executor does, and fails as soon as a row would read what is not its own prefix.

    ``tokens_of`` gives a request's token at a position, ``root_of`` what keeps its prefixes apart from others'.
    """

    def __init__(self, block_size: int, tokens_of, root_of) -> None:
        self.block_size = block_size
        self.tokens_of = tokens_of
        self.root_of = root_of
        self.tables: dict[int, list[list[int]]] = {}
        self.memory: dict[tuple[int, int, int], int] = {}
        self.prints: dict[int, list[int]] = {}
        self.computed_tokens = 0

    def fingerprint(self, rid: int, position: int) -> int:
        known = self.prints.setdefault(rid, [])
        while len(known) <= position:
            before = known[-1] if known else hash(self.root_of(rid))
            known.append(hash((before, self.tokens_of(rid, len(known)))))
        return known[position]

    def run(self, plan: StepPlan) -> None:
        for rid in (*plan.released, *plan.preempted):
            self.tables.pop(rid, None)
        rows = list(plan.all_rows())
        for row in rows:
            if row.whole_table:
                self.tables[row.request_id] = [[] for _ in row.new_blocks]
            for table, blocks in zip(self.tables[row.request_id], row.new_blocks or ((),) * 9, strict=False):
                table.extend(blocks)
        # A step writes first and reads then; rows of one step must not write where others read or write.
        written: set[tuple[int, int, int]] = set()
        for row in rows:
            for position in range(row.context, row.context + row.num_new_tokens):
                for place in self.places(row.request_id, position):
                    assert place not in written, "two rows of a step write to one place"
                    written.add(place)
                    self.memory[place] = self.fingerprint(row.request_id, position)
            self.computed_tokens += row.num_new_tokens
        for row in rows:
            for position in range(row.context + row.num_new_tokens):
                for place in self.places(row.request_id, position):
                    assert self.memory.get(place) == self.fingerprint(row.request_id, position), (
                        f"step {plan.step_id}: request {row.request_id} reads another's KV at position {position}"
                    )

    def places(self, rid: int, position: int):
        for group, table in enumerate(self.tables[rid]):
            block = table[position // self.block_size]
            assert block != 0, "the null block is written"
            yield group, block, position % self.block_size
