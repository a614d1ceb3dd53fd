"""Errors as OpenAI's clients expect them: ``{"error": {"message", "type", "param", "code"}}`` and a status."""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse

from foliolm.core.errors import EngineDeadError, QueueFullError, RequestError


class ModelNotFoundError(RequestError):
    """The request names a model that is not served; an HTTP 404."""


class BodyTooLargeError(RequestError):
    """The body is longer than the server reads; an HTTP 413."""


class ServerDrainingError(EngineDeadError):
    """The server is shutting down; an HTTP 503 with Retry-After."""


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


def _classified(error: Exception) -> tuple[int, str, dict[str, str]]:
    if isinstance(error, ModelNotFoundError):
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
        return 503, "service_unavailable_error", {}
    return 500, "internal_server_error", {}
