"""Kind c: prefix caching that found nothing, found another's, or changed what was said."""

from __future__ import annotations

import pytest

from foliolm.core.request import EngineRequest
from foliolm.core.sampling import SamplingParams
from support.script import Driver, make_scheduler

BLOCK = 16


def served(prompts, block_size=BLOCK, adapters=None):
    """Cached tokens of prompts served one after another, checked against the memory's content."""
    scheduler = make_scheduler(
        enable_prefix_caching=True,
        block_size=block_size,
        num_blocks=600,
        max_model_len=2400,
        max_num_batched_tokens=512,
    )
    driver = Driver(scheduler)
    sources: dict[int, EngineRequest] = {}
    driver.watch_content(sources)
    cached = []
    for rid, prompt in enumerate(prompts, 1):
        adapter = adapters[rid - 1] if adapters else None
        sources[rid] = EngineRequest(rid, tuple(prompt), SamplingParams(max_tokens=2), arrival_ns=rid, adapter=adapter)
        scheduler.add(sources[rid], driver.now)
        driver.run()
        cached.append(driver.finished[rid].stamps.num_cached_tokens)
    assert scheduler.stats().prefix_hits == sum(cached)
    return cached


@pytest.mark.parametrize(("block_size", "found"), [(16, 240), (32, 224), (784, 0)])
def test_c1_what_is_shared_is_found_in_whole_blocks(block_size, found):
    shared = [7 + i for i in range(240)]
    prompts = [[*shared, *(1000 * number + i for i in range(40))] for number in range(1, 11)]
    assert served(prompts, block_size) == [0] + [found] * 9


def test_c3_base_and_adapters_have_chains_of_their_own():
    prompt = list(range(100, 164))
    assert served([prompt] * 6, adapters=[None, 1, 2, None, 1, 2]) == [0, 0, 0, 48, 48, 48]


def test_c8_a_change_hides_all_that_stands_behind_it():
    for place, found in ((40, 32), (1990, 1984)):
        prompts = []
        for number in range(3):
            prompt = list(range(5000, 7000))
            prompt[place] = number
            prompts.append(prompt)
        assert served(prompts) == [0, found, found]


def complete(server, prompt, **options):
    body = {"model": "smollm2-135m", "prompt": prompt, "temperature": 0, **options}
    answer = server.http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def cached(answer):
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_c5_prompt_logprobs_are_the_same_beside_a_cache(real_server):
    for length in (15, 16, 17, 31, 32, 33):
        prompt = [9000 + 3 * length + i for i in range(length)]
        first, again = (
            complete(real_server, prompt, max_tokens=1, echo=True, logprobs=1)["choices"][0]["logprobs"][
                "token_logprobs"
            ]
            for _ in range(2)
        )
        assert len(first) == length + 1
        assert first[0] is again[0] is None
        assert first[1:] == pytest.approx(again[1:], abs=1e-4)


def test_c6_a_hit_says_what_a_miss_says(real_server):
    prompt = [11000 + 17 * i for i in range(100)]
    answers = [complete(real_server, prompt, max_tokens=24) for _ in range(3)]
    answers.append(complete(real_server, prompt, max_tokens=24, cache_salt="c6: nothing cached"))
    assert len({answer["choices"][0]["text"] for answer in answers}) == 1
    assert [cached(answer) for answer in answers] == [0, 96, 96, 0]


def test_c10_a_prompt_that_ends_with_a_block_is_answered_hot_as_cold(real_server):
    for length, found in ((31, 16), (32, 16), (33, 32), (48, 32)):
        prompt = [13000 + 101 * length + i for i in range(length)]
        cold, hot = (complete(real_server, prompt, max_tokens=4) for _ in range(2))
        assert [cached(cold), cached(hot)] == [0, found]
        assert cold["choices"][0]["text"] == hot["choices"][0]["text"]
