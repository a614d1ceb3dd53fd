"""``foliolm kv``: who holds a server's KV memory."""

from __future__ import annotations

import http.client
import json
import os
import ssl
from contextlib import closing
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer

from foliolm.core.errors import ConfigError, EngineDeadError

TIMEOUT_S = 60
SHOWN = 20


def kv(
    url: Annotated[str, typer.Argument(help="Of the server, like http://127.0.0.1:8000.")],
    api_key: Annotated[str | None, typer.Option(help="Where the server wants one; default: FOLIOLM_API_KEY.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One line of JSON on stdout.")] = False,
) -> None:
    """Show who holds a server's KV blocks, what is shared and cached, and what lies unused (blocks, tokens).

    Example: foliolm kv http://127.0.0.1:8000
    """
    report = _fetch(url, api_key or os.environ.get("FOLIOLM_API_KEY", "").partition(",")[0] or None)
    if as_json:
        print(json.dumps(report, allow_nan=False))
        return
    for engine in report["engines"]:
        _show(engine)


def _fetch(url: str, api_key: str | None) -> dict[str, Any]:
    parts = urlsplit(url if "://" in url else f"http://{url}")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"URL is {url!r}; it must be like http://127.0.0.1:8000")
    headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    path = parts.path.rstrip("/").removesuffix("/v1") + "/debug/kv"
    connection = (
        http.client.HTTPSConnection(parts.hostname, parts.port, timeout=TIMEOUT_S, context=ssl.create_default_context())
        if parts.scheme == "https"
        else http.client.HTTPConnection(parts.hostname, parts.port, timeout=TIMEOUT_S)
    )
    try:
        with closing(connection):
            connection.request("GET", path, headers=headers)
            response = connection.getresponse()
            raw = response.read()
    except (OSError, http.client.HTTPException) as error:
        raise EngineDeadError(f"{url} does not answer: {error or type(error).__name__}") from None
    if response.status != 200:
        raise EngineDeadError(f"{url} answered {path} with HTTP {response.status}")
    try:
        report = json.loads(raw)
        report["engines"]
    except (ValueError, KeyError, TypeError):
        raise EngineDeadError(f"{url} does not answer {path} as foliolm serve does") from None
    return dict(report)


def _show(engine: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console = Console(width=140)
    blocks = Table(title=f"engine {engine['engine']}: blocks of {engine['block_size']} tokens", title_justify="left")
    columns = ("total", "used", "free", "fenced", "idle_cached")
    for column in ("group", *columns):
        blocks.add_column(column, justify="left" if column == "group" else "right")
    for group in engine["groups"]:
        blocks.add_row(group["group"], *(f"{group[column]:,}" for column in columns))
    console.print(blocks)

    owners = Table(title=f"{engine['num_owners']} requests hold blocks", title_justify="left")
    shown = ("request_id", "state", "tokens", "blocks", "shared_blocks", "unused_tokens", "cached_tokens", "label")
    for column in shown:
        owners.add_column(column, justify="left" if column in ("state", "label") else "right")
    for owner in engine["owners"][:SHOWN]:
        owners.add_row(*(str(owner[column]) for column in shown))
    if engine["owners"]:
        console.print(owners)

    prefixes = Table(title="prefixes with most behind them", title_justify="left")
    counts = ("tokens", "blocks", "host_blocks", "branches", "holders")
    for column in counts:
        prefixes.add_column(column, justify="right")
    for prefix in engine["prefixes"]:
        prefixes.add_row(*(f"{prefix[column]:,}" for column in counts))
    if engine["prefixes"]:
        console.print(prefixes)

    shared, host, waste = engine["shared"], engine["host"], engine["waste"]
    sources = ", ".join(
        f"{name} {source['hit_tokens']:,} ({source['ratio']:.1%})" for name, source in engine["hits"]["sources"].items()
    )
    lines = (
        f"shared: {shared['blocks']:,} blocks, which saves {shared['saved_blocks']:,}; "
        f"copied when written: {engine['copied_blocks']:,}; reserved: {engine['reserved_blocks']:,}",
        f"found, of {engine['hits']['query_tokens']:,} prompt tokens: {sources}; "
        f"evicted: {engine['evicted_blocks']:,} blocks, {engine['offloaded_blocks']:,} of them kept by the host",
        f"host pool: {host['used']:,} of {host['blocks']:,} blocks by {len(host['requests'])} requests, "
        f"{host['cached']:,} by evicted prefixes ({host['moved_blocks']:,} moved there, "
        f"{host['loaded_blocks']:,} copied back)",
        f"unused in last blocks: {waste['tokens']:,} tokens; at most {waste['bound_tokens']:,} (p − 1 a request)",
    )
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
