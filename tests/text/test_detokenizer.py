"""Text of tokens one by one: the parts are the whole, characters are never split."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend

from foliolm.core.errors import RequestError
from foliolm.core.sampling import SamplingParams
from foliolm.text.detokenizer import Detokenizer
from foliolm.text.load import load_text
from foliolm.text.stream import TextAtEnd, TextStream, answer_text
from foliolm.text.tokenizer import Tokenizer
from support.tiny_files import embedded_model

TEXT = "naïve 🤷🏽‍♀️ 漢字 — привет, \u0301combining 12345\n\ttabs"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_text(embedded_model())[0]


@pytest.fixture(scope="module")
def backend(tokenizer) -> Backend:
    return tokenizer._full


@pytest.fixture(scope="module")
def known_bytes(tokenizer) -> set[int]:
    spellings = map(tokenizer.token_bytes, range(tokenizer.num_tokens))
    return {spelt[0] for spelt in spellings if len(spelt) == 1}


def parts_of(tokenizer: Tokenizer, ids: list[int], prompt: tuple[int, ...] = (), skip: bool = True) -> list[str]:
    stream = Detokenizer(tokenizer, prompt, skip)
    return [stream.push(token) for token in ids] + [stream.flush()]


@settings(max_examples=300)
@given(st.lists(st.integers(0, 49151), max_size=24), st.booleans())
def test_parts_are_the_whole_for_any_tokens(tokenizer, backend, ids, skip) -> None:
    parts = parts_of(tokenizer, ids, skip=skip)
    assert "".join(parts) == tokenizer.decode(ids, skip) == backend.decode(ids, skip_special_tokens=skip)
    assert all("\ufffd" not in part or "\ufffd" in tokenizer.decode(ids, skip) for part in parts)


@settings(max_examples=200)
@given(st.text(max_size=30))
def test_a_text_comes_back_whole_and_no_part_holds_half_a_character(tokenizer, known_bytes, text) -> None:
    # The embedded model has no token for some bytes (0x1D, 0xF1): such characters are lost to it, as to its original.
    text = "".join(character for character in text if known_bytes.issuperset(character.encode()))
    ids = tokenizer.encode(text, add_special_tokens=False)
    parts = parts_of(tokenizer, ids)
    assert "".join(parts) == text
    assert parts[-1] == ""
    if "\ufffd" not in text:
        assert not any("\ufffd" in part for part in parts)


def test_a_character_begun_in_the_prompt_belongs_to_the_answer(tokenizer) -> None:
    ids = tokenizer.encode("a🤷🏽b", add_special_tokens=False)
    for cut in range(len(ids) + 1):
        prompt, rest = tuple(ids[:cut]), ids[cut:]
        whole_before = b"".join(map(tokenizer.token_bytes, prompt)).decode("utf-8", "ignore")
        assert whole_before + "".join(parts_of(tokenizer, rest, prompt)) == "a🤷🏽b"


def test_an_unfinished_character_is_one_replacement_at_the_end_and_no_more(tokenizer) -> None:
    ids = tokenizer.encode("ok 🤷", add_special_tokens=False)
    parts = parts_of(tokenizer, ids[:-1])
    assert "".join(parts[:-1]) == "ok "
    assert parts[-1] == tokenizer.decode(ids[:-1])[3:] == "\ufffd"


def test_special_tokens_are_left_out_or_kept(tokenizer) -> None:
    ids = [1, *tokenizer.encode("hi", add_special_tokens=False), 2]
    assert tokenizer.decode(ids) == "hi"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>hi<|im_end|>"


def test_a_token_that_does_not_exist_is_named(tokenizer) -> None:
    with pytest.raises(RequestError, match=r"49152.*49151"):
        tokenizer.token_bytes(49152)


def test_bytes_of_all_tokens_are_what_the_tokenizer_decodes(tokenizer, backend) -> None:
    for token in random.Random(3).sample(range(49152), 2000):
        whole = backend.decode([token], skip_special_tokens=False)
        assert tokenizer.token_bytes(token).decode("utf-8", "replace") == whole


def test_a_stream_ends_at_a_stop_string_that_spans_tokens(tokenizer) -> None:
    ids = tokenizer.encode("one two three four", add_special_tokens=False)
    stream = TextStream(tokenizer, (), SamplingParams(stop=("wo thr",)))
    text = ""
    for token in ids:
        text += stream.push(token)
        if stream.stop_reason is not None:
            break
    assert (text + stream.flush(), stream.stop_reason) == ("one t", "wo thr")


def test_a_stream_gives_back_what_it_held_when_tokens_end(tokenizer) -> None:
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    stream = TextStream(tokenizer, (), SamplingParams(stop=("tabs and spaces",)))
    text = "".join(stream.push(token) for token in ids)
    assert text == TEXT.removesuffix("tabs")
    assert text + stream.flush() == TEXT


@settings(max_examples=200)
@given(
    st.lists(st.one_of(st.integers(0, 49151), st.integers(0, 300)), max_size=24),
    st.lists(st.integers(0, 300), max_size=4),
    st.booleans(),
)
def test_a_text_made_at_the_end_is_the_one_made_token_by_token(tokenizer, ids, prompt, skip) -> None:
    """Low ids are single bytes: characters are cut between tokens, and between the prompt and the answer."""
    params = SamplingParams(skip_special_tokens=skip)
    stream, at_end = TextStream(tokenizer, prompt, params), answer_text(tokenizer, prompt, params)
    assert isinstance(at_end, TextAtEnd)
    assert [at_end.push(token) for token in ids] == [""] * len(ids)
    assert at_end.flush() == "".join(map(stream.push, ids)) + stream.flush()


def test_where_a_stop_string_may_end_an_answer_its_text_is_made_as_tokens_come(tokenizer) -> None:
    params = SamplingParams(stop=("x",))
    assert isinstance(answer_text(tokenizer, (), params), TextStream)
    with pytest.raises(ValueError, match="stop strings"):
        TextAtEnd(tokenizer, (), params)
