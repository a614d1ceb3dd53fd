"""Random numbers that belong to a request alone.

The i-th draw of a request is a function of its key and i: no state to carry, so neither neighbours, nor its row, nor a
preemption, nor a token that is computed twice can change it; and a batch draws in a few vector operations. The function
is SplitMix64 (Steele, Lea & Flood 2014), a counter passed through a mixing function, started at a mixed key.
"""

from __future__ import annotations

import secrets

import numpy as np
from numpy.typing import NDArray

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MASK = (1 << 64) - 1


def fresh_key() -> np.uint64:
    """A key from the system's entropy."""
    return np.uint64(secrets.randbits(64))


def seeded_key(seed: int, stream: int | None = None) -> np.uint64:
    """The key of a seed; with ``stream``, of one of its independent streams."""
    key = _mix(np.array([seed & _MASK], np.uint64))
    if stream is not None:
        key = _mix(key ^ _mix(np.array([(stream + 1) & _MASK], np.uint64) * _GAMMA))
    return np.uint64(key[0])


def uniforms(keys: NDArray[np.uint64], counters: NDArray[np.int64]) -> NDArray[np.float64]:
    """Numbers in [0, 1), 53 bits each.

    Args:
        keys: [S].
        counters: [S], the index of each draw.
    """
    return uniforms_at(streams(keys, np.zeros(len(keys), np.int64)), counters)


def streams(keys: NDArray[np.uint64], begins: NDArray[np.int64]) -> NDArray[np.uint64]:
    """[S] what ``uniforms_at`` needs of keys; who draws for the same ones step after step keeps it.

    Args:
        keys: [S].
        begins: [S] the position at which each draws first.
    """
    return _mix(keys) + (np.uint64(1) - begins.view(np.uint64)) * _GAMMA


def uniforms_at(starts: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """[S] as ``uniforms``: ``starts`` are ``streams``, and the draw at position p is the (p − begin)-th."""
    bits = _mix(starts + positions.view(np.uint64) * _GAMMA)
    numbers: NDArray[np.float64] = np.multiply(bits >> np.uint64(11), 2.0**-53)
    return numbers


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
