"""Fields that clients of other servers may send and this one does not serve: each is refused with the reason.

A value that asks for nothing (null, or what happens here anyway) is as good as an absent field.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from foliolm.core.errors import RequestError

_GUIDED = "give structured_outputs (or response_format) instead"
_LABELS = "only text is served"

REFUSED: dict[str, tuple[str, tuple[Any, ...]]] = {
    "audio": (_LABELS, ()),
    "chat_template": ("a template can only be given when the server starts (--chat-template)", ()),
    "detokenize": ("answers are always text; return_token_ids adds the ids", (True,)),
    "documents": ("templates get their variables from chat_template_kwargs", ()),
    "echo": ("only /v1/completions repeats its prompt", (False,)),
    "function_call": ("it is deprecated; give tool_choice instead", ()),
    "functions": ("they are deprecated; give tools instead", ()),
    "guided_choice": (_GUIDED, ()),
    "guided_decoding_backend": (_GUIDED, ()),
    "guided_grammar": (_GUIDED, ()),
    "guided_json": (_GUIDED, ()),
    "guided_regex": (_GUIDED, ()),
    "logits_processors": ("no code of a client's runs in the server", ([],)),
    "mm_processor_kwargs": (_LABELS, ()),
    "modalities": (_LABELS, (["text"],)),
    "prediction": ("predicted outputs are not served", ()),
    "prompt_cache_retention": ("prefixes are kept in memory for as long as there is room", ("in_memory", "in-memory")),
    "service_tier": ("there is one tier", ("auto", "default")),
    "spaces_between_special_tokens": ("tokens are joined as they are spelt", (True,)),
    "store": ("answers are not stored", (False,)),
    "suffix": ("the model continues text from left to right and cannot fill in the middle", ("",)),
    "truncate_prompt_tokens": ("a prompt is never cut; one that is too long is refused", (0,)),
    "verbosity": ("the model has no such setting", ("medium",)),
    "web_search_options": ("the server does not search the web", ()),
}


def check_extra_fields(extra: Mapping[str, Any] | None) -> None:
    """Refuse fields that the body's model does not have.

    Args:
        extra: those fields, with what they hold.

    Raises:
        RequestError: names the field, and the reason where it is a known one.
    """
    for name, value in (extra or {}).items():
        if name not in REFUSED:
            raise RequestError(f"unknown or unsupported field {name[:200]!r}", name[:200], "unknown_field")
        reason, neutral = REFUSED[name]
        if value is not None and not any(_same(value, allowed) for allowed in neutral):
            raise RequestError(f"{name} is not served: {reason}", name, "unsupported_field")


def _same(value: Any, allowed: Any) -> bool:
    # False is 0 to Python, and not to a client.
    return bool(value == allowed) and isinstance(value, bool) == isinstance(allowed, bool)
