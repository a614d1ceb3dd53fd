"""A failure to fetch, as opposed to a file that is wrong."""

from __future__ import annotations

from foliolm.core.errors import ModelError


class DownloadError(ModelError):
    """A model could not be fetched: no network, no such repository, or what came is not what was announced."""
