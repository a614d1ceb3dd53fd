"""Who answers in ``foliolm chat``: a server, or an engine of one's own."""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

from foliolm.core.errors import ConfigError, FolioError

if TYPE_CHECKING:
    from foliolm.api.results import RequestOutput

Messages = list[dict[str, str]]
OPTIONS = {"temperature": float, "top_p": float, "top_k": int, "max_tokens": int, "seed": int}
"""What ``/set`` may set, and of which type."""


class ChatError(FolioError):
    """The answer could not be had; the conversation goes on."""


class Backend(Protocol):
    """Answers conversations."""

    @property
    def name(self) -> str:
        """Of the model."""
        ...

    def stream(self, messages: Messages, options: dict[str, Any]) -> Iterator[str]:
        """The answer's text as it comes; closing the iterator ends the request.

        Raises:
            ChatError: with a sentence for the user.
        """
        ...

    def close(self) -> None:
        """Give back what it holds."""
        ...


class RemoteBackend:
    """A server that speaks OpenAI's API. The standard library's client: a terminal needs no other.

    Args:
        url: of the server, with or without ``/v1``.
        api_key: its key, or None.
        model: one of the names that the server offers; None: its first.

    Raises:
        ConfigError: the URL is none, or the server does not answer.
    """

    def __init__(self, url: str, api_key: str | None, model: str | None) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--url is {url!r}; it must be like http://127.0.0.1:8000")
        self._parts = parts
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"content-type": "application/json"}
        if api_key is not None:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._model = model or self._first_model(url)

    @property
    def name(self) -> str:
        """Of the model."""
        return self._model

    def stream(self, messages: Messages, options: dict[str, Any]) -> Iterator[str]:
        """The answer's text as it comes."""
        body = {"model": self._model, "messages": messages, "stream": True, **options}
        try:
            with closing(self._connection()) as connection:
                connection.request("POST", f"{self._path}/v1/chat/completions", json.dumps(body), self._headers)
                response = connection.getresponse()
                if response.status != 200:
                    raise ChatError(_message(response.read(), response.status))
                yield from _pieces(response)
        except (OSError, http.client.HTTPException) as error:
            raise ChatError(f"the connection to the server failed: {error or type(error).__name__}") from None

    def close(self) -> None:
        """Each answer has a connection of its own; nothing is held."""

    def _connection(self) -> http.client.HTTPConnection:
        host, port = self._parts.hostname or "", self._parts.port
        if self._parts.scheme == "https":
            return http.client.HTTPSConnection(host, port, timeout=600, context=ssl.create_default_context())
        return http.client.HTTPConnection(host, port, timeout=600)

    def _first_model(self, url: str) -> str:
        try:
            with closing(self._connection()) as connection:
                connection.request("GET", f"{self._path}/v1/models", headers=self._headers)
                response = connection.getresponse()
                raw = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise ConfigError(f"--url {url} does not answer: {error or type(error).__name__}") from None
        if response.status != 200:
            raise ConfigError(f"--url {url}: {_message(raw, response.status)}")
        try:
            return str(json.loads(raw)["data"][0]["id"])
        except (ValueError, KeyError, IndexError, TypeError):
            raise ConfigError(f"--url {url} offers no model at /v1/models") from None


def _pieces(response: http.client.HTTPResponse) -> Iterator[str]:
    for line in response:
        if not line.startswith(b"data: "):
            continue  # a comment, or the blank line between events
        data = line[6:].strip()
        if data == b"[DONE]":
            return
        loaded = json.loads(data)
        if "error" in loaded:
            raise ChatError(loaded["error"]["message"])
        for choice in loaded["choices"]:
            yield choice["delta"].get("content") or ""
    raise ChatError("the server closed the connection before the answer was complete")


def _message(raw: bytes, status: int) -> str:
    try:
        return f"{json.loads(raw)['error']['message']} (HTTP {status})"
    except (ValueError, KeyError, TypeError):
        return f"the server answered with HTTP {status}"


async def _next(outputs: AsyncIterator[RequestOutput]) -> RequestOutput:
    return await anext(outputs)


class LocalBackend:
    """An engine of one's own, which ends with the command.

    Args:
        model: as ``AsyncLLM``.
        settings: of the engine.
        report: takes lines about the start-up.
    """

    def __init__(self, model: str, settings: dict[str, Any], report: Any) -> None:
        import asyncio

        from foliolm.api.async_llm import AsyncLLM

        self._llm = AsyncLLM(model, report=report, **settings)
        self._runner = asyncio.Runner()

    @property
    def name(self) -> str:
        """Of the model."""
        return self._llm.model.name

    def stream(self, messages: Messages, options: dict[str, Any]) -> Iterator[str]:
        """The answer's text as it comes."""
        sampling = replace(self._llm.get_default_sampling_params(), **options)
        outputs = self._llm.chat(messages, sampling)
        said = 0
        try:
            while True:
                output: RequestOutput = self._runner.run(_next(outputs))
                text = output.outputs[0].text
                yield text[said:]
                said = len(text)
        except StopAsyncIteration:
            return
        except FolioError as error:
            raise ChatError(str(error)) from None
        finally:
            self._runner.run(outputs.aclose())  # type: ignore[attr-defined]  # it is a generator, which has one

    def close(self) -> None:
        """Stop the engine."""
        self._llm.close()
        self._runner.close()
