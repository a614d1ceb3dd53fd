"""Text to token ids and back, with control tokens only where they are asked for."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from foliolm.core.errors import ModelError, RequestError
from foliolm.text.byte_alphabet import bytes_of
from foliolm.text.plain_spec import plain_spec

if TYPE_CHECKING:
    import tokenizers

_SPACE = "▁"
# Canonical composition makes at most this many characters one, so a token may stand for that many times its length.
_MOST_COMPOSED = 4


class Tokenizer:
    """A model's tokenizer. Safe to use from several threads.

    There are two encoders inside: one that finds every added token in a text, for text that a chat template made, and
    one to which control tokens are ordinary characters, for text that a user wrote.

    Args:
        spec: the content of a ``tokenizer.json``.
        num_tokens: ids from here on do not exist.
        bos_token_id, eos_token_id: the tokens that begin and end a text, or None.
        template_text: source of the chat template: added tokens that it spells out are control tokens too, whether or
            not the tokenizer marks them as special.
        source: where it came from, for the errors' text.

    Raises:
        ModelError: the tokenizer is of a kind that is not supported.
    """

    def __init__(
        self,
        spec: Mapping[str, Any],
        num_tokens: int,
        bos_token_id: int | None = None,
        eos_token_id: int | None = None,
        template_text: str = "",
        source: str = "tokenizer.json",
    ) -> None:
        self.num_tokens = num_tokens
        self.bos_token_id = bos_token_id
        self.eos_token_id = eos_token_id
        self.source = source
        self._full = _build(spec, source)
        added = self._full.get_added_tokens_decoder()
        self.added: dict[int, str] = {token_id: token.content for token_id, token in added.items()}
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.control: dict[str, int] = {
            token.content: token_id
            for token_id, token in added.items()
            if token.content and (token.special or token.content in template_text)
        }
        self.strips_before = frozenset(token_id for token_id, token in added.items() if token.lstrip)
        self.strips_after = frozenset(token_id for token_id, token in added.items() if token.rstrip)
        self._plain = _build(plain_spec(spec, self.control, self.added, source), source)
        self._byte_level, self._strips_space = _decoder_kind(spec, source)
        self._only_first_prefixed = _only_first_prefixed(spec.get("pre_tokenizer"))
        self._bytes: list[bytes | None] = [None] * num_tokens
        longest = max(map(len, self._full.get_vocab()), default=1)
        self.max_token_characters = longest * (1 if _keeps_length(spec.get("normalizer")) else _MOST_COMPOSED)

    def encode(self, text: str, add_special_tokens: bool = True, parse_special: bool = False) -> list[int]:
        """Token ids of a text.

        Args:
            text: what to encode.
            add_special_tokens: add the begin and end tokens that the model expects around a text.
            parse_special: control tokens spelt out in the text become what they name. Leave it off for text that a
                user wrote. A begin token that the text already begins with is then not added again.
        """
        encoder = self._full if parse_special else self._plain
        ids: list[int] = encoder.encode(text, add_special_tokens=add_special_tokens).ids
        if parse_special and add_special_tokens and ids[:2] == [self.bos_token_id] * 2:
            return ids[1:]
        return ids

    def encode_run(self, text: str, at_start: bool) -> list[int]:
        """Token ids of a stretch of text between control tokens, in which nothing is a control token.

        Args:
            text: the stretch.
            at_start: whether it begins the whole text: some tokenizers put a space there, and only there.
        """
        if not text:
            return []
        if at_start or not self._only_first_prefixed:
            return list(self._plain.encode(text, add_special_tokens=False).ids)
        lead: list[int] = self._plain.encode("\n", add_special_tokens=False).ids
        ids: list[int] = self._plain.encode("\n" + text, add_special_tokens=False).ids
        if ids[: len(lead)] == lead:
            return ids[len(lead) :]
        return list(self._plain.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of tokens that stand at a text's beginning; bytes that are no UTF-8 become U+FFFD.

        Raises:
            RequestError: an id does not exist.
        """
        kept = (token for token in token_ids if not (skip_special_tokens and token in self.special_ids))
        text = b"".join(map(self.token_bytes, kept)).decode("utf-8", "replace")
        return text.removeprefix(" ") if self._strips_space else text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to a text. A part of a character is what it is, not U+FFFD.

        Raises:
            RequestError: the id does not exist.
        """
        if not 0 <= token_id < self.num_tokens:
            raise RequestError(f"token id {token_id} does not exist; ids run from 0 to {self.num_tokens - 1}", "tokens")
        known = self._bytes[token_id]
        if known is None:
            known = self._bytes[token_id] = self._spell(token_id)
        return known

    def token_text(self, token_id: int) -> str:
        """As ``token_bytes``, as text, with U+FFFD for parts of characters."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_id(self, text: str) -> int | None:
        """The id of a token by its spelling, or None."""
        token_id: int | None = self._full.token_to_id(text)
        return token_id

    def _spell(self, token_id: int) -> bytes:
        if token_id in self.added:
            return self.added[token_id].encode()
        token: str | None = self._full.id_to_token(token_id)
        if token is None:  # a hole in the vocabulary
            return b""
        if self._byte_level:
            spelt = bytes_of(token)
            return token.encode() if spelt is None else spelt
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                pass
        return token.replace(_SPACE, " ").encode()


def _build(spec: Mapping[str, Any], source: str) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer as Backend

    try:
        return Backend.from_str(json.dumps(spec))
    except Exception as error:  # the library raises plain Exception
        raise ModelError(f"{source}: the tokenizer cannot be built: {error}") from None


def _decoder_kind(spec: Mapping[str, Any], source: str) -> tuple[bool, bool]:
    """Whether tokens are spelt in bytes (else with ▁ for spaces), and whether a text loses a first space."""
    decoder = spec.get("decoder") or {}
    steps: Sequence[Mapping[str, Any]] = decoder.get("decoders") or [decoder]
    kinds = {step.get("type"): step for step in steps}
    if "ByteLevel" in kinds:
        return True, False
    if "Metaspace" in kinds:
        step = kinds["Metaspace"]
        scheme = step.get("prepend_scheme", "always" if step.get("add_prefix_space", True) else "never")
        return False, scheme != "never"
    if "ByteFallback" in kinds or "Replace" in kinds:
        return False, any(step.get("type") == "Strip" and step.get("start", 0) > 0 for step in steps)
    raise ModelError(
        f"{source}: a decoder of type {decoder.get('type')!r} is not supported; ByteLevel and ▁-based ones are"
    )


def _only_first_prefixed(pre_tokenizer: Mapping[str, Any] | None) -> bool:
    steps = (pre_tokenizer or {}).get("pretokenizers") or [pre_tokenizer or {}]
    return any(step.get("type") == "Metaspace" and step.get("prepend_scheme") == "first" for step in steps)


def _keeps_length(normalizer: Mapping[str, Any] | None) -> bool:
    steps = (normalizer or {}).get("normalizers") or [normalizer or {}]
    return all(step.get("type") in (None, "Prepend", "Replace") for step in steps)
