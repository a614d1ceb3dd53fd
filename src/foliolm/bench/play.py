"""Playing a workload against a live server: a request goes out when it is due, whatever the others are waiting for."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import resource
import signal
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from foliolm.bench.answer import Answer, Exchange
from foliolm.bench.client import LoopWatch
from foliolm.bench.connection import Pool
from foliolm.bench.dialect import Dialect
from foliolm.bench.prompts import Prompt, Prompts
from foliolm.core.errors import ConfigError
from foliolm.simulate.spread import Gaps
from foliolm.simulate.workload.item import Item, Workload

_S = 1e-9
AHEAD_REQUESTS = 256
AHEAD_TOKENS = 1 << 20
"""Requests are written before they are due, as far as these allow."""
QUIET_NS = 3_000_000
"""Between two sends there must be so much time to write a request ahead."""


@dataclass(slots=True)
class Played:
    """Everything that was sent.

    Attributes:
        start_ns: the workload's time 0, monotonic.
        wall_s: from there to the last answer.
        answers: those that ended, in the order in which they did.
        unfinished: sent, but given up when somebody stopped the run.
        interrupted: somebody did.
        watch: the client's own delays.
        most_in_flight: at once.
        connections: opened.
        broken_off: why the workload could not be read to its end, or "".
        gaps: between the chunks that brought tokens, of requests that were answered whole.
    """

    start_ns: int
    wall_s: float = 0.0
    answers: list[Answer] = field(default_factory=list)
    unfinished: int = 0
    interrupted: bool = False
    watch: LoopWatch = field(default_factory=LoopWatch)
    most_in_flight: int = 0
    connections: int = 0
    broken_off: str = ""
    gaps: Gaps = field(default_factory=Gaps)

    def take(self, answer: Answer) -> None:
        """A request ended."""
        self.answers.append(answer)
        if not answer.error:
            for before, after in itertools.pairwise(answer.stamps):
                self.gaps.add(after - before, 1)

    @property
    def late_s(self) -> array[float]:
        """Of each request: by how much the client turned to it too late."""
        return array("d", ((answer.woke_ns - answer.due_ns) * _S for answer in self.answers))

    @property
    def connect_s(self) -> array[float]:
        """Of each request: from there until it was given to an open connection."""
        return array("d", ((answer.sent_ns - answer.woke_ns) * _S for answer in self.answers if answer.sent_ns))


@dataclass(frozen=True, slots=True)
class _Ready:
    """A request that only waits for its time."""

    item: Item
    number: int
    prompt: Prompt
    request: bytes
    blocks: list[int]


async def play(
    pool: Pool,
    dialect: Dialect,
    workload: Workload,
    prompts: Prompts,
    timeout_s: float,
    progress: Callable[[int, int, int], None] | None = None,
    with_blocks: bool = False,
) -> Played:
    """Play a workload to its end, or until SIGINT or SIGTERM.

    Args:
        pool: of connections.
        dialect: how requests are written.
        workload: is used up.
        prompts: makes them.
        timeout_s: a request that takes longer, from when it was due, is given up and counts as an error.
        progress: called with the numbers of requests that ended, failed and run.
        with_blocks: keep what prompts share, for a record.
    """
    _allow_many_connections()
    player = _Player(pool, dialect, workload, prompts, timeout_s, progress, with_blocks)
    with _stopped_by_signals(player.stop):
        await player.run()
    return player.played


class _Player:
    """The state of `play`."""

    def __init__(
        self,
        pool: Pool,
        dialect: Dialect,
        workload: Workload,
        prompts: Prompts,
        timeout_s: float,
        progress: Callable[[int, int, int], None] | None,
        with_blocks: bool,
    ) -> None:
        self.pool, self.dialect, self.workload, self.prompts = pool, dialect, workload, prompts
        self.timeout_s, self.progress, self.with_blocks = timeout_s, progress, with_blocks
        self.played = Played(0)
        self.numbers = itertools.count(1)
        self.stream: Iterator[Item] = workload.items()
        self.ahead: deque[_Ready] = deque()
        self.ahead_tokens = 0
        self.followers: list[tuple[int, int, _Ready]] = []
        self.live: set[asyncio.Task[None]] = set()
        self.changed = asyncio.Event()
        self.stopping = False
        self.failed = 0

    def stop(self) -> None:
        """Send nothing more, and give up what is under way."""
        self.stopping = True
        self.changed.set()

    async def run(self) -> None:
        while self.prepare():
            pass
        played = self.played
        played.watch.start()
        played.start_ns = time.monotonic_ns()
        try:
            while not self.stopping and (self.due() is not None or self.live):
                await self.turn()
        finally:
            played.watch.stop()
            played.interrupted = self.stopping
            played.unfinished = len(self.live)
            for task in list(self.live):
                task.cancel()
            await asyncio.gather(*self.live, return_exceptions=True)
            played.wall_s = (time.monotonic_ns() - played.start_ns) * _S
            played.connections = self.pool.opened

    async def turn(self) -> None:
        """Send what is due; else write a request ahead; else wait."""
        due = self.due()
        now = time.monotonic_ns() - self.played.start_ns
        if due is not None and due <= now:
            self.send(self.pop())
            await asyncio.sleep(0)  # what has arrived is stamped before the next is written
            return
        if (due is None or due - now > QUIET_NS) and self.prepare():
            await asyncio.sleep(0)
            return
        self.changed.clear()
        timer = None
        if due is not None:
            timer = asyncio.get_running_loop().call_later((due - now) * _S, self.changed.set)
        await self.changed.wait()
        if timer is not None:
            timer.cancel()

    def due(self) -> int | None:
        """When the next request is due, in nanoseconds from the start; None: nothing is known to come."""
        if not self.ahead:
            self.prepare()
        if not self.ahead:
            return self.followers[0][0] if self.followers else None
        if self.followers:
            return min(self.followers[0][0], self.ahead[0].item.time_ns)
        return self.ahead[0].item.time_ns

    def pop(self) -> _Ready:
        if not self.ahead or (self.followers and self.followers[0][0] < self.ahead[0].item.time_ns):
            return heapq.heappop(self.followers)[2]
        ready = self.ahead.popleft()
        self.ahead_tokens -= ready.item.num_prompt
        return ready

    def prepare(self) -> bool:
        """Write one more request ahead; False: there is none, or enough are written."""
        if self.ahead and (len(self.ahead) >= AHEAD_REQUESTS or self.ahead_tokens >= AHEAD_TOKENS):
            return False
        try:
            item = next(self.stream, None)
        except ConfigError as error:
            if not self.played.start_ns:
                raise
            self.played.broken_off, item = str(error), None
        if item is None:
            return False
        self.ahead.append(self.write(item))
        self.ahead_tokens += item.num_prompt
        return True

    def write(self, item: Item) -> _Ready:
        number = next(self.numbers)
        prompt = self.prompts.make(item, number)
        body = self.dialect.body(prompt.fields, item.num_output)
        blocks = self.prompts.blocks(item, prompt) if self.with_blocks else []
        return _Ready(item, number, prompt, self.pool.address.post(self.dialect.path, body), blocks)

    def send(self, ready: _Ready) -> None:
        due = self.played.start_ns + ready.item.time_ns
        answer = Answer(ready.item, ready.number, due, woke_ns=time.monotonic_ns())
        answer.blocks = ready.blocks
        task = asyncio.create_task(self.one(ready, answer))
        self.live.add(task)
        self.played.most_in_flight = max(self.played.most_in_flight, len(self.live))
        task.add_done_callback(self.live.discard)  # one that was cancelled, too

    async def one(self, ready: _Ready, answer: Answer) -> None:
        """One request from its sending to its end, and what follows upon it."""
        task = asyncio.current_task()
        assert task is not None
        left_s = self.timeout_s - (answer.woke_ns - answer.due_ns) * _S
        try:
            async with asyncio.timeout(max(0.0, left_s)):
                await self.exchange(ready, answer)
        except TimeoutError:
            answer.fail("timeout", f"no whole answer within {self.timeout_s:g} s")
        except OSError as error:
            answer.fail("connect", str(error) or type(error).__name__)
        self.played.take(answer)
        self.failed += bool(answer.error)
        self.prompts.heard(ready.item, ready.prompt, answer)
        answer.forget_tokens()
        now = time.monotonic_ns() - self.played.start_ns
        for item in self.workload.after(ready.item, now):
            written = self.write(item)
            heapq.heappush(self.followers, (item.time_ns, written.number, written))
        self.live.remove(task)
        self.changed.set()
        if self.progress is not None:
            self.progress(len(self.played.answers), self.failed, len(self.live))

    async def exchange(self, ready: _Ready, answer: Answer) -> None:
        """Over an idle connection; over a new one where there is none, or where the idle one turns out to be closed."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        keep = self.prompts.keeps_text(ready.item)
        reader = Exchange(answer, done, keep)
        connection = self.pool.idle() or await self.pool.open()
        try:
            answer.sent_ns = connection.ask(ready.request, reader)
            await done
            if answer.error == "stale":
                answer.error = answer.message = ""
                reader.done = done = asyncio.get_running_loop().create_future()
                connection = await self.pool.open()
                answer.sent_ns = connection.ask(ready.request, reader)
                await done
        finally:
            if not done.done():
                connection.drop()


@contextlib.contextmanager
def _stopped_by_signals(stop: Callable[[], None]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    taken = []
    for number in (signal.SIGINT, signal.SIGTERM):
        try:
            loop.add_signal_handler(number, stop)
        except (ValueError, RuntimeError, NotImplementedError):
            continue  # not the main thread, which alone gets signals
        taken.append(number)
    try:
        yield
    finally:
        for number in taken:
            loop.remove_signal_handler(number)


def _allow_many_connections() -> None:
    """A connection is a file: as many as the system lets us have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
