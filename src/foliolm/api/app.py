"""The HTTP application: routes, error bodies, and the stamp of each request's arrival."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from foliolm.api.chat import chat_completions
from foliolm.api.completions import completions
from foliolm.api.errors import GenerationFailedError, error_response
from foliolm.api.service import Service
from foliolm.core.errors import EngineDeadError, FolioError
from foliolm.ledger.metrics import CONTENT_TYPE
from foliolm.version import __version__

logger = logging.getLogger("foliolm.api")


class ArrivalStamp:
    """ASGI middleware: every clock that a client can feel starts when its request is accepted.

    Args:
        app: the application.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request whose scope says when it came (``arrival_ns``, monotonic)."""
        if scope["type"] == "http":
            scope["arrival_ns"] = time.monotonic_ns()
        await self.app(scope, receive, send)


def build_app(service: Service) -> FastAPI:
    """The application around a service whose client has been started; its lifespan attaches the client's outputs."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.client.attach()
        yield

    app = FastAPI(title="FolioLM", version=__version__, lifespan=lifespan)
    app.add_middleware(ArrivalStamp)
    _add_errors(app)
    _add_routes(app, service)
    return app


def _add_routes(app: FastAPI, service: Service) -> None:
    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await chat_completions(service, request)

    @app.post("/v1/completions")
    async def complete(request: Request) -> Response:
        return await completions(service, request)

    @app.get("/v1/models")
    async def models() -> JSONResponse:
        served = service.model
        entries = [
            {
                "id": name,
                "object": "model",
                "created": served.created,
                "owned_by": "foliolm",
                "max_model_len": served.max_model_len,
            }
            for name in served.names
        ]
        return JSONResponse({"object": "list", "data": entries})

    @app.get("/health")
    async def health() -> Response:
        if service.draining:
            return JSONResponse({"status": "draining"}, 503)
        dead = service.client.dead
        if dead:
            return JSONResponse({"status": "dead", "engines": {str(i): str(e) for i, e in dead.items()}}, 503)
        return JSONResponse({"status": "ok"})

    @app.get("/version")
    async def version() -> JSONResponse:
        return JSONResponse({"version": __version__})

    @app.get("/metrics")
    async def metrics() -> Response:
        # A Response with a media type would have a second charset appended.
        return Response(service.metrics.exposition(), headers={"content-type": CONTENT_TYPE})


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(FolioError)
    async def known(request: Request, error: FolioError) -> Response:
        if isinstance(error, EngineDeadError):
            logger.warning("%s %s: %s", request.method, request.url.path, error)
        return error_response(error)

    @app.exception_handler(GenerationFailedError)
    async def failed(request: Request, error: GenerationFailedError) -> Response:
        return error_response(error)

    @app.exception_handler(ClientDisconnect)
    async def gone(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=499)  # nobody reads it

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path[:200]}: {error.detail}"
        body = {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": None}}
        return JSONResponse(body, error.status_code, error.headers)

    @app.exception_handler(Exception)
    async def unknown(request: Request, error: Exception) -> Response:
        return error_response(error)
