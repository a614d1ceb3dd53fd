"""Whether an answer is what it claims to be: what was received against what the server says of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from foliolm.bench.answer import Answer

FINISHED = frozenset({"stop", "length", "tool_calls", "content_filter", "function_call"})
TEXTS = {
    "no_usage": "answers without usage, though it was asked for: their tokens are counted as chunks",
    "usage_completion": "answers whose usage claims another number of tokens than came",
    "usage_prompt": "answers whose usage claims another number of prompt tokens than were sent",
    "short": "answers that ended before the length asked for, though the end token was to be ignored",
    "long": "answers longer than asked for",
    "finish_reason": "answers with a wrong finish reason",
    "no_done": "streams without the last event, [DONE]",
}


@dataclass(slots=True)
class Counted:
    """How many of a kind, and the first of them."""

    count: int = 0
    first: str = ""

    def add(self, message: str) -> None:
        """One more."""
        self.count += 1
        self.first = self.first or message

    def to_json(self) -> dict[str, Any]:
        """For the report."""
        return {"count": self.count, "first": self.first}


@dataclass(slots=True)
class Verdict:
    """Errors and wrong answers by kind, in the order of the requests that show them first."""

    errors: dict[str, Counted] = field(default_factory=dict)
    checks: dict[str, Counted] = field(default_factory=dict)


def judge(answers: Iterable[Answer], sends_ids: bool, ignores_eos: bool) -> Verdict:
    """Go through all answers.

    Args:
        answers: that ended, in any order.
        sends_ids: prompts were token ids, so that their number is known.
        ignores_eos: the server was told to go on to the length asked for.
    """
    verdict = Verdict()
    # By number, not as they ended: two runs in which the same things go wrong say the same of them.
    for answer in sorted(answers, key=lambda answer: answer.number):
        if answer.error:
            verdict.errors.setdefault(answer.error, Counted()).add(answer.message)
            continue
        for kind, message in wrong(answer, sends_ids, ignores_eos):
            verdict.checks.setdefault(kind, Counted()).add(f"request {answer.number}: {message}")
    return verdict


def wrong(answer: Answer, sends_ids: bool, ignores_eos: bool) -> Iterator[tuple[str, str]]:
    """(kind, sentence) of everything about a whole answer that cannot be."""
    item, claimed = answer.item, answer.completion_tokens
    asked, reason = item.num_output, answer.finish_reason
    if claimed is None:
        yield "no_usage", "no usage came"
    elif answer.has_token_ids and claimed != answer.num_ids:
        yield "usage_completion", f"usage says {claimed} completion tokens; {answer.num_ids} token ids came"
    elif claimed < answer.chunks:
        yield "usage_completion", f"usage says {claimed} completion tokens; {answer.chunks} chunks with tokens came"
    elif claimed and not answer.chunks and answer.has_token_ids:
        yield "usage_completion", f"usage says {claimed} completion tokens; none came"
    if sends_ids and answer.prompt_tokens is not None and answer.prompt_tokens != item.num_prompt:
        yield "usage_prompt", f"usage says {answer.prompt_tokens} prompt tokens; {item.num_prompt} were sent"
    got = answer.num_output
    if got > asked:
        yield "long", f"{got} tokens came; {asked} were asked for"
    elif got < asked and ignores_eos:
        yield "short", f"{got} tokens came (finish reason {reason!r}); {asked} were asked for, ignore_eos on"
    if reason not in FINISHED:
        yield "finish_reason", f"it is {reason!r}"
    elif reason == "length" and got < asked and not ignores_eos:
        yield "finish_reason", f"it is 'length' after {got} tokens; {asked} were allowed"
    if not answer.done:
        yield "no_done", "the stream ended without it"
