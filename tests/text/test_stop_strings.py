"""Stop strings over parts of a text, against a twin that looks at the whole text letter by letter."""

import itertools

from hypothesis import example, given, settings
from hypothesis import strategies as st

from foliolm.text.stop import StopStrings

LETTERS = st.text("ab\n", max_size=24)
STOPS = st.lists(st.text("ab\n", min_size=1, max_size=5), min_size=1, max_size=4)


def twin(parts: list[str], stops: list[str], include: bool, min_tokens: int) -> tuple[str, str | None]:
    """One part a token. The first character that completes a stop string decides; of several, the longest wins."""
    text = ""
    for number, part in enumerate(parts, 1):
        for character in part:
            text += character
            done = [stop for stop in stops if text.endswith(stop)] if number >= min_tokens else []
            if done:
                longest = max(done, key=len)
                return (text if include else text[: len(text) - len(longest)]), longest
    return text, None


def run(parts: list[str], stops: list[str], include: bool, min_tokens: int) -> tuple[str, str | None, list[str]]:
    checker = StopStrings(stops, include, min_tokens)
    out = []
    for number, part in enumerate(parts, 1):
        out.append(checker.push(part, number))
        if checker.found is not None:
            return "".join(out), checker.found, out
    return "".join(out) + checker.flush(), None, out


@settings(max_examples=500)
@given(st.lists(LETTERS, max_size=8), STOPS, st.booleans(), st.integers(0, 9))
@example(["a", "b"], ["ab", "b"], False, 0)
@example(["ab", "ab"], ["abab", "b"], True, 2)
def test_parts_give_what_the_whole_text_gives(parts, stops, include, min_tokens) -> None:
    text, found, _ = run(parts, stops, include, min_tokens)
    assert (text, found) == twin(parts, stops, include, min_tokens)


@settings(max_examples=300)
@given(LETTERS, STOPS, st.lists(st.integers(0, 24), max_size=6))
def test_cuts_do_not_matter(text, stops, cuts) -> None:
    edges = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    parts = [text[low:high] for low, high in itertools.pairwise(edges)]
    assert run(parts, stops, False, 0)[:2] == run([text], stops, False, 0)[:2]


@settings(max_examples=300)
@given(st.lists(LETTERS, max_size=8), STOPS)
def test_nothing_is_held_back_that_cannot_be_a_beginning(parts, stops) -> None:
    checker = StopStrings(stops)
    given_out, seen = "", ""
    for number, part in enumerate(parts, 1):
        given_out += checker.push(part, number)
        seen += part
        if checker.found is not None:
            return
        held = seen[len(given_out) :]
        assert seen == given_out + held
        assert held == "" or any(len(stop) > len(held) and stop.startswith(held) for stop in stops)


def test_the_prompt_is_no_part_of_the_search() -> None:
    checker = StopStrings(["END"])
    assert checker.push("D and more", 1) == "D and more"
    assert checker.found is None


def test_without_stop_strings_nothing_is_held() -> None:
    assert StopStrings([]).push("anything", 1) == "anything"
