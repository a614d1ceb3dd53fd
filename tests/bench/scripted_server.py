"""A server of OpenAI's completions that misbehaves on order, on a thread of its own: `ScriptedServer`."""

from __future__ import annotations

import asyncio
import json
import threading


class ScriptedServer:
    """Answers each request as ``behave`` says.

    Args:
        behave: coroutine function of (server, number, body, send): ``number`` counts completions from 1 (the client's
            first question about what the server takes is number 0); ``send`` writes bytes.
        models: what /v1/models says.
        refuses: fields that a body must not have (HTTP 400).
    """

    def __init__(self, behave=None, models=("scripted",), refuses=()):
        self.behave = behave or (lambda server, number, body, send: stream(send, body))
        self.models, self.refuses = models, refuses
        self.bodies, self.running, self.most_running, self.connections = [], 0, 0, 0
        self.all_there = None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    def __enter__(self):
        self._thread.start()
        assert self._ready.wait(30)
        return self

    def __exit__(self, *_):
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)
        assert not self._thread.is_alive()

    async def _serve(self):
        self._loop, self._stop, self.all_there = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
        server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._ready.set()
        await self._stop.wait()
        server.close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    async def _connection(self, reader, writer):
        self.connections += 1
        try:
            while line := await reader.readline():
                headers = {}
                while (header := await reader.readline()) not in (b"\r\n", b""):
                    name, _, value = header.decode().partition(":")
                    headers[name.lower()] = value.strip()
                raw = await reader.readexactly(int(headers.get("content-length", 0)))
                path = line.split()[1].decode()
                if path == "/v1/models":
                    writer.write(whole(200, {"data": [{"id": name, "max_model_len": 4096} for name in self.models]}))
                else:
                    await self._answer(path, json.loads(raw), headers, writer)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def _answer(self, path, body, headers, writer):
        wrong = [name for name in self.refuses if name in body or (name == "ids" and isinstance(body["prompt"], list))]
        if wrong:
            writer.write(whole(400, {"error": {"message": f"{wrong[0]} is not known here"}}))
            return
        number = len(self.bodies)
        self.bodies.append({**body, "path": path, "headers": headers})
        self.running += bool(number)
        self.most_running = max(self.most_running, self.running)
        try:
            if number:
                await self.behave(self, number, body, writer.write)
            else:
                await stream(writer.write, body)
            await writer.drain()
            if writer.transport.is_closing():
                raise ConnectionError
        finally:
            self.running -= bool(number)


class BrokenOffError(ConnectionError):
    """Raised by a behaviour that closes the connection."""


def whole(status, payload):
    raw = json.dumps(payload).encode()
    head = f"HTTP/1.1 {status} Word\r\ncontent-type: application/json\r\ncontent-length: {len(raw)}\r\n\r\n"
    return head.encode() + raw


async def stream(
    send, body, tokens=None, claimed=None, reason="length", usage=True, done=True, breaks=False, pause_s=0.0
):
    """A stream of one token a chunk.

    Args:
        send: writes bytes.
        body: of the request.
        tokens: how many come; default: those asked for.
        claimed: completion tokens in the usage; default: the truth.
        reason: why it ended.
        usage, done: whether they come.
        breaks: the connection closes after the tokens.
        pause_s: after each token.
    """
    count = body["max_tokens"] if tokens is None else tokens
    send(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
    for number in range(count):
        choice = {"index": 0, "finish_reason": reason if number == count - 1 and not breaks else None}
        if "messages" in body:
            choice["delta"] = {"content": " x"}
        else:
            choice["text"] = " x"
            if body.get("return_token_ids"):
                choice["token_ids"] = [500 + number]
        event(send, {"choices": [choice]})
        await asyncio.sleep(pause_s)
    if breaks:
        raise BrokenOffError
    if usage:
        prompt = body.get("prompt")
        said = {"prompt_tokens": len(prompt) if isinstance(prompt, list) else 7}
        event(send, {"choices": [], "usage": {**said, "completion_tokens": count if claimed is None else claimed}})
    if done:
        chunk(send, b"data: [DONE]\n\n")
    send(b"0\r\n\r\n")


def event(send, payload):
    chunk(send, b"data: " + json.dumps(payload).encode() + b"\n\n")


def chunk(send, data):
    send(f"{len(data):x}\r\n".encode() + data + b"\r\n")
