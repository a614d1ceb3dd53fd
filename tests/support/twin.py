"""A naive twin of the scheduler: lists, recounted from scratch in every step, at depth 0. An oracle, not a design."""

from __future__ import annotations

from dataclasses import dataclass, field

from foliolm.core.request import EngineRequest
from foliolm.core.resolve import SchedulerConfig


@dataclass
class TwinRequest:
    source: EngineRequest
    order: tuple[int, int, int]
    limit: int
    tokens: int
    computed: int = 0
    blocks: int = 0
    preemptions: int = 0
    resumed_at: int = 0


@dataclass
class TwinStep:
    decodes: list[int] = field(default_factory=list)
    chunks: list[tuple[int, int, int]] = field(default_factory=list)  # request, context, new tokens
    preempted: list[int] = field(default_factory=list)
    admitted: list[int] = field(default_factory=list)


class Twin:
    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.usable = config.num_blocks - 1
        self.waiting: list[TwinRequest] = []
        self.prefilling: list[TwinRequest] = []
        self.decoding: list[TwinRequest] = []
        self.ending: list[TwinRequest] = []  # their blocks are free only when the step is over
        self.arrivals = 0
        self.batch_open = True
        self.prompt_steps = 0

    # --- helpers

    def blocks_for(self, tokens: int) -> int:
        return (tokens + self.config.block_size - 1) // self.config.block_size

    def free(self) -> int:
        return self.usable - sum(r.blocks for r in self.prefilling + self.decoding + self.ending)

    def add(self, source: EngineRequest) -> None:
        self.arrivals += 1
        priority = source.priority if self.config.scheduling_policy == "priority" else 0
        prompt = len(source.prompt_token_ids)
        limit = min(
            self.config.max_model_len, self.usable * self.config.block_size, prompt + source.sampling.max_tokens
        )
        self.waiting.append(TwinRequest(source, (priority, source.arrival_ns, self.arrivals), limit, prompt))
        self.waiting.sort(key=lambda r: r.order)

    def abort(self, rid: int) -> None:
        for place in (self.waiting, self.prefilling, self.decoding):
            place[:] = [r for r in place if r.source.request_id != rid]

    # --- one step: plan it and take its tokens

    def step(self) -> TwinStep:
        out = TwinStep()
        mode = self.config.mode
        if mode in ("static", "prefill-first"):
            if mode == "static":
                self.batch_open = self.batch_open or not (self.prefilling or self.decoding)
                prompts = self.batch_open
            else:
                prompts = self.prompt_steps < 16 or not self.decoding
            if prompts:
                self.prompts(out, self.config.max_num_batched_tokens)
            if out.chunks:
                self.prompt_steps += 1
            else:
                self.prompt_steps = 0
                self.decode(out)
        else:
            self.decode(out)
            self.prompts(out, self.config.max_num_batched_tokens - len(out.decodes))
        self.ending.clear()
        return out

    def decode(self, out: TwinStep) -> None:
        size = self.config.block_size
        while sum(r.computed + 1 > r.blocks * size for r in self.decoding) > self.free():
            running = sorted(self.prefilling + self.decoding, key=lambda r: r.order)[1:]
            ready = [r for r in running if r.preemptions == 0 or r.tokens - r.resumed_at >= size]
            spared = [r for r in ready if r.preemptions < self.config.max_preemptions]
            fewest = [r for r in ready if r.preemptions == min(s.preemptions for s in ready)]
            victim = (spared or fewest or running)[-1]
            out.preempted.append(victim.source.request_id)
            self.abort(victim.source.request_id)
            victim.computed = victim.blocks = 0
            victim.preemptions += 1
            self.waiting.append(victim)
            self.waiting.sort(key=lambda r: r.order)
        if self.decoding:
            self.batch_open = False
        for r in list(self.decoding):
            r.blocks = self.blocks_for(r.computed + 1)
            r.computed += 1
            r.tokens += 1
            out.decodes.append(r.source.request_id)
            if r.tokens >= r.limit:
                self.decoding.remove(r)
                self.ending.append(r)

    def prompts(self, out: TwinStep, left: int) -> None:
        config = self.config
        whole = config.mode != "chunked"
        for_long = left if whole else max(min(left, 1), left - int(left * config.short_prompt_share))
        wanted: dict[int, int] = {}
        given: dict[int, int] = {}

        def offer(count: int) -> int:
            if whole:
                return count if count <= left else 0
            return min(count, left, for_long) if count > config.long_prefill_token_threshold else min(count, left)

        def grant(r: TwinRequest) -> None:
            nonlocal left, for_long
            rid, count = r.source.request_id, r.tokens - r.computed
            wanted[rid], given[rid] = count, offer(count)
            if count > config.long_prefill_token_threshold:
                for_long -= given[rid]
            left -= given[rid]

        for r in sorted(self.prefilling, key=lambda r: r.order):
            grant(r)
        for attempt in range(2):
            passed = 0
            starved = False
            for r in list(self.waiting):
                if out.preempted or passed >= 32:
                    break
                running = len(self.prefilling) + len(self.decoding)
                if running >= config.max_num_seqs:
                    break
                needed = self.blocks_for(r.tokens)
                if needed + (config.watermark_blocks if running else 0) > self.free():
                    break
                if not offer(r.tokens):
                    if left > 0 and not whole and for_long < left:
                        passed += 1
                        starved = True
                        continue
                    break
                self.waiting.remove(r)
                self.prefilling.append(r)
                r.blocks, r.resumed_at = needed, r.tokens
                out.admitted.append(r.source.request_id)
                grant(r)
            if attempt == 0:
                if not whole:
                    for rid in wanted:
                        more = min(wanted[rid] - given[rid], left)
                        given[rid] += more
                        left -= more
                    for_long = left
                if not starved or left <= 0:
                    break
        for rid, count in given.items():
            if not count:
                continue
            r = next(r for r in self.prefilling if r.source.request_id == rid)
            out.chunks.append((rid, r.computed, count))
            r.computed += count
            if r.computed == r.tokens:
                r.tokens += 1
                self.prefilling.remove(r)
                if r.tokens < r.limit:
                    self.decoding.append(r)
