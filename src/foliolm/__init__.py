"""FolioLM: an LLM serving engine that keeps its books."""

from typing import TYPE_CHECKING, Any

from foliolm.version import __version__

if TYPE_CHECKING:
    from foliolm.api.async_llm import AsyncLLM
    from foliolm.api.beams import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
    from foliolm.api.llm import LLM
    from foliolm.api.lora_request import LoRARequest
    from foliolm.api.results import CompletionOutput, RequestOutput
    from foliolm.core.sampling import SamplingParams

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CompletionOutput",
    "LoRARequest",
    "RequestOutput",
    "SamplingParams",
    "__version__",
]

# Imported when first asked for: most commands need neither torch nor a tokenizer.
_HOMES = {
    "AsyncLLM": "foliolm.api.async_llm",
    "BeamSearchOutput": "foliolm.api.beams",
    "BeamSearchParams": "foliolm.api.beams",
    "BeamSearchSequence": "foliolm.api.beams",
    "LLM": "foliolm.api.llm",
    "CompletionOutput": "foliolm.api.results",
    "LoRARequest": "foliolm.api.lora_request",
    "RequestOutput": "foliolm.api.results",
    "SamplingParams": "foliolm.core.sampling",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'foliolm' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
