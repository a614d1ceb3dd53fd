"""Beam search by transformers, and by our scheduler and executor, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from foliolm.core.request import EngineRequest
from foliolm.core.sampling import BeamSearch, SamplingParams

NEAR_SCORE = 1e-3


def search(
    first_id: int, prompt: Sequence[int], beam: BeamSearch, count: int, eos: tuple[int, ...] = (), **sampling: Any
) -> list[EngineRequest]:
    """The engine requests of one search: as many siblings as hypotheses."""
    params = SamplingParams(max_tokens=count, ignore_eos=not eos, beam=beam, logprobs=0, **sampling)
    return [
        EngineRequest(first_id + place, tuple(prompt), params, eos, arrival_ns=first_id, sibling=place)
        for place in range(beam.width)
    ]


def reference_beams(
    model: Any, prompt: Sequence[int], beam: BeamSearch, count: int, eos: tuple[int, ...] = ()
) -> list[tuple[list[int], float]]:
    """(tokens, score) of all hypotheses by transformers, best first; padding is cut off."""
    model.generation_config.eos_token_id = list(eos) or None  # what is absent in the call comes from here
    with torch.inference_mode():
        out = model.generate(
            torch.tensor([list(prompt)]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            num_beams=beam.width,
            num_return_sequences=beam.width,
            max_new_tokens=count,
            length_penalty=beam.length_penalty,
            early_stopping=beam.early_stopping,
            do_sample=False,
            eos_token_id=list(eos) or None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
        )
    found = []
    for sequence, score in zip(out.sequences.tolist(), out.sequences_scores.tolist(), strict=True):
        tokens = sequence[len(prompt) :]
        ends = [place for place, token in enumerate(tokens) if token in eos]
        found.append((tokens[: ends[0] + 1] if ends else tokens, score))
    return found


def assert_same_beams(
    got: Sequence[tuple[Sequence[int], float]], reference: Sequence[tuple[Sequence[int], float]]
) -> None:
    """The same hypotheses in the same order with the same scores; where tokens differ, the scores must be a tie.

    Args:
        got: (tokens, score) under test.
        reference: transformers'.
    """
    assert len(got) == len(reference)
    for (tokens, score), (theirs, their_score) in zip(got, reference, strict=True):
        assert abs(score - their_score) < NEAR_SCORE, f"{tokens} scores {score}, the reference {theirs} {their_score}"
        if list(tokens) != list(theirs):
            close = [other for other, value in reference if abs(value - score) < NEAR_SCORE]
            assert list(tokens) in [list(other) for other in close], f"{list(tokens)} is not among {reference}"
