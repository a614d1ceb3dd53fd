"""When two greedy token sequences count as the same."""

from __future__ import annotations

from collections.abc import Sequence

NEAR_TIE = 1e-3


def assert_same_tokens(got: Sequence[int], reference: Sequence[int], gaps: Sequence[float]) -> None:
    """Equal, except from a position where the reference's top two logits are within 1e-3: either may win there, and
    the texts part for good.

    Args:
        got: tokens under test.
        reference: the reference's tokens.
        gaps: by position, the difference of the reference's two highest logits.
    """
    for position, (ours, theirs) in enumerate(zip(got, reference, strict=False)):
        if ours != theirs:
            assert gaps[position] < NEAR_TIE, (
                f"token {position} is {ours}, the reference has {theirs} and its top two logits are "
                f"{gaps[position]:.4f} apart"
            )
            return
    assert len(got) == len(reference), f"{len(got)} tokens, the reference has {len(reference)}"
