"""A choice makes text as tokens come, and piles up what nobody reads."""

import pytest
from fake_server import byte_tokenizer

from foliolm.api.choice import Choice
from foliolm.core.errors import EngineDeadError
from foliolm.core.request import FinishReason, RequestStamps, TokenLogprobs, TokenOutput
from foliolm.core.sampling import SamplingParams
from foliolm.text.stream import TextStream, answer_text

TOKENIZER = byte_tokenizer()


class Meter:
    def __init__(self):
        self.count = 0
        self.reasons = []

    def tokens(self, count, now_ns):
        self.count += count

    def finish(self, reason):
        self.reasons.append(reason)


class Watched:
    """A choice, and what it called."""

    def __init__(self, make=TextStream, **sampling):
        params = SamplingParams(**sampling)
        self.notified = 0
        self.ended = []
        self.meter = Meter()
        text = make(TOKENIZER, [97], params)
        self.choice = Choice(0, [97], params, text, self._notify, self.ended.append, self.meter)

    def _notify(self):
        self.notified += 1

    def give(self, text, **more):
        raw = text.encode() if isinstance(text, str) else text
        for byte in raw[:-1]:
            self.choice.on_output(TokenOutput(5, (byte,)))
        self.choice.on_output(TokenOutput(5, tuple(raw[-1:]), **more))


def test_what_nobody_reads_is_one_delta():
    watched = Watched()
    watched.give("x" * 1000)
    delta = watched.choice.take()
    assert delta.text == "x" * 1000
    assert len(delta.token_ids) == 1000
    assert watched.choice.take() is None
    assert watched.notified == 1000
    watched.give("yz", finish_reason=FinishReason.LENGTH, stamps=RequestStamps(num_cached_tokens=1))
    delta = watched.choice.take()
    assert (delta.text, delta.finish_reason) == ("yz", FinishReason.LENGTH)
    assert watched.choice.num_cached_tokens == 1
    assert watched.meter.reasons == ["length"]
    assert watched.meter.count == 1002


@pytest.mark.parametrize(("include", "text"), [(False, "ab"), (True, "abSTOP")])
def test_a_stop_string_ends_it_once_and_counts_its_tokens(include, text):
    watched = Watched(stop=("STOP",), include_stop_str_in_output=include)
    watched.give("abSTOPcd", finish_reason=FinishReason.LENGTH)
    delta = watched.choice.take()
    assert (delta.text, delta.finish_reason, delta.stop_reason) == (text, FinishReason.STOP, "STOP")
    assert watched.ended == [5], "the engine is told once"
    assert watched.choice.num_tokens == 6, "what came after it does not count"
    assert watched.meter.reasons == ["stop"]


def test_a_stop_string_found_in_several_tokens_of_one_output():
    watched = Watched(stop=("b",))
    entries = tuple(TokenLogprobs(token, -1.0, 1) for token in b"abcd")
    watched.choice.on_output(TokenOutput(5, tuple(b"abcd"), entries, finish_reason=FinishReason.LENGTH))
    delta = watched.choice.take()
    assert (delta.text, delta.finish_reason) == ("a", FinishReason.STOP)
    assert [entry.token_id for entry in delta.logprobs] == list(b"ab")
    assert watched.ended == [], "the engine has ended it already"


@pytest.mark.parametrize("make", [TextStream, answer_text])
@pytest.mark.parametrize(("include", "text"), [(False, "ab"), (True, "abc")])
def test_the_text_of_a_stop_token_is_left_out_unless_asked_for(make, include, text):
    watched = Watched(make, stop_token_ids=(99,), include_stop_str_in_output=include)
    watched.give("abc", finish_reason=FinishReason.STOP, stop_reason=99)
    delta = watched.choice.take()
    assert (delta.text, delta.stop_reason) == (text, 99)
    assert watched.choice.num_tokens == 3


def test_no_character_is_split_and_nothing_is_lost_at_the_end():
    watched = Watched()
    raw = "aé漢😀".encode()
    texts = []
    for byte in raw:
        watched.give(bytes([byte]))
        delta = watched.choice.take()
        texts.append(delta.text)
    assert [text for text in texts if text] == ["a", "é", "漢", "😀"]
    watched.give(b"\xf0\x9f", finish_reason=FinishReason.LENGTH)
    assert watched.choice.take().text == "\ufffd"


def test_a_text_made_at_the_end_is_whole_when_the_answer_ends_by_itself_or_by_an_error():
    watched = Watched(answer_text)
    watched.give("aé漢".encode() + b"\xf0\x9f")
    assert watched.choice.take().text == ""
    watched.give("", finish_reason=FinishReason.ERROR, error="the row failed")
    delta = watched.choice.take()
    assert (delta.text, delta.error) == ("aé漢\ufffd", "the row failed")


def test_text_held_back_for_a_stop_string_comes_at_the_end():
    watched = Watched(stop=("STOP",))
    watched.give("abSTO")
    assert watched.choice.take().text == "ab"
    watched.give("x", finish_reason=FinishReason.LENGTH)
    assert watched.choice.take().text == "STOx"


def test_death_and_abandonment_end_it_once():
    watched = Watched()
    watched.give("a")
    watched.choice.on_error(EngineDeadError("gone"))
    watched.choice.abandon()
    watched.give("b")
    delta = watched.choice.take()
    assert (delta.text, delta.finish_reason, delta.error) == ("a", FinishReason.ERROR, "gone")
    assert watched.meter.reasons == ["error"]
