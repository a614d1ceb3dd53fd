"""What came of a step."""

from __future__ import annotations

from dataclasses import field

from foliolm.core.request import TokenLogprobs
from foliolm.core.valueclass import valueclass


@valueclass
class StepSeconds:
    """Measured seconds of a step, by part. ``total`` runs from completion to completion where steps overlap.

    Attributes:
        total: the whole step.
        prepare: building the batch's tensors.
        forward: the model.
        sample: from logits to tokens.
    """

    total: float
    prepare: float = 0.0
    forward: float = 0.0
    sample: float = 0.0


@valueclass
class StepResult:
    """Tokens, and how long they took.

    Attributes:
        step_id: of the plan.
        tokens: a list of sampled tokens a row, in the plan's row order (empty for a row that samples nothing); a row
            with forks has its own first, then one a fork. None in virtual time, where tokens have no content.
        logprobs: by row index, one entry a sampled token, for rows that asked.
        prompt_logprobs: by row index, for rows that asked: one entry a prompt position that this step computed the
            *successor's* logits for; the first of a prompt is None.
        seconds: measured, or predicted in virtual time.
        errors: by row index: a row that failed alone (a sentence); its tokens are empty.
        ended: rows whose grammar ended with the sampled token: nothing may follow it.
    """

    step_id: int
    tokens: list[list[int]] | None
    seconds: StepSeconds
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprobs | None]] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    ended: frozenset[int] = frozenset()
