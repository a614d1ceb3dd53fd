"""A live server whose pool is too small: who gives way and why, what the host keeps, and that no answer changes."""

import json
import random
import subprocess
import sys

import openai
import pytest
from server_process import ServerProcess

MODEL = "smollm2-135m"
# 8 blocks of 16 tokens.
POOL = ("--num-gpu-blocks-override", "8", "--max-model-len", "128", "--max-num-batched-tokens", "64")
LEAN = ("--dtype", "float32", "--max-num-seqs", "6", "--shutdown-timeout", "5", "--swap-space", "0.125")
SESSIONS, TURNS = 3, 2


def explain(*arguments):
    said = subprocess.run([sys.executable, "-m", "foliolm", "explain", *arguments], capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    return said.stdout


def connect(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=600)


def ask(client, prompt, salt=None, tokens=4):
    """The answer, and how many of its prompt's tokens were cached."""
    body = {"ignore_eos": True, **({} if salt is None else {"cache_salt": salt})}
    answer = client.completions.create(model=MODEL, prompt=prompt, max_tokens=tokens, temperature=0, extra_body=body)
    return answer.choices[0].text, answer.usage.prompt_tokens_details.cached_tokens


@pytest.fixture(scope="module")
def pressed(tmp_path_factory):
    books = tmp_path_factory.mktemp("books")
    running = ServerProcess("-m", "foliolm", "serve", "--port", "0", *POOL, *LEAN, "--ledger", str(books))
    yield running, books
    running.stop()


def test_evicted_prefixes_come_back_and_no_answer_changes(pressed):
    """Sessions take turns: by the next turn of one the others have pushed its blocks out."""
    server, _ = pressed
    assert any("host pool: " in line for line in server.lines)
    client, rng = connect(server), random.Random("sessions")
    histories = [[rng.randrange(1000, 40_000) for _ in range(69)] for _ in range(SESSIONS)]
    said = []
    for turn in range(TURNS):
        for number, history in enumerate(histories):
            text, cached = ask(client, history)
            said.append((turn, text, cached))
            # With a salt that nobody else has, all of it is computed.
            assert ask(client, history, f"{turn} {number}") == (text, 0)
            history += [rng.randrange(1000, 40_000) for _ in range(10)]
    assert [cached for turn, _, cached in said if turn] == [64] * SESSIONS
    assert server.gauge("prefix_cache_host_hits_total") >= SESSIONS * 48
    assert server.gauge("prefix_cache_host_hits_total") == 16 * server.gauge("kv_blocks_loaded_total")
    (report,) = server.http.get("/debug/kv").json()["engines"]
    hits = report["hits"]["sources"]
    assert hits["host"]["hit_tokens"] == server.gauge("prefix_cache_host_hits_total")
    assert hits["prefix_cache"]["hit_tokens"] + hits["host"]["hit_tokens"] == sum(cached for _, _, cached in said)
    assert report["host"]["cached"] == server.gauge("host_blocks_cached") > 10
    assert report["offloaded_blocks"] == server.gauge("kv_blocks_offloaded_total") > 10


def test_salted_prompts_share_with_their_own_salt_alone(pressed):
    client = connect(pressed[0])
    ours, others = list(range(2000, 2100)), list(range(3000, 3110))
    assert ask(client, ours, "ours")[1] == 0
    assert ask(client, others)[1] == 0  # pushes it to the host
    assert ask(client, ours, "theirs")[1] == 0
    assert ask(client, ours)[1] == 0
    assert ask(client, ours, "ours")[1] == 96


def test_a_search_that_the_pool_cannot_hold_may_be_shorter(pressed):
    """Four hypotheses of 105 tokens take 28 blocks; of 30 they take 8, and so many there are."""
    client = connect(pressed[0])
    options = {"model": MODEL, "prompt": [700, 701, 702, 703, 704], "n": 2, "max_tokens": 100}
    body = {"use_beam_search": True, "best_of": 4, "ignore_eos": True}
    with pytest.raises(openai.BadRequestError, match="28 KV blocks, and the pool has 8") as refused:
        client.completions.create(**options, extra_body=body)
    assert refused.value.code == "kv_pool_exceeded"
    answer = client.completions.create(**options, extra_body={**body, "degrade": True})
    (cut,) = answer.degraded
    assert (cut["field"], cut["asked"], cut["given"]) == ("max_tokens", 100, 25)
    assert "16 KV blocks, and the pool has 8" in cut["reason"]
    assert len(answer.choices) == 2
    assert answer.usage.completion_tokens == 50


def test_filling_the_pool_shows_who_gave_way_and_why(pressed):
    """The requests grow until their blocks do not fit; the books say who gave way for whom, and what each way costs."""
    server, books = pressed
    prompt = [500 + i for i in range(20)]
    answer = connect(server).completions.create(
        model=MODEL, prompt=prompt, n=4, max_tokens=36, temperature=1, seed=3, extra_body={"ignore_eos": True}
    )
    assert [choice.finish_reason for choice in answer.choices] == ["length"] * 4
    assert server.gauge("num_preemptions_total") > 0
    server.assert_all_free()
    assert server.gauge("host_pool_usage_perc") == 0
    assert server.stop() == 0

    said = json.loads(explain(str(books), "--json", "--no-advice"))
    assert said["preemptions"] == len(said["gave_way"]) > 0
    for one in said["gave_way"]:
        assert one["treatment"] in ("swap", "recompute")
        assert one["needed"] > one["available"] >= 0
        assert one["blocker"] != one["request_id"]
        assert one["swap_s"] > 0
        assert one["recompute_s"] >= 0  # nothing, where the prefix cache is likely to give all of it back
        assert (one["swap_s"] <= one["recompute_s"]) == (one["treatment"] == "swap")
    assert said["on_host"]["loaded_blocks"] >= 3 * SESSIONS
    assert said["on_host"]["copy_s"] < said["on_host"]["compute_s"]
    shown = explain(str(books), "--no-advice")
    assert "Who gave way, and how" in shown
    assert "evicted prefixes: " in shown
