"""What the executor keeps of each request from the plan that admits it to the plan that releases it.

One row ("slot") of a few growing arrays a request, so that a step's batch is made by indexing and not by a loop.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from foliolm.core.errors import RequestError
from foliolm.core.grammar import Grammars, GrammarState
from foliolm.core.plan import Admission, Fork, OwnBlock
from foliolm.core.sampling import SamplingParams
from foliolm.executor.torch.draws import fresh_key, seeded_key
from foliolm.executor.torch.history import History
from foliolm.executor.torch.sampling_rows import SamplingRows

FIRST_SLOTS, FIRST_WIDTH = 16, 256


class RequestTable:
    """Tokens, block tables and sampling state by slot.

    Args:
        num_groups: KV groups.
        num_tokens: the model's token ids are below it.
        seed: the engine's; None: a request without a seed of its own draws fresh entropy.
        grammars: compiles what answers must follow; None: requests with a grammar end with an error.

    Attributes:
        tokens: [slots, width] int32 prompt and output.
        lengths: [slots] int64 tokens in all.
        prompt_lengths: [slots] int64.
        tables: by group, [slots, width] int64 physical block ids; 0, the null block, beyond a request's own.
        num_blocks: by group, [slots] int64.
        keys: [slots] uint64 of the requests' random draws.
        sampling: by slot, None where free.
        sampling_rows: the same, as arrays.
        end_ids: by slot, ids that ``min_tokens`` forbids.
        history: by slot, penalties' counts, None where nothing asks for them.
        grammar: by slot, how far the answer has come in its grammar; None where there is none.
        adapters: [slots] int64 load ids of their adapters, −1 for the bare model.
        changes: counts changes of any block table.
    """

    def __init__(
        self, num_groups: int, num_tokens: int, seed: int | None = None, grammars: Grammars | None = None
    ) -> None:
        self._seed = seed
        self.grammars = grammars
        self._slots: dict[int, int] = {}
        self._free: list[int] = list(range(FIRST_SLOTS - 1, -1, -1))
        self.tokens: NDArray[np.int32] = np.zeros((FIRST_SLOTS, FIRST_WIDTH), np.int32)
        self.lengths: NDArray[np.int64] = np.zeros(FIRST_SLOTS, np.int64)
        self.prompt_lengths: NDArray[np.int64] = np.zeros(FIRST_SLOTS, np.int64)
        self.keys: NDArray[np.uint64] = np.zeros(FIRST_SLOTS, np.uint64)
        self.adapters: NDArray[np.int64] = np.full(FIRST_SLOTS, -1, np.int64)
        self.tables: list[NDArray[np.int64]] = [np.zeros((FIRST_SLOTS, 16), np.int64) for _ in range(num_groups)]
        self.num_blocks: list[NDArray[np.int64]] = [np.zeros(FIRST_SLOTS, np.int64) for _ in range(num_groups)]
        self.sampling: list[SamplingParams | None] = [None] * FIRST_SLOTS
        self.sampling_rows = SamplingRows(FIRST_SLOTS, num_tokens)
        self.end_ids: list[tuple[int, ...]] = [()] * FIRST_SLOTS
        self.history: list[History | None] = [None] * FIRST_SLOTS
        self.grammar: list[GrammarState | None] = [None] * FIRST_SLOTS
        self._num_histories = 0
        self.changes = 0

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._slots

    def slot(self, request_id: int) -> int:
        """A request's slot.

        Raises:
            KeyError: it was never admitted, or has been released.
        """
        return self._slots[request_id]

    def slots(self, request_ids: Sequence[int]) -> NDArray[np.int64]:
        """The slots of several requests."""
        known = self._slots
        return np.fromiter((known[rid] for rid in request_ids), np.int64, len(request_ids))

    def admit(self, note: Admission) -> None:
        """A request enters; or comes back, with its tokens as the scheduler knows them and its draws as they were."""
        slot = self._slots.get(note.request_id)
        if slot is None:
            slot = self._new_slot()
            self._slots[note.request_id] = slot
            seed = note.sampling.seed
            if seed is not None:
                self.keys[slot] = seeded_key(seed)
            elif self._seed is not None:
                self.keys[slot] = seeded_key(self._seed, note.request_id)
            else:
                self.keys[slot] = fresh_key()
        count, sampling = len(note.token_ids), note.sampling
        self._widen(count + 1)
        self.tokens[slot, :count] = note.token_ids
        self.lengths[slot] = count
        self.prompt_lengths[slot] = note.num_prompt_tokens
        self.adapters[slot] = -1 if note.adapter is None else note.adapter
        self.sampling[slot] = sampling
        self.sampling_rows.set(slot, sampling)
        self.end_ids[slot] = tuple({*(() if sampling.ignore_eos else note.eos_token_ids), *sampling.stop_token_ids})
        if sampling.beam is not None:
            self.sampling_rows.search(slot, sampling.beam.num_candidates(len(self.end_ids[slot])))
        penalised = sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1.0
        self._set_history(slot, History(note.token_ids, note.num_prompt_tokens) if penalised else None)
        self._take_grammar(slot, note)
        self._clear_table(slot)

    def release(self, request_id: int) -> None:
        """Forget a request; unknown ones are no error: one may end before its first step."""
        slot = self._slots.pop(request_id, None)
        if slot is None:
            return
        self.sampling[slot] = None
        self._set_history(slot, None)
        self.grammar[slot] = None
        self.end_ids[slot] = ()
        self._clear_table(slot)
        self._free.append(slot)

    def forget_table(self, request_id: int) -> None:
        """A request's KV was given up; all else stays."""
        slot = self._slots.get(request_id)
        if slot is not None:
            self._clear_table(slot)

    def add_blocks(self, slot: int, new_blocks: Sequence[Sequence[int]], whole_table: bool) -> None:
        """Append to a request's block tables, or replace them.

        Raises:
            ValueError: the plan's KV groups are not the model's.
        """
        if not new_blocks:
            return
        if len(new_blocks) != len(self.tables):
            raise ValueError(f"a row has blocks of {len(new_blocks)} KV groups; the model has {len(self.tables)}")
        self.changes += 1
        if whole_table:
            self._clear_table(slot)
        for group, blocks in enumerate(new_blocks):
            start = int(self.num_blocks[group][slot])
            end = start + len(blocks)
            table = self.tables[group]
            if end > table.shape[1]:
                table = np.pad(table, ((0, 0), (0, max(end, 2 * table.shape[1]) - table.shape[1])))
                self.tables[group] = table
            table[slot, start:end] = blocks
            self.num_blocks[group][slot] = end

    def fork(self, forks: Sequence[Fork], block_size: int) -> None:
        """Requests go on from others' tokens and blocks; a parent's own are still as it left them.

        Raises:
            KeyError: one of them was never admitted.
        """
        for fork in forks:
            self.changes += 1
            slot, source, count = self._slots[fork.request_id], self._slots[fork.parent], fork.num_tokens
            self._widen(count + 1)
            if slot != source:
                self.tokens[slot, :count] = self.tokens[source, :count]
                self._clear_table(slot)
                blocks = -(-count // block_size)
                for table, held in zip(self.tables, self.num_blocks, strict=True):
                    table[slot, :blocks] = table[source, :blocks]
                    held[slot] = blocks
            self.lengths[slot] = count
            if fork.token_id is not None:
                self.tokens[slot, count] = fork.token_id
                self.lengths[slot] = count + 1

    def replace_block(self, own: OwnBlock) -> None:
        """A request gets a block of its own in place of a shared one."""
        self.changes += 1
        slot = self._slots[own.request_id]
        for table, block in zip(self.tables, own.blocks, strict=True):
            table[slot, own.index] = block

    def append(self, slots: NDArray[np.int64], sampled: NDArray[np.int64]) -> None:
        """One more token for each slot; no slot twice."""
        if not len(slots):
            return
        positions = self.lengths[slots]
        self._widen(max(positions.tolist()) + 1)
        self.tokens[slots, positions] = sampled
        self.lengths[slots] = positions + 1
        for slot, token in zip(slots.tolist(), sampled.tolist(), strict=True) if self._num_histories else ():
            history = self.history[slot]
            if history is not None:
                history.add(token)

    def _take_grammar(self, slot: int, note: Admission) -> None:
        """A new request begins its grammar; one that comes back goes on where its tokens stand."""
        spec = note.sampling.grammar
        if spec is None:
            return
        state = self.grammar[slot]
        if state is None:
            try:
                if self.grammars is None:
                    raise RequestError("this engine compiles no grammars", spec.field)
                state = self.grammar[slot] = self.grammars.begin(spec)
            except RequestError as error:
                self.sampling_rows.fail(slot, str(error))
                return
        output = note.token_ids[note.num_prompt_tokens :]
        if state.num_accepted != len(output):
            state.restart(output)

    def _set_history(self, slot: int, history: History | None) -> None:
        self._num_histories += (history is not None) - (self.history[slot] is not None)
        self.history[slot] = history

    def _clear_table(self, slot: int) -> None:
        self.changes += 1
        for table, count in zip(self.tables, self.num_blocks, strict=True):
            table[slot, : count[slot]] = 0
            count[slot] = 0

    def _new_slot(self) -> int:
        if not self._free:
            size = len(self.lengths)
            self.tokens = np.pad(self.tokens, ((0, size), (0, 0)))
            self.lengths = np.pad(self.lengths, (0, size))
            self.prompt_lengths = np.pad(self.prompt_lengths, (0, size))
            self.keys = np.pad(self.keys, (0, size))
            self.adapters = np.pad(self.adapters, (0, size), constant_values=-1)
            self.tables = [np.pad(table, ((0, size), (0, 0))) for table in self.tables]
            self.num_blocks = [np.pad(count, (0, size)) for count in self.num_blocks]
            self.sampling.extend([None] * size)
            self.sampling_rows.grow(2 * size)
            self.end_ids.extend([()] * size)
            self.history.extend([None] * size)
            self.grammar.extend([None] * size)
            self._free.extend(range(2 * size - 1, size - 1, -1))
        return self._free.pop()

    def _widen(self, width: int) -> None:
        if width > self.tokens.shape[1]:
            more = max(width, 2 * self.tokens.shape[1]) - self.tokens.shape[1]
            self.tokens = np.pad(self.tokens, ((0, 0), (0, more)))
