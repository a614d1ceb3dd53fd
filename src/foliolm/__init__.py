"""FolioLM: an LLM serving engine that keeps its books."""

from foliolm.version import __version__

__all__ = ["__version__"]
