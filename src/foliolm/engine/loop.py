"""The loop of an engine that has a process to itself: inbox, step, outbox."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import zmq

from foliolm.core.errors import QueueFullError
from foliolm.core.plan import Decision
from foliolm.core.record import StepRecord
from foliolm.core.request import EngineRequest, TokenOutput
from foliolm.engine.admitting import AdapterOrders, HostQueue
from foliolm.engine.compiling import CompilingRequests
from foliolm.engine.engine import Engine
from foliolm.engine.messages import Abort, Add, Ask, EngineStats, Failure, StepOutputs, Stop, decode_to_engine, encode

if TYPE_CHECKING:
    Socket = zmq.Socket[bytes]

logger = logging.getLogger("foliolm.engine")

# A turn that neither ran a step nor ended a request while work waits means that every request waits for something
# outside; the loop then looks again after this long instead of spinning.
STALLED_POLL_MS = 5


class EngineLoop:
    """Serves one client over two sockets.

    Args:
        engine: this loop is the only one to call it.
        inbox: PULL socket with messages of ``ToEngine``.
        outbox: PUSH socket for ``StepOutputs``.
    """

    def __init__(self, engine: Engine, inbox: Socket, outbox: Socket) -> None:
        self.engine = engine
        self.inbox = inbox
        self.outbox = outbox
        self._accepted: list[int] = []
        self._refused: list[tuple[int, Failure]] = []
        self._outputs: list[TokenOutput] = []
        self._turns: list[Decision] = []
        self._answers: list[tuple[int, dict[str, Any]]] = []
        self._compiling = CompilingRequests(engine.prepare)
        self._orders = AdapterOrders(engine)
        self._host_queue = HostQueue(engine)
        self._stopped = False

    def run(self) -> None:
        """Until a ``Stop`` arrives. Between steps the inbox is drained without blocking; idle, it is waited for."""
        stalled = False
        checked = False
        while not self._stopped:
            busy = self.engine.has_work
            if not busy and not checked:
                self._report_invariants()
            checked = not busy
            idle_ms = STALLED_POLL_MS if self._compiling or self._orders or self._host_queue else None
            timeout_ms = STALLED_POLL_MS if stalled else (0 if busy else idle_ms)
            received = self._drain(timeout_ms)
            if self._stopped:
                break
            received |= self._take_compiled()
            received |= self._take_adapters()
            record = None
            if self.engine.has_work:
                self._outputs += self.engine.step()
                record = self.engine.last_record
                self._turns += self.engine.turns
            progressed = bool(received or self._outputs or record or self._turns)
            stalled = not progressed and not self.engine.in_flight
            if progressed:
                self._flush(record)
        self._compiling.close()
        self._orders.close()

    def _drain(self, timeout_ms: int | None) -> bool:
        if not self.inbox.poll(timeout_ms):
            return False
        while True:
            try:
                frame = self.inbox.recv(zmq.NOBLOCK)
            except zmq.Again:
                return True
            self._handle(frame)

    def _handle(self, frame: bytes) -> None:
        message = decode_to_engine(frame)
        if isinstance(message, Stop):
            self._stopped = True
        elif isinstance(message, Abort):
            self._compiling.abort(message.request_ids)
            self._host_queue.abort(message.request_ids)
            self._outputs += self.engine.abort(message.request_ids)
        elif isinstance(message, Ask):
            if message.what == "load_adapter":
                self._orders.begin(message)
            elif message.what == "unload_adapter":
                in_use = self.engine.unload_adapter(message.arguments["load_id"])
                self._answers.append((message.number, {"in_use": in_use}))
            else:
                self._answers.append((message.number, self.engine.ask(message.what)))
        elif isinstance(message, Add):
            first = message.requests[0].request_id
            limit = self.engine.scheduler.config.max_queued_requests
            waiting = len(self._compiling) + len(self._host_queue)
            if self.engine.is_prepared(message.requests) and not self._host_queue.must_wait(message.requests):
                self._add(first, message.requests)
            elif waiting >= limit:
                error = QueueFullError(f"{waiting} requests wait for grammars or adapters; the limit is {limit}")
                self._refused.append((first, Failure.of(error)))
            else:
                self._compiling.begin(message.requests)

    def _take_compiled(self) -> bool:
        ready = self._compiling.take_ready() if self._compiling else []
        for first, requests, error in ready:
            if error is not None:
                self._refuse(first, error)
            elif self._host_queue.must_wait(requests):
                self._host_queue.push(first, requests)
            else:
                self._add(first, requests)
        return bool(ready)

    def _take_adapters(self) -> bool:
        """Loads that are done, and requests for whose adapters there is room now."""
        answers = self._orders.take_done() if self._orders else []
        self._answers += answers
        taken = False
        while self._host_queue and (group := self._host_queue.pop()) is not None:
            taken = True
            first, requests = group
            if self.engine.has_adapters(requests):
                self._add(first, requests)
            else:
                self._compiling.begin(requests)  # what was read gave way to others meanwhile
        return bool(answers) or taken

    def _add(self, first: int, requests: tuple[EngineRequest, ...]) -> None:
        try:
            self.engine.add(requests)
        except Exception as error:
            self._refuse(first, error)
        else:
            self._accepted.append(first)

    def _refuse(self, first: int, error: Exception) -> None:
        failure = Failure.of(error)
        if failure.kind == "engine":
            logger.error("request %d could not be taken", first, exc_info=error)
        self._refused.append((first, failure))

    def _flush(self, record: StepRecord | None) -> None:
        engine = self.engine
        finished = engine.take_finished()
        stats = engine_stats(engine)
        message = StepOutputs.of(
            self._outputs, self._accepted, self._refused, stats, record, finished, self._turns, self._answers
        )
        self.outbox.send(encode(message))
        self._outputs, self._accepted, self._refused, self._turns, self._answers = [], [], [], [], []

    def _report_invariants(self) -> None:
        for problem in self.engine.check_invariants():
            logger.error("invariant broken while idle: %s", problem)


def engine_stats(engine: Engine) -> EngineStats:
    """The engine's state, in the form that clients get."""
    stats = engine.scheduler.stats()
    return EngineStats(
        num_running=stats.num_running,
        num_waiting=stats.num_waiting,
        kv_blocks_total=stats.kv_blocks_total,
        kv_blocks_used=stats.kv_blocks_used,
        num_preemptions=stats.num_preemptions,
        num_failed_steps=engine.ledger.totals.num_failed_steps,
        recomputed_tokens=stats.recomputed_tokens,
        prefix_cache_queries=stats.prefix_queries,
        prefix_cache_hits=stats.prefix_hits,
        prefix_cache_host_hits=stats.host_hits,
        swap_out_bytes=stats.swap_out_bytes,
        swap_in_bytes=stats.swap_in_bytes,
        host_blocks_total=stats.host_blocks_total,
        host_blocks_used=stats.host_blocks_used,
        host_blocks_cached=stats.host_blocks_cached,
        prompt_forked_tokens=stats.forked_tokens,
        kv_blocks_copied=stats.copied_blocks,
        kv_blocks_evicted=stats.evicted_blocks,
        kv_blocks_offloaded=stats.offloaded_blocks,
        kv_blocks_loaded=stats.loaded_blocks,
        kv_blocks_idle=stats.kv_blocks_idle,
        kv_blocks_shared=stats.kv_blocks_shared,
        kv_unused_tokens=stats.kv_unused_tokens,
        **_adapter_stats(engine),
    )


def _adapter_stats(engine: Engine) -> dict[str, Any]:
    book, slots = engine.adapters, engine.scheduler.adapters
    if book is None:
        return {}
    return {
        "adapter_slots": slots.num_slots or 0,
        "adapters_running": book.names(slots.running),
        "adapters_waiting": book.names(slots.waiting),
        "adapters_held": len(book.held),
        "lora_adapter_loads": engine.ledger.totals.adapter_loads,
        "lora_adapter_bytes_read": int(engine.ledger.totals.adapter_bytes),
    }
