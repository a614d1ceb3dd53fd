"""Routes about life and death: how the server is, how much it has to do, and ending requests."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import JSONResponse

from foliolm.api.protocol import parse_body
from foliolm.api.service import Service
from foliolm.engine.supervisor import EngineHealth, EngineState

_TAKING_REQUESTS = (EngineState.IDLE, EngineState.BUSY)
_WORST_FIRST = (EngineState.STUCK, EngineState.RESTARTING, EngineState.DEAD)


class AbortBody(BaseModel):
    """``POST /abort_requests``: ids of answers, or the ids that clients gave their requests."""

    model_config = ConfigDict(extra="forbid", strict=True)
    request_ids: list[str] = Field(min_length=1, max_length=1024)


def add_life_routes(app: FastAPI, service: Service) -> None:
    """``/health``, ``/load``, ``/debug/kv``, ``/abort_requests`` and ``/reset_prefix_cache``."""

    @app.get("/health")
    async def health() -> JSONResponse:
        engines = service.client.health()
        status = _status(engines, service.draining)
        body = {"status": status, "engines": [_engine(index, health) for index, health in enumerate(engines)]}
        return JSONResponse(body, 200 if status == "ok" else 503)

    @app.get("/load")
    async def load() -> JSONResponse:
        stats = [health.stats for health in service.client.health()]
        return JSONResponse(
            {
                "server_load": len(service.open),
                "num_requests_running": sum(each.num_running for each in stats),
                "num_requests_waiting": sum(each.num_waiting for each in stats),
                "kv_blocks_used": sum(each.kv_blocks_used for each in stats),
                "kv_blocks_total": sum(each.kv_blocks_total for each in stats),
            }
        )

    @app.post("/abort_requests")
    async def abort_requests(request: Request) -> JSONResponse:
        body = parse_body(AbortBody, await service.read_raw(request))
        return JSONResponse({"aborted": service.abort(body.request_ids)})

    @app.get("/debug/kv")
    async def debug_kv() -> JSONResponse:
        answers = await service.client.ask("kv")
        return JSONResponse({"engines": [{"engine": index, **answer} for index, answer in answers]})

    @app.post("/reset_prefix_cache")
    async def reset_prefix_cache() -> JSONResponse:
        # Running requests keep their blocks; only nobody finds a prefix in them any more.
        answers = await service.client.ask("reset_prefix_cache")
        return JSONResponse({"reset": True, "blocks": sum(answer["blocks"] for _, answer in answers)})


def _status(engines: list[EngineHealth], draining: bool) -> str:
    """``ok`` while one engine at least takes requests; else what is wrong, in a word."""
    if draining:
        return "draining"
    states = {health.state for health in engines}
    if any(state in states for state in _TAKING_REQUESTS):
        return "ok"
    return str(next(state for state in _WORST_FIRST if state in states))


def _engine(index: int, health: EngineHealth) -> dict[str, Any]:
    return {
        "engine": index,
        "state": health.state,
        "num_requests_running": health.stats.num_running,
        "num_requests_waiting": health.stats.num_waiting,
        "silent_s": round(health.silent_s, 3),
        "restarts": health.num_restarts,
        "error": None if health.error is None else str(health.error),
    }
