"""Errors as OpenAI's clients expect them: ``{"error": {"message", "type", "param", "code"}}`` and a status."""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse

from foliolm.core.errors import EngineDeadError, FolioError, QueueFullError, RequestError, TtftTargetError


class ModelNotFoundError(RequestError):
    """The request names a model that is not served; an HTTP 404."""


class BodyTooLargeError(RequestError):
    """The body is longer than the server reads; an HTTP 413."""


class ServerDrainingError(EngineDeadError):
    """The server is shutting down; an HTTP 503 with Retry-After."""


class RequestTimeoutError(FolioError):
    """A request was not answered within its time; an HTTP 504."""


class UnauthorizedError(FolioError):
    """The request bears no key, or one that is not known; an HTTP 401."""


class GenerationFailedError(Exception):
    """The engine ended a request with an error; an HTTP 500."""


def error_body(error: Exception) -> dict[str, Any]:
    """The error as OpenAI's error body."""
    _, kind, _ = _classified(error)
    param = error.field if isinstance(error, RequestError) else None
    code = error.code if isinstance(error, RequestError) else None
    return {"error": {"message": str(error), "type": kind, "param": param, "code": code}}


def error_response(error: Exception) -> JSONResponse:
    """The error as an HTTP response."""
    status, _, headers = _classified(error)
    return JSONResponse(error_body(error), status, headers)


def refusal_reason(error: FolioError) -> str:
    """Why a request was turned away, as a metric's label."""
    if isinstance(error, RequestError):
        return "invalid"
    if isinstance(error, TtftTargetError):
        return "ttft_target"
    if isinstance(error, QueueFullError):
        return "queue_full"
    if isinstance(error, RequestTimeoutError):
        return "timeout"
    if isinstance(error, ServerDrainingError):
        return "draining"
    return "engine_dead"


def _classified(error: Exception) -> tuple[int, str, dict[str, str]]:
    if isinstance(error, RequestError) and error.code == "model_not_found":
        return 404, "not_found_error", {}
    if isinstance(error, BodyTooLargeError):
        return 413, "invalid_request_error", {"connection": "close"}
    if isinstance(error, RequestError):
        return 400, "invalid_request_error", {}
    if isinstance(error, QueueFullError):
        return 429, "rate_limit_error", {"retry-after": str(error.retry_after_s)}
    if isinstance(error, ServerDrainingError):
        return 503, "service_unavailable_error", {"retry-after": "5", "connection": "close"}
    if isinstance(error, EngineDeadError):
        return 503, "service_unavailable_error", {"retry-after": "5"}
    if isinstance(error, RequestTimeoutError):
        # Clients that try again by themselves would double the load that made it late.
        return 504, "timeout_error", {"x-should-retry": "false"}
    if isinstance(error, UnauthorizedError):
        return 401, "authentication_error", {"www-authenticate": "Bearer"}
    return 500, "internal_server_error", {}
