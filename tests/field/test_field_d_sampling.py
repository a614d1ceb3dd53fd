"""Kind d: what sampling promises. A request's draws are its own; logprobs are the model's; n is n."""

import math

import numpy as np
import pytest
import torch

from foliolm.executor.torch.sampler import token_logprobs
from support.tiny_models import ours, reference
from support.torch_engine import generate, request

PROMPT = [5, 9, 17, 3, 22, 8]
OTHERS = [[7 * i + 1, 3, 5 + i] for i in range(7)]


@pytest.fixture(scope="module")
def model():
    return ours(reference("llama"), "llama")


def seeded(rid):
    return request(rid, PROMPT, max_tokens=16, temperature=0.8, seed=42)


def other(rid, seed=None):
    return request(rid, OTHERS[rid % 7], max_tokens=24, temperature=0.8, seed=seed)


def test_d1_a_seeded_request_draws_alone_whatever_shares_its_batch(model):
    def tokens(requests, rid, **setting):
        return generate(model, requests, **setting).by_id[rid].tokens

    alone = tokens([seeded(1)], 1)
    assert tokens([seeded(1), other(2)], 1) == alone
    assert tokens([seeded(1), other(2, seed=7)], 1) == alone
    assert tokens([other(rid) for rid in range(1, 5)] + [seeded(5)] + [other(rid) for rid in range(6, 9)], 5) == alone
    crowded = generate(model, [other(1, 3), other(2, 4), seeded(3)], num_blocks=7, block_size=8, max_model_len=48)
    assert crowded.preemptions > 0
    assert crowded.by_id[3].tokens == alone


def test_d3_no_seed_means_fresh_entropy_and_an_engines_seed_is_opted_into(model):
    def texts(seed):
        calls = [request(rid, PROMPT, max_tokens=32, temperature=1.0) for rid in range(1, 6)]
        return [tuple(got.tokens) for got in generate(model, calls, seed=seed).by_id.values()]

    assert len({*texts(None), *texts(None)}) >= 9
    assert texts(1) == texts(1)
    assert len(set(texts(1))) == 5, "one engine seed, a stream of its own for each request"


def test_d6_logprobs_are_of_the_raw_logits():
    (entry,) = token_logprobs(torch.tensor([[2.0, 1.0, 0.0]]), np.array([1]), 3)
    assert [value for _, value in entry.top] == pytest.approx([-0.40761, -1.40761, -2.40761], rel=1e-4)
    assert entry.logprob == pytest.approx(-1.40761, rel=1e-4)


def test_d6_they_do_not_change_with_top_p_and_hold_the_chosen_token(real_server):
    body = {
        "messages": [{"role": "user", "content": "Name three fruits."}],
        "logprobs": True,
        "top_logprobs": 3,
        "max_tokens": 3,
        "temperature": 0,
    }

    def entries(**fields):
        answer = real_server.http.post("/v1/chat/completions", json={**body, **fields})
        assert "NaN" not in answer.text
        assert "Infinity" not in answer.text
        return answer.json()["choices"][0]["logprobs"]["content"]

    plain, cut = entries(), entries(top_p=0.5, top_k=2)
    assert len(plain) == len(cut) == 3
    for one, same in zip(plain, cut, strict=True):
        assert one["token"] == same["token"]
        assert one["logprob"] == pytest.approx(same["logprob"], abs=1e-3)
        values = [top["logprob"] for top in same["top_logprobs"]]
        assert len(values) == 3
        assert all(math.isfinite(value) and value <= 0 for value in values)
        assert one["bytes"] == list(one["token"].encode())
    unlikely = entries(logit_bias={"100": 100})
    assert all(math.isfinite(entry["logprob"]) and entry["logprob"] < 0 for entry in unlikely), "beside the top ones"


def test_d7_two_choices_at_temperature_zero_are_equal(real_server):
    body = {"messages": [{"role": "user", "content": "Name three fruits."}], "n": 2, "temperature": 0, "max_tokens": 6}
    answer = real_server.http.post("/v1/chat/completions", json=body).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    first, second = (choice["message"]["content"] for choice in answer["choices"])
    assert first == second
    alone = real_server.http.post("/v1/chat/completions", json={**body, "n": 1}).json()
    assert answer["usage"]["prompt_tokens"] == alone["usage"]["prompt_tokens"]
    assert answer["usage"]["completion_tokens"] == 2 * alone["usage"]["completion_tokens"]
    refused = real_server.http.post("/v1/completions", json={"prompt": "a", "n": 2, "best_of": 1})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "best_of"
