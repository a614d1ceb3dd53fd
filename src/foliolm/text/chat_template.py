"""Chat templates: from messages to the text, and the token ids, that a model was trained on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from foliolm.core.errors import ConfigError, RequestError
from foliolm.text.marks import ControlTokens, Marks

if TYPE_CHECKING:
    import jinja2
    import jinja2.sandbox

    from foliolm.text.tokenizer import Tokenizer

Messages = Sequence[Mapping[str, Any]]

# Stands for "cut here" when the last message is to be continued; the marks take the first two of the private use area.
_CUT = "\uf8ff"


class ChatTemplate:
    """A model's chat template, bound to its tokenizer. Safe to use from several threads.

    The template is Jinja, run in a sandbox in which it can change nothing and call nothing but what transformers offers
    to templates (``raise_exception``, ``strftime_now``, ``tojson``, ``{% generation %}``).

    Args:
        sources: template source by name; ``default`` must be there, ``tool_use`` is taken when tools are given.
        tokenizer: makes ids of the rendered text.
        special_tokens: ``bos_token`` and the like, which templates write by name.

    Attributes:
        variables: names that the templates read and do not set themselves.
        takes_tools: whether tools that are given get into the text.

    Raises:
        ConfigError: a template is not valid Jinja.
    """

    def __init__(self, sources: Mapping[str, str], tokenizer: Tokenizer, special_tokens: Mapping[str, str]) -> None:
        if "default" not in sources:
            raise ConfigError(f"the chat templates are named {', '.join(sources)}; one must be named default")
        self.sources = dict(sources)
        self.special_tokens = dict(special_tokens)
        self._tokenizer = tokenizer
        self._control = ControlTokens(tokenizer.control)
        self._compiled = {name: _compile(source) for name, source in sources.items()}
        self.variables = frozenset[str]().union(*map(_variables, sources.values()))
        self.takes_tools = "tool_use" in sources or "tools" in self.variables

    def render(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a conversation.

        Args:
            messages: in OpenAI's form; content null counts as empty.
            tools: function descriptions, in OpenAI's form.
            add_generation_prompt: end with the head of an assistant's turn.
            continue_final_message: end within the last message, an assistant's, so that it is continued.
            variables: more variables for the template.

        Raises:
            RequestError: the template refuses the messages or fails on them, or the last two arguments contradict
                each other or the messages.
        """
        text, _ = self._render(messages, tools, add_generation_prompt, continue_final_message, variables)
        return text

    def encode(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation; arguments and errors are those of ``render``.

        Nothing is added around the text, since templates write the begin token themselves. Control tokens come from the
        template alone: one that is spelt out in a message is encoded as the characters that it is spelt with.
        """
        text, spans = self._render(messages, tools, add_generation_prompt, continue_final_message, variables)
        if not self._control.touch(text, spans):
            return self._tokenizer.encode(text, add_special_tokens=False, parse_special=True)
        return self._encode_protected(text, spans)

    def _render(
        self,
        messages: Messages,
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        variables: Mapping[str, Any] | None,
    ) -> tuple[str, list[tuple[int, int]]]:
        name = "tool_use" if tools and "tool_use" in self._compiled else "default"
        turns = [{**message, "content": _or_empty(message.get("content"))} for message in messages]
        more = dict(variables or {})
        marks = Marks(self._control, [turns, tools, more, self.sources[name]])
        turns = marks.mark(turns)
        if continue_final_message:
            _check_continuable(turns, add_generation_prompt)
            turns[-1]["content"] += _CUT
        values = {
            **self.special_tokens,
            **marks.mark(more),
            "messages": turns,
            "tools": marks.mark(tools),
            "add_generation_prompt": add_generation_prompt,
        }
        rendered = _run(self._compiled[name], values)
        if continue_final_message:
            rendered, cut, _ = rendered.rpartition(_CUT)
            if not cut:
                raise RequestError(
                    "the chat template leaves out the last message, so it cannot be continued", "messages"
                )
        return marks.unmark(rendered)

    def _encode_protected(self, text: str, spans: list[tuple[int, int]]) -> list[int]:
        ids: list[int] = []
        at_start = True
        strip_next = False
        pieces = list(self._control.split(text, spans))
        for number, (piece, is_control) in enumerate(pieces):
            if is_control:
                token_id = self._tokenizer.control[piece]
                ids.append(token_id)
                strip_next = token_id in self._tokenizer.strips_after
            else:
                following = pieces[number + 1][0] if number + 1 < len(pieces) else None
                if strip_next:
                    piece = piece.lstrip()
                if following and self._tokenizer.control[following] in self._tokenizer.strips_before:
                    piece = piece.rstrip()
                ids += self._tokenizer.encode_run(piece, at_start)
            at_start = at_start and not piece
        return ids


def _or_empty(content: Any) -> Any:
    return "" if content is None else content


def _check_continuable(messages: list[dict[str, Any]], add_generation_prompt: bool) -> None:
    if add_generation_prompt:
        raise RequestError(
            "continue_final_message and add_generation_prompt are both true; they exclude each other",
            "continue_final_message",
        )
    if not messages or messages[-1].get("role") != "assistant":
        raise RequestError(
            "continue_final_message is true, but the last message is not an assistant's", "continue_final_message"
        )
    if not isinstance(messages[-1]["content"], str):
        raise RequestError("continue_final_message needs a last message whose content is a string", "messages")


def _run(template: jinja2.Template, values: dict[str, Any]) -> str:
    import jinja2

    try:
        return template.render(values)
    except jinja2.TemplateError as error:
        raise RequestError(
            f"the chat template refuses the messages: {error}", "messages", "chat_template_error"
        ) from None
    except (TypeError, ValueError, KeyError, AttributeError, IndexError, ArithmeticError, RecursionError) as error:
        text = f"the chat template fails on the messages: {type(error).__name__}: {error}"
        raise RequestError(text, "messages", "chat_template_error") from None


def _variables(source: str) -> frozenset[str]:
    from jinja2 import meta

    return frozenset(meta.find_undeclared_variables(_environment().parse(source)))


def _compile(source: str) -> jinja2.Template:
    import jinja2

    try:
        return _environment().from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"the chat template is not valid Jinja: line {error.lineno}: {error.message}") from None


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    import jinja2.sandbox

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_generation_tag(), "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _generation_tag() -> type[Any]:
    from jinja2 import nodes, parser
    from jinja2.ext import Extension

    class GenerationTag(Extension):
        """``{% generation %}…{% endgeneration %}`` says which text the model wrote: here it changes nothing."""

        tags = {"generation"}  # noqa: RUF012 (Jinja's own way of declaring it)

        def parse(self, parser: parser.Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    return GenerationTag


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which models have never seen."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    import jinja2

    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    from datetime import datetime

    return datetime.now().strftime(pattern)
