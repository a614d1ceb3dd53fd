"""What a report says of wrong answers does not depend on the order in which they ended."""

import itertools

from foliolm.bench.answer import Answer
from foliolm.bench.checks import judge
from foliolm.simulate.workload.item import Item


def answer(number: int, **known) -> Answer:
    """A whole answer to a prompt of 8 tokens, but for what is said of it."""
    item = Item(time_ns=0, num_prompt=8, num_output=2)
    whole = {"chunks": 2, "finish_reason": "length", "done": True, "prompt_tokens": 8, "completion_tokens": 2}
    return Answer(item, number, due_ns=0, **{**whole, **known})


def test_the_first_of_a_kind_is_the_first_that_was_sent_in_whatever_order_they_ended():
    sent = [
        answer(1),
        answer(2, prompt_tokens=7),
        answer(3, error="http_503", message="gone at 3"),
        answer(4, prompt_tokens=6),
        answer(5, error="http_503", message="gone at 5"),
        answer(6, done=False),
    ]
    for ended in itertools.permutations(sent):
        verdict = judge(ended, sends_ids=True, ignores_eos=True)
        assert {kind: counted.to_json() for kind, counted in verdict.errors.items()} == {
            "http_503": {"count": 2, "first": "gone at 3"}
        }
        assert {kind: counted.to_json() for kind, counted in verdict.checks.items()} == {
            "usage_prompt": {"count": 2, "first": "request 2: usage says 7 prompt tokens; 8 were sent"},
            "no_done": {"count": 1, "first": "request 6: the stream ended without it"},
        }
