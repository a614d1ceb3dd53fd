"""Prefix caches replayed over traces, from the product's own prefix index."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foliolm.core.errors import ConfigError
from foliolm.kv.prefix import PrefixIndex
from foliolm.simulate.prefix_replay import replay_prefixes
from foliolm.simulate.prefix_traces import PrefixChain, read_prefix_chains


def known_answers(shared):
    return json.loads((shared / "golden" / "serving_numbers.json").read_text())["prefix_cache_replay"]


def mooncake(shared, name):
    return list(read_prefix_chains(shared / "traces" / "mooncake_fast25" / f"{name}_trace.jsonl", "mooncake"))


def test_the_conversation_trace_comes_out_exactly(shared):
    known = known_answers(shared)["mooncake_conversation"]
    chains = mooncake(shared, "conversation")
    said = replay_prefixes(chains, 512).to_json()
    assert {key: said[key] for key in known["unlimited"]} == known["unlimited"]
    for room, ratio in known["lru_blocks"].items():
        assert replay_prefixes(chains, 512, int(room)).to_json()["block_hit_ratio"] == ratio


def test_the_synthetic_trace_comes_out_exactly(shared):
    known = known_answers(shared)["mooncake_synthetic"]["unlimited"]
    said = replay_prefixes(mooncake(shared, "synthetic"), 512).to_json()
    assert {key: said[key] for key in known} == known


def test_a_measured_run_comes_out_exactly_from_the_command_line(shared):
    for run, known in known_answers(shared)["vllm_runs_prefix_blocks16"].items():
        folder = shared / "measured" / "vllm_runs" / run
        command = [sys.executable, "-m", "foliolm", "simulate", "prefix", "--format", "vllm-run", "--json"]
        ended = subprocess.run([*command, "--trace", str(folder)], capture_output=True, text=True, check=True)
        (line,) = ended.stdout.splitlines()
        said = json.loads(line)
        assert {key: said[key] for key in known} == known
        assert {"token_hit_ratio", "block_hit_ratio", "distinct_blocks"} < said.keys()


CHAINS = [PrefixChain(40, (1, 2, 3)), PrefixChain(33, (1, 2, 4)), PrefixChain(16, (1,))]


def test_hits_by_hand():
    # Two blocks of the second prompt and the one of the third are known; short last blocks count as blocks.
    said = replay_prefixes(CHAINS, 16)
    assert (said.hit_tokens, said.prompt_tokens, said.hit_blocks, said.prompt_blocks) == (48, 89, 3, 7)
    # With room for one block, the head of the prompt before is what is left of it.
    assert replay_prefixes(CHAINS, 16, 1).hit_blocks == 2


@pytest.mark.parametrize("method", ["match", "publish", "forget"])
def test_it_is_the_product_s_own_index_that_is_asked(method, monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("the index is broken")

    monkeypatch.setattr(PrefixIndex, method, broken)
    with pytest.raises(RuntimeError, match="the index is broken"):
        replay_prefixes(CHAINS, 16, 2)


def naive(chains, room):
    """The rules of the replay over one list of names; a chain's names are paths, so that equal ids need not be."""
    cache: OrderedDict[tuple[int, ...], None] = OrderedDict()
    hits = 0
    for chain in chains:
        paths = [chain.hash_ids[: end + 1] for end in range(len(chain.hash_ids))]
        for path in paths:
            if path not in cache:
                break
            hits += 1
        for path in reversed(paths):
            cache[path] = None
            cache.move_to_end(path)
        while room is not None and len(cache) > room:
            cache.popitem(last=False)
    return hits


@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), min_size=1, max_size=30),
    st.one_of(st.none(), st.integers(1, 12)),
)
def test_against_a_naive_cache(prompts, room):
    chains = [PrefixChain(16 * len(ids), tuple(ids)) for ids in prompts]
    assert replay_prefixes(chains, 16, room).hit_blocks == naive(chains, room)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 2: not JSON"),
        ("[]", "line 2: not a JSON object"),
        ('{"input_length": 0, "hash_ids": []}', "input_length is 0"),
        ('{"input_length": 5, "hash_ids": "x"}', "hash_ids must be a list"),
        ('{"input_length": 513, "hash_ids": [1, 2, 3]}', "3 hash_ids for input_length 513"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, line, words):
    path = tmp_path / "trace.jsonl"
    path.write_text('{"input_length": 512, "hash_ids": [1]}\n' + line + "\n")
    with pytest.raises(ConfigError, match=words.replace("[", r"\[")):
        list(read_prefix_chains(path, "mooncake"))


def test_a_missing_file_and_an_unknown_format_are_named(tmp_path):
    with pytest.raises(ConfigError, match="cannot read"):
        list(read_prefix_chains(tmp_path / "none.jsonl", "mooncake"))
    with pytest.raises(ConfigError, match="mooncake, vllm-run"):
        list(read_prefix_chains(tmp_path, "azure"))
