"""The HTTP application: routes, error bodies, and the stamp of each request's arrival."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp

from foliolm.api.adapters import Adapter, add_adapter_routes
from foliolm.api.chat import chat_completions
from foliolm.api.completions import completions
from foliolm.api.errors import GenerationFailedError, error_response, refusal_reason
from foliolm.api.life import add_life_routes
from foliolm.api.middleware import Access, ApiKeys
from foliolm.api.options import ServerOptions
from foliolm.api.request_log import RequestLog
from foliolm.api.service import Service
from foliolm.api.tokenization import detokenize, tokenize
from foliolm.core.errors import EngineDeadError, FolioError
from foliolm.ledger.metrics import CONTENT_TYPE
from foliolm.version import __version__

logger = logging.getLogger("foliolm.api")


def build_app(service: Service, options: ServerOptions | None = None, log: RequestLog | None = None) -> ASGIApp:
    """The application around a service whose client has been started; its lifespan attaches the client's outputs.

    Args:
        service: what answers.
        options: keys and CORS.
        log: takes a line a request.
    """
    options = options or ServerOptions()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.client.attach()
        yield

    app = FastAPI(title="FolioLM", version=__version__, lifespan=lifespan)
    # The last one added is the outermost: a preflight has no key, and a refusal must be readable by a browser.
    if options.keys():
        app.add_middleware(ApiKeys, keys=options.keys())
    if options.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=options.allowed_origins,
            allow_methods=options.allowed_methods or ("GET", "POST"),
            allow_headers=options.allowed_headers or ("*",),
            allow_credentials=options.allow_credentials,
            expose_headers=["x-request-id", "retry-after"],
        )
    _add_errors(app, service)
    _add_routes(app, service)
    add_life_routes(app, service)
    add_adapter_routes(app, service)
    return Access(app, log)


def _add_routes(app: FastAPI, service: Service) -> None:
    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await chat_completions(service, request)

    @app.post("/v1/completions")
    async def complete(request: Request) -> Response:
        return await completions(service, request)

    @app.get("/v1/models")
    async def models() -> JSONResponse:
        entries = [_entry(service, name) for name in service.model.names]
        return JSONResponse({"object": "list", "data": [*entries, *map(_adapter_entry(service), service.adapters)]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> JSONResponse:
        service.check_model(name)
        adapter = service.adapters.get(name)
        return JSONResponse(_entry(service, name) if adapter is None else _adapter_entry(service)(adapter))

    @app.post("/tokenize")
    async def to_tokens(request: Request) -> Response:
        return JSONResponse(await tokenize(service, request))

    @app.post("/detokenize")
    async def to_text(request: Request) -> Response:
        return JSONResponse(await detokenize(service, request))

    @app.get("/version")
    async def version() -> JSONResponse:
        return JSONResponse({"version": __version__})

    @app.get("/metrics")
    async def metrics() -> Response:
        # A Response with a media type would have a second charset appended.
        return Response(service.metrics.exposition(), headers={"content-type": CONTENT_TYPE})


def _entry(service: Service, name: str) -> dict[str, Any]:
    served = service.model
    return {
        "id": name,
        "object": "model",
        "created": served.created,
        "owned_by": "foliolm",
        "root": served.name,
        "max_model_len": served.max_model_len,
    }


def _adapter_entry(service: Service) -> Callable[[Adapter], dict[str, Any]]:
    def entry(adapter: Adapter) -> dict[str, Any]:
        ours = {"created": adapter.created, "root": adapter.path, "parent": service.model.name}
        return {**_entry(service, adapter.name), **ours}

    return entry


def _add_errors(app: FastAPI, service: Service) -> None:
    @app.exception_handler(FolioError)
    async def known(request: Request, error: FolioError) -> Response:
        if isinstance(error, EngineDeadError):
            logger.warning("%s %s: %s", request.method, request.url.path, error)
        service.metrics.observe_refusal(refusal_reason(error))
        return _logged(request, error)

    @app.exception_handler(GenerationFailedError)
    async def failed(request: Request, error: GenerationFailedError) -> Response:
        return _logged(request, error)

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
        return _logged(request, error)


def _logged(request: Request, error: Exception) -> Response:
    request.scope["log"]["error"] = str(error)
    return error_response(error)
