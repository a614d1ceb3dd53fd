"""What the HTTP process and the library know of the model: its text side, its defaults and its limits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from foliolm.core.errors import RequestError
from foliolm.core.sampling import MAX_STOP_CHARACTERS, SamplingParams
from foliolm.text.load import load_text
from foliolm.text.tool_formats import ToolFormat, described_in_text, tool_format

if TYPE_CHECKING:
    from foliolm.core.config import EngineConfig
    from foliolm.text.chat_template import ChatTemplate
    from foliolm.text.tokenizer import Tokenizer
    from foliolm.weights.checkpoint import ModelFiles

MAX_BAD_WORDS = 512
# Shorter texts are tokenised in less time than a hand-over to a thread and back takes.
_INLINE_CHARACTERS = 4096


@dataclass(frozen=True)
class ServedModel:
    """One model as clients see it.

    Attributes:
        names: under which it is offered; the first is the one that answers carry.
        tokenizer: of the model.
        chat_template: None where the model has none.
        tool_format: how the model writes calls of tools.
        sampling_defaults: the model's generation_config, as ``SamplingParams`` names.
        eos_token_ids: tokens that end an answer.
        max_model_len: most tokens of prompt and output together.
        vocab_size: token ids that may be used are below this.
        created: Unix seconds, for ``/v1/models``.
    """

    names: tuple[str, ...]
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    sampling_defaults: Mapping[str, Any]
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    vocab_size: int
    created: int = field(default_factory=lambda: int(time.time()))
    tool_format: ToolFormat = field(default_factory=lambda: ToolFormat("hermes"))

    @classmethod
    def of(cls, config: EngineConfig, files: ModelFiles) -> ServedModel:
        """The text side of a model, from its files.

        Raises:
            ConfigError: ``--chat-template`` names no file and is no template.
            ModelError: the files hold no tokenizer that can be used.
        """
        tokenizer, chat_template = load_text(files, config.chat_template)
        return cls(
            names=config.served_model_name or (config.model,),
            tokenizer=tokenizer,
            chat_template=chat_template,
            sampling_defaults=dict(files.generation_defaults) if config.generation_config == "auto" else {},
            eos_token_ids=files.eos_token_ids,
            max_model_len=config.max_model_len or files.shape.max_position_embeddings,
            vocab_size=tokenizer.num_tokens,
            tool_format=tool_format(
                config.tool_call_parser,
                "\n".join(chat_template.sources.values()) if chat_template else "",
                [tokenizer.token_text(token) for token in tokenizer.special_ids],
            ),
        )

    @property
    def name(self) -> str:
        """The name that answers carry."""
        return self.names[0]

    def encode(self, text: str, field: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a plain prompt. It is the client's own from end to end, so control tokens in it are meant.

        Raises:
            RequestError: it cannot fit in the context however it is tokenised.
        """
        self.check_characters(len(text), field)
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens, parse_special=True)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> list[int]:
        """Token ids of a conversation, through the model's chat template.

        Where the template knows nothing of tools, they are described in text. Where it knows no developers, what they
        say is the system's.

        Args:
            messages: in OpenAI's form, with calls' arguments as objects.
            tools: in OpenAI's form.
            variables: the client's own for the template.
            options: as ``ChatTemplate.encode``.

        Raises:
            RequestError: the model has no template, the template refuses the messages, or they cannot fit.
        """
        if self.chat_template is None:
            raise RequestError(
                "the model has no chat template; give one with --chat-template FILE, or use /v1/completions",
                "messages",
                "no_chat_template",
            )
        template = self.chat_template
        self.check_characters(_characters(messages, tools), "messages")
        for name in variables or {}:
            if name not in template.variables:
                raise RequestError(
                    f"chat_template_kwargs holds {name[:80]!r}, which the model's chat template does not read",
                    f"chat_template_kwargs.{name[:80]}",
                )
        if not any("developer" in source for source in template.sources.values()):
            messages = [{**m, "role": "system"} if m["role"] == "developer" else m for m in messages]
        if not template.takes_tools and (tools or any("tool_calls" in m or m["role"] == "tool" for m in messages)):
            messages, tools = described_in_text(messages, tools), ()
        return template.encode(messages, tools=tools or None, variables=variables, **options)

    async def encode_off_loop(self, text: str, field: str, add_special_tokens: bool = True) -> list[int]:
        """``encode``; a long text in a thread, so that the event loop goes on."""
        if len(text) <= _INLINE_CHARACTERS:
            return self.encode(text, field, add_special_tokens)
        return await asyncio.to_thread(self.encode, text, field, add_special_tokens)

    async def encode_chat_off_loop(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = (), **options: Any
    ) -> list[int]:
        """``encode_chat``; a long conversation in a thread, so that the event loop goes on."""
        if _characters(messages, tools) <= _INLINE_CHARACTERS:
            return self.encode_chat(messages, tools=tools, **options)
        return await asyncio.to_thread(self.encode_chat, messages, tools=tools, **options)

    def check_characters(self, characters: int, field: str) -> None:
        """Refuse a text that cannot fit, before time is spent on tokenising it.

        Raises:
            RequestError: even if every token were the vocabulary's longest, it would have too many.
        """
        fewest = -(-characters // self.tokenizer.max_token_characters)
        if fewest >= self.max_model_len:
            raise RequestError(
                f"{field} has {characters} characters, which is at least {fewest} tokens; "
                f"the model's context is {self.max_model_len} tokens, one of them for the answer",
                field,
                "context_length_exceeded",
            )

    def check_prompt(self, token_ids: Sequence[int], field: str) -> None:
        """Refuse a prompt that leaves no room for an answer, or holds ids that do not exist.

        Raises:
            RequestError: with the numbers.
        """
        if not token_ids:
            raise RequestError(f"{field} is empty; it must hold at least one token", field)
        if len(token_ids) >= self.max_model_len:
            raise RequestError(
                f"{field} has {len(token_ids)} tokens; the model's context is {self.max_model_len} tokens, "
                "one of them for the answer",
                field,
                "context_length_exceeded",
            )
        low, high = min(token_ids), max(token_ids)
        if low < 0 or high >= self.vocab_size:
            wrong = low if low < 0 else high
            raise RequestError(f"{field} holds token id {wrong}; ids run from 0 to {self.vocab_size - 1}", field)

    def check_sampling(self, sampling: SamplingParams) -> None:
        """Refuse token ids that do not exist.

        Raises:
            RequestError: names the field and the id.
        """
        for name, ids in (
            ("stop_token_ids", sampling.stop_token_ids),
            ("allowed_token_ids", sampling.allowed_token_ids or ()),
            ("logit_bias", tuple(token for token, _ in sampling.logit_bias)),
        ):
            for token in ids:
                if token >= self.vocab_size:
                    raise RequestError(f"{name} holds token id {token}; ids run from 0 to {self.vocab_size - 1}", name)

    def room(self, num_prompt_tokens: int, max_tokens: int | None) -> int:
        """Tokens that an answer may have: what was asked for, or all, but never past the context's end."""
        rest = self.max_model_len - num_prompt_tokens
        return rest if max_tokens is None else min(rest, max_tokens)

    def bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Token sequences of words to forbid: each as it stands at a text's start, and after a space."""
        found: dict[tuple[int, ...], None] = {}
        if len(words) > MAX_BAD_WORDS:
            raise RequestError(f"bad_words has {len(words)} entries; the limit is {MAX_BAD_WORDS}", "bad_words")
        for word in words:
            if len(word) > MAX_STOP_CHARACTERS:
                raise RequestError(
                    f"bad_words holds a word of {len(word)} characters; the limit is {MAX_STOP_CHARACTERS}", "bad_words"
                )
            if not word.strip():
                raise RequestError(f"bad_words holds {word!r}; each must have a visible character", "bad_words")
            for text in (word, " " + word.lstrip()):
                ids = self.tokenizer.encode(text, add_special_tokens=False, parse_special=False)
                found[tuple(ids)] = None
        return tuple(found)


def _characters(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> int:
    """Characters that are sure to reach the prompt: of the contents, and of the words that describe tools.

    A turn counts as one at least: it takes a token to say whose it is.
    """
    described = (tool["function"].get("description") or "" for tool in tools)
    return sum(max(1, len(message.get("content") or "")) for message in messages) + sum(map(len, described))
