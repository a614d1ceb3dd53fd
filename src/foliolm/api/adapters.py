"""The LoRA adapters that a server offers, by name: loading, replacing and unloading them while it serves."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from fastapi import FastAPI, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import JSONResponse

from foliolm.api.errors import ModelNotFoundError
from foliolm.api.protocol import parse_body
from foliolm.core.errors import FolioError, RequestError

if TYPE_CHECKING:
    from foliolm.api.service import Service
    from foliolm.engine.client import ProcessClient

logger = logging.getLogger("foliolm.api")
MAX_NAME = 256


@dataclass(frozen=True, slots=True)
class Adapter:
    """One that is offered.

    Attributes:
        load_id: of this load; another load under the same name has another.
        name: as ``model`` names it.
        path: its folder on the server.
        from_start: it is one of ``--lora-modules``.
        created: Unix seconds.
    """

    load_id: int
    name: str
    path: str
    from_start: bool = False
    created: int = field(default_factory=lambda: int(time.time()))


class Adapters:
    """Adapters by name. All on one event loop.

    Orders about one name follow each other. A request keeps the load that its name stood for when it came, whatever
    happens to the name; an engine gives an adapter's memory back when its last request has ended.

    Args:
        client: of the engines.
        from_start: (name, folder) of ``--lora-modules``, which engines load by themselves.
        enabled: ``--enable-lora``.
        taken: names of the model.
    """

    def __init__(
        self, client: ProcessClient, from_start: Iterable[tuple[str, str]], enabled: bool, taken: Iterable[str]
    ) -> None:
        self.enabled = enabled
        self._client = client
        self._taken = frozenset(taken)
        self._by_name: dict[str, Adapter] = {}
        self._hidden: set[int] = set()
        self._numbers = itertools.count(1)
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # gone with the last who waits
        self._tasks: set[asyncio.Task[None]] = set()
        for name, path in from_start:
            self._by_name[name] = Adapter(next(self._numbers), name, path, from_start=True)

    def __iter__(self) -> Any:
        return iter(list(self._by_name.values()))

    def get(self, name: str | None) -> Adapter | None:
        """The adapter of a name."""
        return None if name is None else self._by_name.get(name)

    async def load(self, name: str, path: str, in_place: bool = False) -> tuple[Adapter, bool]:
        """Offer an adapter; the same name and folder again changes nothing.

        Args:
            name: under which requests choose it.
            path: its folder.
            in_place: replace what the name stands for, also from the same folder: its files may have changed.

        Returns:
            The adapter, and whether it was loaded now.

        Raises:
            RequestError: the folder is wrong, the name is taken, or adapters are not served; nothing has changed.
        """
        self._check_enabled()
        if name in self._taken:
            raise RequestError(f"lora_name is {name!r:.300}, which is the model's own name", "lora_name")
        async with self._lock(name):
            before = self._by_name.get(name)
            if before is not None and not in_place:
                if before.path == path:
                    return before, False
                raise RequestError(
                    f"lora_name is {name!r:.300}, which is loaded from {before.path!r:.300}; unload it first, or set "
                    "load_inplace",
                    "lora_name",
                    "adapter_exists",
                )
            adapter = Adapter(next(self._numbers), name, path)
            try:
                await self._client.ask("load_adapter", load_id=adapter.load_id, name=name, path=path)
            except FolioError:
                await self._drop(adapter)  # of several engines some may have taken it
                raise
            self._by_name[name] = adapter
            if before is not None:
                await self._drop(before)
            return adapter, True

    async def unload(self, name: str) -> int:
        """Offer an adapter no more; requests that use it go on. Returns how many do.

        Raises:
            ModelNotFoundError: there is none of that name.
            RequestError: adapters are not served.
        """
        self._check_enabled()
        async with self._lock(name):
            adapter = self._by_name.pop(name, None)
            if adapter is None:
                raise ModelNotFoundError(
                    f"lora_name is {name[:200]!r}; no adapter of that name is loaded", "lora_name", "model_not_found"
                )
            return await self._drop(adapter)

    def restarted(self, engine: int) -> None:
        """An engine began anew, with the adapters of ``--lora-modules`` alone: bring it to where the others are."""
        task = asyncio.ensure_future(self._restore(engine))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _restore(self, engine: int) -> None:
        for load_id in self._hidden:
            await self._client.ask_one(engine, "unload_adapter", load_id=load_id)
        for adapter in self:
            if not adapter.from_start:
                order = {"load_id": adapter.load_id, "name": adapter.name, "path": adapter.path}
                try:
                    await self._client.ask_one(engine, "load_adapter", **order)
                except FolioError as error:
                    logger.error("adapter %s cannot be loaded again: %s", adapter.name, error)

    async def _drop(self, adapter: Adapter) -> int:
        if adapter.from_start:
            self._hidden.add(adapter.load_id)  # an engine that starts again loads it again
        answers = await self._client.ask("unload_adapter", load_id=adapter.load_id)
        return sum(answer["in_use"] for _, answer in answers)

    def _lock(self, name: str) -> asyncio.Lock:
        lock = self._locks.get(name)
        if lock is None:
            lock = self._locks[name] = asyncio.Lock()
        return lock

    def _check_enabled(self) -> None:
        if not self.enabled:
            raise RequestError("this server serves no adapters; start it with --enable-lora", "lora_name")


class LoadBody(BaseModel):
    """``POST /v1/load_lora_adapter``."""

    model_config = ConfigDict(extra="forbid", strict=True)
    lora_name: str = Field(min_length=1, max_length=MAX_NAME)
    lora_path: str = Field(min_length=1, max_length=4096)
    load_inplace: bool = False


class UnloadBody(BaseModel):
    """``POST /v1/unload_lora_adapter``."""

    model_config = ConfigDict(extra="forbid", strict=True)
    lora_name: str = Field(min_length=1, max_length=MAX_NAME)
    lora_int_id: int | None = None


def add_adapter_routes(app: FastAPI, service: Service) -> None:
    """``/v1/load_lora_adapter`` and ``/v1/unload_lora_adapter``."""

    @app.post("/v1/load_lora_adapter")
    async def load(request: Request) -> JSONResponse:
        body = parse_body(LoadBody, await service.read_raw(request))
        adapter, is_new = await service.adapters.load(body.lora_name, body.lora_path, body.load_inplace)
        return JSONResponse({"lora_name": adapter.name, "load_id": adapter.load_id, "loaded": is_new})

    @app.post("/v1/unload_lora_adapter")
    async def unload(request: Request) -> JSONResponse:
        body = parse_body(UnloadBody, await service.read_raw(request))
        in_use = await service.adapters.unload(body.lora_name)
        return JSONResponse({"lora_name": body.lora_name, "unloaded": True, "requests_in_use": in_use})
