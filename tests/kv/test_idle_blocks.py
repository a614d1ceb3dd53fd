"""The queue of idle blocks against a plain list, and block keys against tokens."""

from __future__ import annotations

import random

import pytest

from foliolm.kv import idle
from foliolm.kv.block_keys import BlockKeys, tokens_of
from foliolm.kv.idle import IdleBlocks


@pytest.mark.parametrize("seed", range(8))
def test_idle_blocks_leave_in_the_order_in_which_they_came(seed, monkeypatch):
    monkeypatch.setattr(idle, "SLACK", 16)
    rng = random.Random(seed)
    queue, twin, outside = IdleBlocks(), [], list(range(200))
    for _ in range(400):
        rng.shuffle(outside)
        run = [outside.pop() for _ in range(min(len(outside), rng.randrange(1, 9)))]
        if run:
            queue.add(list(run))
            twin += reversed(run)
        for _ in range(rng.randrange(len(twin) + 1) if rng.random() < 0.5 else 0):
            block = twin.pop(0 if rng.random() < 0.5 else rng.randrange(len(twin)))
            queue.remove(block)
            outside.append(block)
        assert list(queue) == twin
        assert len(queue) == len(twin)
        most = rng.randrange(1, 12)
        assert queue.oldest(most) == twin[:most]
        assert all((block in queue) == (block in twin) for block in range(200))
        assert queue._queued <= 2 * len(twin) + 16 + 9
    with pytest.raises(KeyError):
        queue.remove(999)


def test_keys_are_equal_where_tokens_are():
    tokens = [5, 1 << 40, 7, 8, 9, 1 << 70, 3, 4, 5, 6]
    keys = BlockKeys(tokens, 4)
    assert len(keys) == 10
    assert [tokens_of(key) for key in keys.first(2)] == [tokens[:4], tokens[4:8]]
    assert BlockKeys(tokens[:8], 4).first(2) == keys.first(2)
    assert BlockKeys([5, 1 << 40, 7, 8], 4).first(1) == keys.first(2)[:1]  # whether or not another block has large ones
    tokens += [7, 8]
    assert tokens_of(keys.first(3)[2]) == [5, 6, 7, 8]
    assert len({*keys.first(3)}) == 3
