"""Trace formats: what is read is what stands there; what is wrong is named with file and line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from foliolm.core.errors import ConfigError
from foliolm.simulate.workload.item import NS, as_request
from foliolm.simulate.workload.traces import Trace

SHARED = Path(__file__).parents[2] / ".." / "shared"


def lines(path, *rows):
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    return path


def items(path, format, **more):
    return list(Trace(path, format, **more).items())


def test_azure(tmp_path):
    path = lines(
        tmp_path / "a.csv",
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        "2023-11-16 23:59:59.9799600,4808,10",
        "2023-11-17 00:00:00.4799600,110,0",
    )
    one, two = items(path, "azure")
    assert (one.time_ns, one.num_prompt, one.num_output) == (0, 4808, 10)
    assert two.time_ns == pytest.approx(0.5 * NS, abs=200)
    assert two.num_output == 1
    assert Trace(path, "azure").total == 2


def test_burstgpt_leaves_out_what_failed(tmp_path):
    head = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type"
    path = lines(
        tmp_path / "b.csv", head, "5,1,0.2,ChatGPT,472,18,490,API", "8,,0,GPT-4,50,0,50,API", "9,,1,GPT-4,10,7,17,API"
    )
    assert [(i.time_ns / NS, i.num_prompt, i.num_output) for i in items(path, "burstgpt")] == [(0, 472, 18), (4, 10, 7)]


def test_mooncake_hashes_are_shared_prefixes(tmp_path):
    path = lines(
        tmp_path / "m.jsonl",
        {"timestamp": 1000, "input_length": 1200, "output_length": 5, "hash_ids": [7, 8, 9]},
        {"timestamp": 3000, "input_length": 1100, "output_length": 5, "hash_ids": [7, 8, 10]},
    )
    one, two = items(path, "mooncake", time_scale=0.5)
    assert two.time_ns == 1 * NS
    a, b = as_request(one, 1).prompt_token_ids, as_request(two, 2).prompt_token_ids
    assert (len(a), len(b)) == (1200, 1100)
    assert a[:1024] == b[:1024]
    assert a[1024] != b[1024]


def test_bailian_and_our_own(tmp_path):
    row = {"chat_id": 159, "parent_chat_id": 55, "timestamp": 61.114, "input_length": 21, "output_length": 3}
    path = lines(tmp_path / "q.jsonl", {**row, "type": "text", "turn": 2, "hash_ids": [4, 5]})
    (item,) = items(path, "bailian")
    assert (item.turn, item.content) == (1, ((4, 16), (5, 16)))
    path = lines(
        tmp_path / "o.jsonl",
        {"time_s": 0.25, "input_tokens": 40, "output_tokens": 2},
        {"time_s": 0.75, "input_tokens": 40, "output_tokens": 2, "hash_ids": [1, 2], "block_size": 8},
    )
    one, two = items(path, "jsonl")
    assert (one.content, two.content, two.time_ns) == ((), ((1, 8), (2, 8)), NS // 2)


def test_servegen_draws_by_window(tmp_path):
    lines(tmp_path / "c-trace.csv", "0,0,0,,0,0", "600,2.0,1.0,Gamma,1.0,0.5", "1200,0.5,2,Weibull,0.5,1")
    spread = {"input_tokens": "{100: 0.25, 300: 0.75}", "output_tokens": "{10: 1.0}"}
    empty = {"input_tokens": "{}", "output_tokens": "{}"}
    (tmp_path / "c-dataset.json").write_text(json.dumps({"0": empty, "600": spread}))
    found = items(tmp_path, "servegen", seed=4)
    early = [item for item in found if item.time_ns < 600 * NS - 1]
    assert len(early) == pytest.approx(1200, rel=0.1)
    assert len(found) - len(early) == pytest.approx(300, rel=0.35)
    assert sum(item.num_prompt == 300 for item in found) / len(found) == pytest.approx(0.75, abs=0.05)
    assert items(tmp_path, "servegen", seed=4) == found
    assert items(tmp_path, "servegen", seed=5) != found


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([{}, "{"], "line 2"),
        ([{"input_tokens": 0}], "input_tokens is 0"),
        ([{"output_tokens": None}], "'output_tokens' is missing"),
        ([{"time_s": "x"}], "time_s is 'x'"),
        ([{"hash_ids": ["a"], "block_size": 4}], "hash_ids"),
        ([{"time_s": 2}, {"time_s": 1}], "goes back"),
        ([""], "no request"),
    ],
)
def test_a_wrong_row_is_named(tmp_path, rows, said):
    whole = [{"time_s": 1, "input_tokens": 5, "output_tokens": 5, **r} if isinstance(r, dict) else r for r in rows]
    path = lines(tmp_path / "t.jsonl", *whole)
    with pytest.raises(ConfigError, match=said):
        items(path, "jsonl")


def test_a_wrong_format_or_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="--format is 'csv'"):
        Trace(tmp_path, "csv")
    with pytest.raises(ConfigError, match="no such file"):
        Trace(tmp_path / "none", "azure")


@pytest.mark.parametrize(
    ("path", "format", "count", "prompt_tokens"),
    [
        ("traces/azure2023/AzureLLMInferenceTrace_conv.csv", "azure", 19366, 22361870),
        ("traces/mooncake_fast25/synthetic_trace.jsonl", "mooncake", 3993, None),
        ("measured/vllm_runs/RTXPRO6000/Llama-3.1-8B", "vllm-run", 300, 257239),
    ],
)
def test_public_traces(path, format, count, prompt_tokens):
    if not (SHARED / path).exists():
        pytest.skip("the shared traces are not here")
    found = items(SHARED / path, format)
    assert len(found) == count
    if prompt_tokens is not None:
        assert sum(item.num_prompt for item in found) == prompt_tokens
