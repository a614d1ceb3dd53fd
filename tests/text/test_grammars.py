"""What a grammar allows is what follows it, whoever writes; what cannot be compiled is refused by name."""

import json
import random
import re

import numpy as np
import pytest

from foliolm.core.errors import RequestError
from foliolm.core.grammar import MAX_SOURCE_CHARACTERS, GrammarSpec
from foliolm.text.grammar import CompiledGrammars, GrammarsOnDemand, checked_grammar
from foliolm.text.load import load_text
from support.tiny_files import embedded_model

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
SUM = 'root ::= num "+" num\nnum ::= [0-9]{1,3}'


@pytest.fixture(scope="module")
def tokenizer():
    return load_text(embedded_model())[0]


@pytest.fixture(scope="module")
def grammars(tokenizer):
    return CompiledGrammars(tokenizer, embedded_model().eos_token_ids)


def allowed(grammars, tokenizer, state):
    raw = np.frombuffer(grammars.masks([state]), np.uint8)
    return np.flatnonzero(np.unpackbits(raw, bitorder="little")[: tokenizer.num_tokens])


def write(grammars, tokenizer, spec, seed, most=400):
    """Text of a writer who knows nothing and takes any token that it may; prefers to end."""
    draw = random.Random(seed)
    state, ids = grammars.begin(spec), []
    ends = set(embedded_model().eos_token_ids)
    while not state.ended and len(ids) < most:
        choices = allowed(grammars, tokenizer, state)
        final = [token for token in choices if token in ends]
        token = int(final[0] if final and draw.random() < 0.5 else draw.choice(choices))
        state.accept(token)
        ids.append(token)
        assert state.error is None
    assert state.ended, "the writer did not come to an end"
    return tokenizer.decode(ids)


@pytest.mark.parametrize("seed", range(4))
def test_json_follows_its_schema(grammars, tokenizer, seed):
    spec = GrammarSpec("json", json.dumps(PERSON))
    value = json.loads(write(grammars, tokenizer, spec, seed))
    assert set(value) <= set(PERSON["properties"])
    assert len(value["name"]) <= 12
    assert 0 <= value["age"] <= 120
    assert all(tag in ("a", "b") for tag in value.get("tags", []))


@pytest.mark.parametrize(
    ("kind", "source", "pattern"),
    [
        ("regex", r"\d{4}-\d{2}-\d{2}", r"\d{4}-\d{2}-\d{2}"),
        ("choice", json.dumps(["yes", "no", 'q"\n{é']), 'yes|no|q"\n{é'),
        ("grammar", SUM, r"\d{1,3}\+\d{1,3}"),
        ("grammar", 'start: "a" b+\nb: "b" | "c"', "a[bc]+"),
    ],
)
def test_other_kinds_too(grammars, tokenizer, kind, source, pattern):
    spec = checked_grammar(GrammarSpec(kind, source))
    for seed in range(3):
        assert re.fullmatch(pattern, write(grammars, tokenizer, spec, seed))


def test_whitespace_is_bounded_as_asked(grammars, tokenizer):
    source = json.dumps({"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]})

    def takes(whitespace, text):
        state = grammars.begin(GrammarSpec("json", source, whitespace=whitespace))
        for token in tokenizer.encode(text, add_special_tokens=False):
            state.accept(token)
        return state.error is None

    assert takes(None, '{\n    "a": 1')
    assert not takes(None, '{\n\n"a"')
    assert not takes(None, "{" + "\n" + " " * 60)
    assert takes("", '{"a":1')
    assert not takes("", '{ "a"')
    assert takes(r"\t", '{\t"a"')


def test_it_ends_where_nothing_may_follow(grammars, tokenizer):
    state = grammars.begin(GrammarSpec("choice", '["yes", "yesterday"]'))
    for token in tokenizer.encode("yes", add_special_tokens=False):
        state.accept(token)
    assert not state.ended, "yesterday may follow"
    ends = set(embedded_model().eos_token_ids)
    assert ends < set(allowed(grammars, tokenizer, state).tolist())
    state.accept(min(ends))
    assert state.ended
    before = state.num_accepted
    state.accept(5)
    assert (state.num_accepted, state.error) == (before, None), "nothing is taken after the end"


def test_a_state_can_begin_again_anywhere(grammars, tokenizer):
    ids = tokenizer.encode('{"name": "Ada", "age', add_special_tokens=False)
    one, other = (grammars.begin(GrammarSpec("json", json.dumps(PERSON))) for _ in range(2))
    for token in ids:
        one.accept(token)
    other.accept(ids[0])
    other.restart(ids)
    assert grammars.masks([one]) == grammars.masks([other])
    assert one.num_accepted == other.num_accepted == len(ids)
    # Together, and in any order, they get what they get alone.
    third = grammars.begin(GrammarSpec("regex", "[a-z]+"))
    assert grammars.masks([third, one]) == grammars.masks([third]) + grammars.masks([one])


def test_a_token_that_is_not_allowed_is_an_error_and_stays_one(grammars, tokenizer):
    state = grammars.begin(GrammarSpec("regex", "[0-9]+"))
    (token,) = tokenizer.encode("x", add_special_tokens=False)
    state.accept(token)
    assert "the grammar cannot go on" in state.error
    grammars.masks([state])
    assert state.error is not None


@pytest.mark.parametrize(
    ("kind", "source", "words"),
    [
        ("json", "{", "JSON schema"),
        ("json", "7", "JSON schema"),
        ("json", '{"type": "frob"}', "frob"),
        ("json", '{"type": "array", "uniqueItems": true}', "uniqueItems"),
        ("json", '{"$ref": "http://example.com/s.json"}', "example.com"),
        ("regex", "(", "regular expression"),
        ("regex", "(?=a)b", "look"),
        ("grammar", "start: nowhere", "nowhere"),
        ("grammar", "what is this", "grammar"),
        ("grammar", "root ::= " + '"a" ' * 20_000, "limit"),
    ],
)
def test_what_is_wrong_is_refused_by_name_and_briefly(grammars, kind, source, words):
    for look in (checked_grammar, grammars.prepare):
        with pytest.raises(RequestError, match=re.escape(words)) as refused:
            look(GrammarSpec(kind, source, "structured_outputs.it"))
        assert refused.value.field == "structured_outputs.it"
        assert len(str(refused.value)) < 500


def test_one_that_allows_nothing_is_refused(grammars):
    circle = '{"$ref": "#/$defs/x", "$defs": {"x": {"$ref": "#/$defs/x"}}}'
    with pytest.raises(RequestError, match="allows no text"):
        grammars.prepare(GrammarSpec("json", circle))


def test_one_that_is_too_long_or_too_large_is_refused(grammars):
    with pytest.raises(RequestError, match=str(MAX_SOURCE_CHARACTERS)):
        GrammarSpec("regex", "a" * (MAX_SOURCE_CHARACTERS + 1))
    deep = json.loads('{"properties": {"a":' * 80 + "{}" + "}}" * 80)
    with pytest.raises(RequestError, match="recursion"):
        grammars.prepare(GrammarSpec("json", json.dumps(deep)))


def test_the_vocabulary_is_read_once_and_late(tokenizer):
    loads = []

    def load():
        loads.append(1)
        return CompiledGrammars(tokenizer, embedded_model().eos_token_ids)

    late = GrammarsOnDemand(load)
    assert loads == []
    late.prepare(GrammarSpec("regex", "a"))
    state = late.begin(GrammarSpec("regex", "b"))
    assert late.masks([state])
    late.read_ahead()
    assert loads == [1]


def test_it_can_be_read_ahead_and_a_failure_is_not_the_last_word(tokenizer):
    tries = []

    def load():
        tries.append(1)
        if len(tries) == 1:
            raise RequestError("not yet", "grammar")
        return CompiledGrammars(tokenizer, embedded_model().eos_token_ids)

    late = GrammarsOnDemand(load)
    with pytest.raises(RequestError, match="not yet"):
        late.read_ahead()
    late.read_ahead()
    late.prepare(GrammarSpec("regex", "a"))
    assert len(tries) == 2


def test_without_an_end_token_an_answer_ends_by_itself(tokenizer):
    endless = CompiledGrammars(tokenizer, ())
    state = endless.begin(GrammarSpec("choice", '["yes"]'))
    for token in tokenizer.encode("yes", add_special_tokens=False):
        assert token in allowed(endless, tokenizer, state)
        state.accept(token)
    assert state.ended
