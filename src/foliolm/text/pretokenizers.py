"""How byte-level BPE vocabularies split text before merging, by the name that GGUF files give the rule.

The expressions are those of the models' own ``tokenizer.json`` files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from foliolm.core.errors import ModelError

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class SplitRule:
    """A rule.

    Attributes:
        pattern: what one piece of text looks like; None: GPT-2's rule.
        single_digits: digits are split off one by one first.
        whole_words: a piece that is a token as it stands is not built from merges.
        adds_bos: such models expect a begin token where the file does not say.
        nfc: text is normalised to NFC first.
    """

    pattern: str | None = None
    single_digits: bool = False
    whole_words: bool = False
    adds_bos: bool = False
    nfc: bool = False


_GPT2_RULE = SplitRule()
_DIGITS_RULE = SplitRule(single_digits=True)
_LLAMA3_RULE = SplitRule(_LLAMA3, whole_words=True, adds_bos=True)
_QWEN2_RULE = SplitRule(_QWEN2, nfc=True)

RULES: dict[str, SplitRule] = {
    "gpt-2": _GPT2_RULE,
    "mpt": _GPT2_RULE,
    "olmo": _GPT2_RULE,
    "smollm": _DIGITS_RULE,
    "starcoder": _DIGITS_RULE,
    "refact": _DIGITS_RULE,
    "command-r": _DIGITS_RULE,
    "codeshell": _DIGITS_RULE,
    "exaone": _DIGITS_RULE,
    "llama3": _LLAMA3_RULE,
    "llama-v3": _LLAMA3_RULE,
    "llama-bpe": _LLAMA3_RULE,
    "falcon3": _LLAMA3_RULE,
    "pixtral": _LLAMA3_RULE,
    "smaug-bpe": SplitRule(_LLAMA3),
    "dbrx": SplitRule(_LLAMA3),
    "qwen2": _QWEN2_RULE,
    "deepseek-r1-qwen": SplitRule(_QWEN2),
    "megrez": _QWEN2_RULE,
    "tekken": SplitRule(_TEKKEN, whole_words=True, adds_bos=True),
}


def split_rule(name: str | None, source: str) -> SplitRule:
    """The rule of a name.

    Raises:
        ModelError: the name is unknown: a wrong split would silently give other tokens than the model was trained on.
    """
    if name not in RULES:
        raise ModelError(
            f"{source}: tokenizer.ggml.pre is {name!r}, a way of splitting text that is not known here; "
            f"the known ones are {', '.join(sorted(RULES))}"
        )
    return RULES[name]


def pre_tokenizer(rule: SplitRule) -> dict[str, Any]:
    """The rule as a ``tokenizer.json`` writes it."""
    steps: list[dict[str, Any]] = []
    if rule.single_digits:
        steps.append({"type": "Digits", "individual_digits": True})
    if rule.pattern is not None:
        split = {"type": "Split", "pattern": {"Regex": rule.pattern}, "behavior": "Isolated", "invert": False}
        steps.append(split)
    by_gpt2 = rule.pattern is None
    steps.append({"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": by_gpt2})
    return {"type": "Sequence", "pretokenizers": steps}
