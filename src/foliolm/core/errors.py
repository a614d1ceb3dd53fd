"""Errors that carry what a person needs: which field, which value, which limit."""

from __future__ import annotations


class FolioError(Exception):
    """Base of every error that FolioLM raises on purpose; its text is fit to be shown to a user."""


class ConfigError(FolioError):
    """A flag, a file or a combination of them is wrong. The command line exits with code 2."""


class ModelError(FolioError):
    """A model's files are missing, truncated, of an unsupported kind, or contradict each other."""


class RequestError(FolioError):
    """A request is wrong by itself; an HTTP 400.

    Args:
        message: a sentence that names the field, the value and the limit.
        field: the request's field at fault, as the client wrote it (``param`` in OpenAI's error body).
        code: a short machine-readable code, or None.
    """

    def __init__(self, message: str, field: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.field = field
        self.code = code


NO_ROOM_IN_POOL = "kv_pool_exceeded"
"""Code of a ``RequestError``: with fewer tokens the request would fit into the KV pool."""


class QueueFullError(FolioError):
    """The waiting queue is at its limit; an HTTP 429.

    Args:
        message: a sentence with the queue's length and limit.
        retry_after_s: seconds after which trying again is sensible.
    """

    def __init__(self, message: str, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class TtftTargetError(QueueFullError):
    """The first token would come later than the request, or the server, allows; an HTTP 429.

    Args:
        message: a sentence with the predicted time, the target, and what stands before the request.
        retry_after_s: seconds after which trying again is sensible.
    """


class EngineDeadError(FolioError):
    """The engine's process is gone, or its loop has ended; an HTTP 503."""
