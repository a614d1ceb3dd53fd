"""What a server takes, found out by asking once before anything is measured."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from foliolm.bench.answer import Answer, Exchange, refusal_of
from foliolm.bench.connection import Address, Pool
from foliolm.bench.prompts import Contents, Prompts
from foliolm.core.errors import ConfigError
from foliolm.simulate.workload.item import Item

ENDPOINTS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
UNKNOWN_FIELD = frozenset({400, 404, 405, 415, 422})
"""Answers to a request that the server does not understand; others say nothing about what it takes."""
_PROBE = Item(0, 16, 2)
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Dialect:
    """How requests are written for one server.

    Attributes:
        path: of the endpoint.
        model: name in the requests.
        max_model_len: most tokens of a request, where the server says so.
        form: of prompts: token_ids, text or chat.
        extras: fields beyond OpenAI's that it takes.
        limit: the field that bounds the answer.
    """

    path: str
    model: str
    max_model_len: int | None
    form: str
    extras: tuple[str, ...] = ()
    limit: str = "max_tokens"

    @property
    def ignores_eos(self) -> bool:
        """Whether answers have exactly the length asked for."""
        return "ignore_eos" in self.extras

    def body(self, prompt: dict[str, Any], num_output: int) -> bytes:
        """A request's body."""
        fields: dict[str, Any] = {"model": self.model, **prompt, self.limit: num_output, "temperature": 0}
        fields["stream"] = True
        fields["stream_options"] = {"include_usage": True}
        for name in self.extras:
            fields[name] = True
        return _encode(fields)


def _forms(endpoint: str, wanted: str | None) -> list[tuple[str, tuple[str, ...], str]]:
    """(form, extras, limit) from the fullest to the plainest."""
    both = ("ignore_eos", "return_token_ids")
    extras: tuple[tuple[str, ...], ...] = (both, both[:1], ())
    if endpoint == "chat":
        return [("chat", some, "max_tokens") for some in extras] + [("chat", (), "max_completion_tokens")]
    forms = ("token_ids", "text") if wanted is None else (wanted,)
    return [(form, some, "max_tokens") for form in forms for some in extras]


async def find_dialect(
    pool: Pool,
    endpoint: str,
    prompts: str | None,
    model: str | None,
    contents: Contents,
    timeout_s: float,
    say: Callable[[str], None],
) -> Dialect:
    """Ask for the models, then send one short request in ever plainer forms until the server takes it.

    Args:
        pool: of connections.
        endpoint: completions or chat.
        prompts: token_ids or text; None: ids where the server takes them.
        model: name in the requests; None: the server's first.
        contents: gives prompts.
        timeout_s: for each answer.
        say: takes a sentence about everything that is not the fullest form.

    Raises:
        ConfigError: nobody answers, the key is wrong, or no form is taken.
    """
    offered = await _models(pool, timeout_s)
    if model is None and not offered:
        raise ConfigError(f"{pool.address.url} offers no model at /v1/models; name one with --served-model-name")
    name = model or str(offered[0].get("id"))
    longest = next((entry.get("max_model_len") for entry in offered if entry.get("id") == name), None)
    refusals: list[str] = []
    for form, extras, limit in _forms(endpoint, prompts):
        dialect = Dialect(ENDPOINTS[endpoint], name, longest if isinstance(longest, int) else None, form, extras, limit)
        answer = await ask(pool, dialect, Prompts(contents, form), _PROBE, timeout_s)
        if answer.status in (401, 403):
            raise ConfigError(f"{pool.address.url} does not let us in: {answer.message} (HTTP {answer.status})")
        if answer.status in UNKNOWN_FIELD:
            refusals.append(f"{form} with {', '.join(extras) or 'no extras'}: {answer.message}")
            continue
        if answer.error:
            say(f"the first request failed ({answer.error}: {answer.message}); it is not part of the numbers")
        _tell(dialect, endpoint, prompts, refusals, say)
        return dialect
    raise ConfigError(f"{pool.address.url}{ENDPOINTS[endpoint]} takes none of our requests; {'; '.join(refusals)}")


def _tell(
    dialect: Dialect, endpoint: str, prompts: str | None, refusals: list[str], say: Callable[[str], None]
) -> None:
    if dialect.form == "text" and endpoint == "completions" and prompts is None:
        say(f"prompts are sent as text, so that their tokens are only about those asked for ({refusals[0]})")
    if not dialect.ignores_eos:
        say(f"the server takes no ignore_eos: answers may end before the length asked for ({refusals[-1]})")


async def ask(pool: Pool, dialect: Dialect, prompts: Prompts, item: Item, timeout_s: float) -> Answer:
    """Send one request by itself."""
    answer = Answer(item, 0, 0)
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    body = dialect.body(prompts.make(item, 0).fields, item.num_output)
    exchange = Exchange(answer, done)
    await _one(pool, pool.address.post(dialect.path, body), exchange, done, timeout_s)
    return answer


class _Whole:
    """A `Reader` of a body that is no stream."""

    def __init__(self, done: asyncio.Future[None]) -> None:
        self.status, self.raw, self.error = 0, b"", ""
        self._done = done

    def head(self, status: int, headers: dict[str, str]) -> None:
        self.status = status

    def body(self, stamp_ns: int, data: bytes) -> None:
        self.raw += data

    def ended(self) -> None:
        if not self._done.done():
            self._done.set_result(None)

    def failed(self, kind: str, message: str) -> None:
        self.error = message
        self.ended()


async def _models(pool: Pool, timeout_s: float) -> list[dict[str, Any]]:
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    whole = _Whole(done)
    await _one(pool, pool.address.get("/v1/models"), whole, done, timeout_s)
    if whole.error:
        raise ConfigError(f"{pool.address.url} does not answer: {whole.error}")
    if whole.status in (401, 403):
        raise ConfigError(
            f"{pool.address.url} does not let us in: {refusal_of(whole.raw, whole.status)} (HTTP {whole.status})"
        )
    try:
        data = msgspec.json.decode(whole.raw)["data"]
        return [entry for entry in data if isinstance(entry, dict) and isinstance(entry.get("id"), str)]
    except (msgspec.DecodeError, KeyError, TypeError):
        return []


async def _one(pool: Pool, request: bytes, reader: Any, done: asyncio.Future[None], timeout_s: float) -> None:
    address: Address = pool.address
    connection = None
    try:
        async with asyncio.timeout(timeout_s):
            connection = await pool.open()
            connection.ask(request, reader)
            await done
    except TimeoutError:
        raise ConfigError(f"{address.url} did not answer within {timeout_s:g} s") from None
    except OSError as error:
        raise ConfigError(f"{address.url} does not answer: {error}") from None
    finally:
        if connection is not None and not done.done():
            connection.drop()
