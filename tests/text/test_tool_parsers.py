"""Tool calls are read out of text however it is cut, and what is no call stays text."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foliolm.core.grammar import GrammarSpec
from foliolm.text.grammar import CompiledGrammars
from foliolm.text.load import load_text
from foliolm.text.tool_events import CallArguments, CallBegins, CallEnds, TextPart
from foliolm.text.tool_formats import described_in_text, tool_format
from foliolm.text.tool_parsers import TOOL_PARSERS
from support.tiny_files import embedded_model

NAMES = ("f", "get_weather")
WEATHER = {
    "name": "get_weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


def read(kind, parts):
    """(text, [(name, arguments, complete)]) of a text that comes in parts."""
    parser = TOOL_PARSERS[kind](NAMES)
    text, calls = "", []
    for event in [event for part in parts for event in parser.push(part)] + parser.flush():
        match event:
            case TextPart(more):
                text += more
            case CallBegins(index, name):
                assert index == len(calls)
                calls.append([name, "", False])
            case CallArguments(index, more):
                assert not calls[index][2], "nothing comes after the end"
                calls[index][1] += more
            case CallEnds(index):
                calls[index][2] = True
    return text, [tuple(call) for call in calls]


HERMES = [
    ("no call at all, 3 < 4\n", ("no call at all, 3 < 4\n", [])),
    ('<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', ("", [("f", '{"a": 1}', True)])),
    ('Hm. <tool_call>{"name": "f", "arguments": {}}</tool_call>', ("Hm.", [("f", "{}", True)])),
    (
        '<tool_call>{"arguments": {"q": "}{\\"<tool_call>"}, "name": "f"}</tool_call>\n'
        '<tool_call>\n{"name": "get_weather", "arguments": {"a": [1, {"b": null}]}}\n</tool_call>\n',
        ("", [("f", '{"q": "}{\\"<tool_call>"}', True), ("get_weather", '{"a": [1, {"b": null}]}', True)]),
    ),
    ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', ("", [("f", '{"a": 1}', True)])),
    ('<tool_call>{"id": 7, "name": "f", "arguments": null}</tool_call> bye', ("bye", [("f", "{}", True)])),
    ('<tool_call>{"name": "f"}', ("", [("f", "{}", True)])),
    ('<tool_call>{"name": "f", "arguments": {"a": "long', ("", [("f", '{"a": "long', False)])),
    ('<tool_call>{"name": "rm_rf", "arguments": {}}</tool_call>', None),
    ('<tool_call>{"name": 7, "arguments": {}}</tool_call>', None),
    # What was announced cannot be taken back, and what follows it is not hidden.
    ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', ("[1]}</tool_call>", [("f", "", False)])),
    ("<tool_call>f()</tool_call>", None),
    ('<tool_call>{"na', None),
    ("<tool_cal", None),
    ("an <tool> of <tool_calls>", None),
]
PLAIN = [
    ("Just text.", ("Just text.", [])),
    ('{"name": "f", "parameters": {"a": 1}}', ("", [("f", '{"a": 1}', True)])),
    (
        '[{"name": "f", "arguments": {}}, {"name": "get_weather", "arguments": {"c": "x"}}]',
        ("", [("f", "{}", True), ("get_weather", '{"c": "x"}', True)]),
    ),
    ('{"name": "f", "parameters": {}}; {"name": "f"}', ("", [("f", "{}", True), ("f", "{}", True)])),
    ('{"name": "f", "parameters": {"a"', ("", [("f", '{"a"', False)])),
    ('{"colour": "red"}', None),
    ('{"name": "nobody", "parameters": {}}', None),
    ("[1, 2]", None),
    ('[[{"name": "f"}]]', None),
    ("  ", None),
    ('{"nam', None),
]
CASES = [("hermes", *case) for case in HERMES] + [("json", *case) for case in PLAIN]


@pytest.mark.parametrize(("kind", "text", "expected"), CASES)
def test_calls_and_text(kind, text, expected):
    assert read(kind, [text]) == (expected or (text, [])), "what is no call stays text as it is"
    assert read(kind, list(text)) == read(kind, [text])


@given(st.sampled_from(CASES), st.lists(st.integers(1, 12), max_size=40))
def test_the_cuts_do_not_matter(case, lengths):
    kind, text, _ = case
    parts, at = [], 0
    for length in lengths:
        parts.append(text[at : at + length])
        at += length
    assert read(kind, [*parts, text[at:]]) == read(kind, [text])


def test_arguments_come_as_they_are_written():
    parser = TOOL_PARSERS["hermes"](NAMES)
    assert parser.push('<tool_call>{"name": "f"') == [CallBegins(0, "f")]
    assert parser.push(', "arguments": {"text": "On') == [CallArguments(0, '{"text": "On')]
    assert parser.push("ce") == [CallArguments(0, "ce")]
    assert parser.push(' upon"}') == [CallArguments(0, ' upon"}')]
    assert parser.push("}") == [CallEnds(0)]


@pytest.fixture(scope="module")
def accepts():
    """Whether a Lark grammar takes a text: 'whole', 'part', or 'no'."""
    tokenizer = load_text(embedded_model())[0]
    grammars = CompiledGrammars(tokenizer, embedded_model().eos_token_ids)

    def accepts(grammar, text):
        state = grammars.begin(GrammarSpec("grammar", grammar))
        ids = tokenizer.encode(text, add_special_tokens=False)
        for token in ids:
            state.accept(token)
        if state.error is not None or state.num_accepted < len(ids):
            return "no"
        grammars.masks([state])
        return "whole" if state.matcher.is_accepting() else "part"

    return accepts


def hermes(city="Paris", key="city"):
    call = json.dumps({"name": "get_weather", "arguments": {key: city}})
    return f"<tool_call>\n{call}\n</tool_call>"


def test_a_required_call_is_held_to_its_schema(accepts):
    grammar = tool_format("hermes", "", ()).grammar([WEATHER, {"name": "f"}], several=True)
    assert accepts(grammar, hermes()) == "whole"
    assert accepts(grammar, hermes() + "\n" + hermes("Rome")) == "whole"
    assert accepts(grammar, hermes(key="town")) == "no"
    assert accepts(grammar, "I would rather talk") == "no"
    one = tool_format("hermes", "", ()).grammar([WEATHER], several=False)
    assert accepts(one, hermes() + "\n" + hermes()) == "no"


def test_text_is_free_and_strict_calls_in_it_are_not(accepts):
    grammar = tool_format("hermes", "", ()).strict_grammar([WEATHER])
    assert accepts(grammar, "Let me think about <that>.") == "whole"
    assert accepts(grammar, "Let me see. " + hermes()) == "whole"
    assert accepts(grammar, "Let me see. " + hermes(key="town")) == "no"
    assert tool_format("json", "", ()).strict_grammar([WEATHER]) is None


def test_a_call_or_an_answer_of_a_form(accepts):
    grammar = tool_format("hermes", "", ()).grammar([WEATHER], several=False, answer={"type": "object"})
    assert accepts(grammar, hermes()) == "whole"
    assert accepts(grammar, '{"any": 1}') == "whole"
    assert accepts(grammar, "text") == "no"


def test_plain_calls_use_the_key_that_the_template_teaches(accepts):
    llama = tool_format("auto", 'tools … "parameters": dictionary', ())
    assert (llama.name, llama.arguments_key) == ("json", "parameters")
    grammar = llama.grammar([WEATHER], several=True)
    assert accepts(grammar, '{"name": "get_weather", "parameters": {"city": "Oslo"}}') == "whole"
    assert tool_format("auto", "tools <tool_call>", ()).name == "hermes"
    assert tool_format("auto", "no word of them", ()).name == "hermes"
    assert tool_format("auto", "tools <tool_call>", ("<tool_call>", "</tool_call>")).special_tags


def test_tools_are_described_where_the_template_cannot():
    tool = {"type": "function", "function": WEATHER}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    turns = described_in_text(
        [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Well.", "tool_calls": [call, call]},
            {"role": "tool", "content": "one", "tool_call_id": "c"},
            {"role": "tool", "content": "two", "tool_call_id": "c"},
        ],
        [tool],
    )
    assert [turn["role"] for turn in turns] == ["system", "user", "assistant", "user"]
    assert json.dumps(tool) in turns[0]["content"]
    assert read("hermes", [turns[2]["content"]]) == ("Well.", [("f", '{"a": 1}', True)] * 2)
    assert turns[3]["content"].count("<tool_response>") == 2
    kept = described_in_text([{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}], [tool])
    assert kept[0]["content"].startswith("Be kind.\n\n# Tools")
