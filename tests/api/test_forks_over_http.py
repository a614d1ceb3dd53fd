"""Siblings and beam search as clients see them."""

import openai
import pytest

from support.sure_answer import ANSWER, MESSAGES

STORY = [4000 + 11 * i for i in range(100)]


@pytest.fixture(scope="module")
def client(real_server):
    return openai.OpenAI(base_url=f"{real_server.url}/v1", api_key="none", max_retries=0, timeout=120)


def test_siblings_take_the_prompt_from_the_first_which_computed_it(client, real_server):
    before = real_server.gauge("prompt_forked_tokens_total")
    hits = real_server.gauge("prefix_cache_hits_total")
    answer = client.completions.create(
        model="smollm2-135m", prompt=STORY, n=8, max_tokens=6, temperature=1.0, seed=5, extra_body={"ignore_eos": True}
    )
    assert [choice.index for choice in answer.choices] == list(range(8))
    assert len({choice.text for choice in answer.choices}) > 1
    assert answer.usage.prompt_tokens == 100
    assert answer.usage.completion_tokens == 8 * 6
    # What was computed a moment ago for this very request was not cached.
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    assert real_server.gauge("prefix_cache_hits_total") == hits
    assert real_server.gauge("prompt_forked_tokens_total") == before + 7 * 100
    assert real_server.gauge("kv_blocks_copied_total") >= 7
    real_server.assert_all_free()


def test_beams_come_best_first_and_the_best_is_at_least_as_likely_as_the_greedy_answer(client, real_server):
    def ask(**options):
        return client.completions.create(
            model="smollm2-135m", prompt="The capital of France is", max_tokens=8, logprobs=1, temperature=0, **options
        )

    def score(choice):
        return sum(choice.logprobs.token_logprobs) / len(choice.logprobs.token_logprobs)

    beams = ask(n=3, extra_body={"use_beam_search": True, "best_of": 4})
    scores = [score(choice) for choice in beams.choices]
    assert len(scores) == 3
    assert scores == sorted(scores, reverse=True)
    assert scores[0] >= score(ask().choices[0]) - 1e-3
    assert all(choice.finish_reason in ("stop", "length") for choice in beams.choices)
    assert beams.usage.prompt_tokens == 5
    real_server.assert_all_free()


def test_a_chat_can_be_searched_and_streamed(client):
    options = {"use_beam_search": True, "length_penalty": 0.8, "early_stopping": True}
    whole = client.chat.completions.create(
        model="smollm2-135m", messages=MESSAGES, n=2, max_tokens=16, extra_body=options
    )
    assert whole.choices[0].message.content == ANSWER
    texts = ["", ""]
    for chunk in client.chat.completions.create(
        model="smollm2-135m", messages=MESSAGES, n=2, max_tokens=16, extra_body=options, stream=True
    ):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]


def test_a_client_that_leaves_ends_the_whole_search(real_server):
    body = {
        "model": "smollm2-135m",
        "prompt": "Once upon a time",
        "max_tokens": 400,
        "ignore_eos": True,
        "n": 4,
        "use_beam_search": True,
        "stream": True,
        "request_id": "search-to-end",
    }
    with real_server.http.stream("POST", "/v1/completions", json=body):
        real_server.until("num_requests_running", 4)
    real_server.assert_all_free()


def test_a_search_that_can_never_fit_is_refused_with_the_sum(client):
    with pytest.raises(openai.BadRequestError, match="KV blocks"):
        client.completions.create(
            model="smollm2-135m", prompt="x", max_tokens=500, n=16, extra_body={"use_beam_search": True}
        )
