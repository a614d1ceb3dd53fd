"""An engine in a process of its own: the child's entry point, and the parent's hold on it."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import zmq

from foliolm.core.errors import EngineDeadError, FolioError
from foliolm.core.grammar import Grammars
from foliolm.engine.collector import pass_over_what_is
from foliolm.engine.engine import Engine, EngineInfo
from foliolm.engine.loop import EngineLoop
from foliolm.engine.messages import (
    Failure,
    FromEngine,
    Progress,
    Ready,
    Stop,
    ToEngine,
    decode_from_engine,
    encode,
)
from foliolm.engine.threads import bound_spinning

if TYPE_CHECKING:
    Socket = zmq.Socket[bytes]

STOP_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class EngineSpec:
    """How to build an engine in a fresh process.

    Attributes:
        factory: ``module:function``; called as ``function(*arguments, engine_index=…, report=…)`` where ``report``
            takes a line about the start-up. It returns an ``Engine``.
        arguments: picklable.
        environment: variables set for the child, beside the parent's own.
    """

    factory: str
    arguments: tuple[Any, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)


class EngineProcess:
    """The parent's end: the child, and a socket each way.

    The child runs ``python -m foliolm.engine.process``, not a fork or a multiprocessing spawn: torch's threads do not
    survive a fork, and a spawn would run the user's main module again. It has a process group of its own, so that a
    Ctrl-C in the terminal reaches the parent alone, which then drains. The child's standard input is its life line:
    it ends when the parent, however it died, no longer holds the other end.
    """

    def __init__(self, spec: EngineSpec, index: int = 0) -> None:
        self.spec = spec
        self.index = index
        self.info: EngineInfo | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="foliolm-")
        self._context = zmq.Context[Any]()
        self.inbox = self._bound(zmq.PUSH, "in")
        self.outbox = self._bound(zmq.PULL, "out")
        self.child: subprocess.Popen[bytes] | None = None

    def _bound(self, kind: int, name: str) -> Socket:
        socket: Socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        # No high-water mark: the bounds are the queue limit at one end and coalescing at the other; a blocking send
        # here would stop an event loop or an engine.
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.bind(self._address(name))
        return socket

    def _address(self, name: str) -> str:
        return f"ipc://{Path(self._folder.name) / name}"

    @property
    def descriptor(self) -> int:
        """Becomes readable when messages may have come; edge-triggered, so read until nothing is left."""
        return int(self.outbox.getsockopt(zmq.FD))

    def launch(self) -> None:
        """Start the child; returns at once."""
        command = [sys.executable, "-m", "foliolm.engine.process", self._address("in"), self._address("out")]
        self.child = subprocess.Popen(
            [*command, str(self.index)],
            stdin=subprocess.PIPE,
            env={**os.environ, **self.spec.environment},
            process_group=0,
        )
        assert self.child.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # a child that died already is found by wait_ready
            pickle.dump((self.spec.factory, self.spec.arguments), self.child.stdin)
            self.child.stdin.flush()

    def wait_ready(self, report: Callable[[str], None]) -> EngineInfo:
        """Relay progress until the engine is ready.

        Raises:
            ConfigError, ModelError: what the factory raised, as it raised it.
            EngineDeadError: the child crashed or ended.
        """
        while True:
            message = self._next_message()
            if isinstance(message, Progress):
                report(message.text)
            elif isinstance(message, Ready):
                self.info = message.info
                # Both ends are connected and need the sockets' names no more; gone now, they cannot be left behind by
                # a parent that is killed.
                self._folder.cleanup()
                return message.info
            elif isinstance(message, Failure):
                raise message.error()

    def _next_message(self) -> FromEngine:
        assert self.child is not None
        while not self.outbox.poll(100):
            if self.child.poll() is not None and not self.outbox.poll(0):
                raise EngineDeadError(f"the engine process ended while starting ({self.exit_words()})")
        return decode_from_engine(self.outbox.recv())

    def send(self, message: ToEngine) -> None:
        """Hand a message to the engine; never blocks."""
        self.inbox.send(encode(message), zmq.NOBLOCK)

    def kill(self) -> None:
        """End the child by force; whoever waits for it sees it end."""
        if self.child is not None and self.child.poll() is None:
            self.child.kill()

    def exit_words(self) -> str:
        """How the child ended, for people."""
        code = self.child.returncode if self.child else None
        if code is not None and code < 0:
            return f"killed by {signal.Signals(-code).name}"
        return f"exit code {code}"

    def close(self) -> None:
        """Stop the child, by request, then by force; give back sockets and folder. Idempotent."""
        if self.child is not None and self.child.poll() is None:
            with contextlib.suppress(zmq.ZMQError):
                self.send(Stop())
            try:
                self.child.wait(STOP_TIMEOUT_S if self.info else 0.2)
            except subprocess.TimeoutExpired:
                self.child.kill()
                self.child.wait()
        if self.child is not None and self.child.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.child.stdin.close()
        self._context.destroy(linger=0)
        self._folder.cleanup()


def main() -> int:
    """The child's entry point: build the engine that standard input describes, and serve it."""
    inbox_address, outbox_address, index = sys.argv[1], sys.argv[2], int(sys.argv[3])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format=f"engine {index} %(levelname)s %(message)s", stream=sys.stderr)
    bound_spinning()
    factory, arguments = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_exit_with_parent, name="life line", daemon=True).start()

    context: zmq.Context[Any] = zmq.Context()
    inbox, outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    inbox.setsockopt(zmq.RCVHWM, 0)
    outbox.setsockopt(zmq.SNDHWM, 0)
    outbox.setsockopt(zmq.LINGER, 1000)
    inbox.connect(inbox_address)
    outbox.connect(outbox_address)

    try:
        engine = _build(factory, arguments, index, lambda text: outbox.send(encode(Progress(text))))
    except FolioError as error:
        outbox.send(encode(Failure.of(error)))
        context.destroy()
        return 2
    except Exception as error:
        traceback.print_exc()
        outbox.send(encode(Failure.of(error)))
        context.destroy()
        return 1

    pass_over_what_is()
    outbox.send(encode(Ready(engine.info)))
    if engine.grammars is not None:
        threading.Thread(target=_read_ahead, args=(engine.grammars,), name="grammars", daemon=True).start()
    EngineLoop(engine, inbox, outbox).run()
    engine.close()
    context.destroy()
    return 0


def _build(factory: str, arguments: tuple[Any, ...], index: int, report: Callable[[str], None]) -> Engine:
    module, _, name = factory.partition(":")
    built = getattr(importlib.import_module(module), name)(*arguments, engine_index=index, report=report)
    assert isinstance(built, Engine), f"{factory} returned {type(built).__name__}, not an Engine"
    return built


def _read_ahead(grammars: Grammars) -> None:
    # Reading a vocabulary holds the interpreter for some hundred milliseconds: better now than beside streams, and not
    # before the engine is ready, since most need it never.
    try:
        grammars.read_ahead()
    except FolioError as error:
        logging.getLogger("foliolm.engine").warning("answers cannot be given a form: %s", error)


def _exit_with_parent() -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
