"""The prefix cache as clients see it: cached tokens, salts, resets, metrics."""

import httpx
import openai
import pytest

# Of this file alone, so that no other test has put it into the shared server's cache.
PROMPT = [3000 + 7 * i for i in range(100)]


@pytest.fixture(scope="module")
def client(real_server):
    return openai.OpenAI(base_url=f"{real_server.url}/v1", api_key="none", max_retries=0, timeout=120)


def cached(client, prompt=PROMPT, **extra):
    answer = client.completions.create(
        model="smollm2-135m", prompt=prompt, max_tokens=2, temperature=0, extra_body=extra or None
    )
    assert answer.usage.prompt_tokens == len(prompt)
    return answer.usage.prompt_tokens_details.cached_tokens


def test_a_salt_keeps_prefixes_apart_and_a_reset_forgets_them(client, real_server):
    hits = real_server.gauge("prefix_cache_hits_total")
    assert cached(client) == 0
    assert cached(client) == 96
    assert cached(client, cache_salt="one") == 0
    assert cached(client, cache_salt="one") == 96
    assert cached(client, cache_salt="two") == 0
    assert real_server.gauge("prefix_cache_hits_total") == hits + 2 * 96

    answer = real_server.http.post("/reset_prefix_cache")
    assert answer.status_code == 200
    assert answer.json()["blocks"] >= 3 * 6
    assert cached(client) == 0
    assert cached(client, cache_salt="one") == 0
    # A short prompt fills no block, so nothing of it can be found.
    assert cached(client, PROMPT[:15]) == cached(client, PROMPT[:15]) == 0


def test_an_empty_salt_is_refused(client):
    with pytest.raises(openai.BadRequestError, match="cache_salt"):
        cached(client, cache_salt="")


def test_a_reset_is_a_post(real_server):
    assert httpx.get(f"{real_server.url}/reset_prefix_cache").status_code == 405
