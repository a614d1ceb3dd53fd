"""Every field of a request does what it says, or is refused; a real model."""

import json

import pytest

from foliolm.api.refused import REFUSED

HI = [{"role": "user", "content": "Hi"}]
CAT = {"prompt": "the cat sat", "temperature": 0}


@pytest.fixture
def post(real_server):
    def post(path, **body):
        answer = real_server.http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    return post


@pytest.fixture
def complete(post):
    return lambda **fields: post("/v1/completions", **{"max_tokens": 6, **CAT, **fields})


@pytest.fixture
def chat(post):
    return lambda **fields: post(
        "/v1/chat/completions", **{"messages": HI, "max_tokens": 2, "temperature": 0, **fields}
    )


def events(real_server, path, **body):
    with real_server.http.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_null_is_absent_for_every_field(chat, complete):
    from foliolm.api.protocol import ChatBody, CompletionBody

    nulls = dict.fromkeys({*ChatBody.model_fields, *REFUSED} - {"messages", "max_tokens", "temperature"})
    assert chat(**nulls)["choices"] == chat()["choices"]
    nulls = dict.fromkeys({*CompletionBody.model_fields, *REFUSED} - {"prompt", "max_tokens", "temperature"})
    assert complete(**nulls)["choices"] == complete()["choices"]


def test_values_that_ask_for_nothing_are_accepted(complete):
    neutral = {name: values[0] for name, (_, values) in REFUSED.items() if values and name != "echo"}
    assert len(neutral) >= 10
    assert complete(**neutral)["choices"] == complete()["choices"]


def test_labels_are_accepted(chat):
    labels = {"user": "u", "safety_identifier": "s", "prompt_cache_key": "k", "metadata": {"a": "b"}}
    assert chat(**labels, request_id="mine-1")["id"] == "chatcmpl-mine-1"


def test_biased_allowed_and_bad_tokens(complete, post):
    plain = complete()["choices"][0]["text"]
    (yes,) = post("/tokenize", prompt=" yes")["tokens"]
    assert complete(logit_bias={str(yes): 100}, max_tokens=3)["choices"][0]["text"] == " yes yes yes"
    assert complete(allowed_token_ids=[yes], max_tokens=3)["choices"][0]["text"] == " yes yes yes"
    word = plain.split()[0]
    assert word not in complete(bad_words=[word])["choices"][0]["text"].split()


def test_end_tokens_count_and_do_not_show(chat):
    whole = chat(max_tokens=60, messages=[{"role": "user", "content": "Say only: yes"}], return_token_ids=True)
    choice = whole["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == choice["token_ids"][-1] == 2
    assert whole["usage"]["completion_tokens"] == len(choice["token_ids"])
    assert "<|im_end|>" not in choice["message"]["content"]
    assert whole["usage"]["prompt_tokens"] == len(whole["prompt_token_ids"])


def test_scoring_a_text(complete):
    whole = complete(max_tokens=0, echo=True, logprobs=1)
    choice, usage = whole["choices"][0], whole["usage"]
    logprobs = choice["logprobs"]
    assert choice["text"] == "the cat sat"
    assert len(logprobs["tokens"]) == usage["prompt_tokens"] == usage["total_tokens"]
    assert usage["completion_tokens"] == 0
    assert choice["finish_reason"] == "length"
    # The same numbers, whether the text is a prompt or was generated.
    more = complete(max_tokens=4, echo=True, logprobs=2)["choices"][0]
    assert more["text"].startswith("the cat sat ")
    again = complete(prompt=more["text"], max_tokens=0, echo=True, logprobs=2)["choices"][0]["logprobs"]
    assert again["tokens"] == more["logprobs"]["tokens"]
    assert again["token_logprobs"][1:] == pytest.approx(more["logprobs"]["token_logprobs"][1:], abs=1e-3)


def test_echo_in_a_stream_comes_first_and_once(real_server, complete):
    whole = complete(echo=True, logprobs=1, n=2, temperature=1.0, seed=3)
    parts = events(
        real_server, "/v1/completions", **{**CAT, "temperature": 1.0}, max_tokens=6, echo=True, logprobs=1, n=2, seed=3
    )
    for index in (0, 1):
        mine = [chunk["choices"][0] for chunk in parts if chunk["choices"][0]["index"] == index]
        assert mine[0]["text"].startswith("the cat sat")
        assert "".join(part["text"] for part in mine) == whole["choices"][index]["text"]
        for name in ("tokens", "text_offset"):
            joined = [value for part in mine for value in part["logprobs"][name]]
            assert joined == whole["choices"][index]["logprobs"][name]


def test_prompt_logprobs_are_the_same_in_chunks_and_beside_a_cache(complete, chat, post):
    ids = post("/tokenize", prompt="a long prompt about nothing in particular, " * 30)["tokens"][:300]
    fields = {"prompt": ids, "max_tokens": 1, "prompt_logprobs": 2}
    first, again = (complete(**fields)["choices"][0]["prompt_logprobs"] for _ in range(2))
    assert len(first) == len(ids), "more than two steps of 128 tokens"
    assert first[0] is None
    for entry, token in zip(first[1:], ids[1:], strict=True):
        assert str(token) in entry, "the prompt's own token is always there"
        assert 2 <= len(entry) <= 3
        assert all(value["logprob"] <= 0 for value in entry.values())
    for one, other in zip(first[1:], again[1:], strict=True):
        shared = one.keys() & other.keys()
        assert [one[key]["logprob"] for key in shared] == pytest.approx(
            [other[key]["logprob"] for key in shared], abs=1e-3
        )
    assert len(chat(prompt_logprobs=0)["prompt_logprobs"]) == chat()["usage"]["prompt_tokens"]


def test_usage_knows_of_cached_tokens_however_it_ends(complete, real_server):
    prompt = "once there was a kettle that could sing, and " * 6
    complete(prompt=prompt, max_tokens=1)
    ends = {
        "length": {"max_tokens": 2},
        "a stop string": {"stop": ["e", "a", "o", "i", " "], "max_tokens": 20},
        "one token": {"max_tokens": 1},
    }
    cached = {
        name: complete(prompt=prompt, **fields)["usage"]["prompt_tokens_details"]["cached_tokens"]
        for name, fields in ends.items()
    }
    assert len(set(cached.values())) == 1, cached
    streamed = events(
        real_server, "/v1/completions", prompt=prompt, max_tokens=2, stream_options={"include_usage": True}
    )
    assert streamed[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == cached["length"]


def test_running_usage(real_server):
    options = {"include_usage": True, "continuous_usage_stats": True}
    parts = events(real_server, "/v1/completions", **CAT, max_tokens=4, stream_options=options)
    counts = [part["usage"]["completion_tokens"] for part in parts]
    assert counts == sorted(counts)
    assert counts[-1] == 4


def test_messages_in_all_their_forms(chat, post):
    def ids(*messages):
        return post("/tokenize", messages=list(messages))["tokens"]

    whole = ids({"role": "user", "content": "one two"})
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": " two"}]
    assert ids({"role": "user", "content": parts}) == whole
    assert ids({"role": "user", "content": "one two", "name": "Ada"}) == whole, "this template writes no names"
    system = ids({"role": "system", "content": "Be brief."}, HI[0])
    assert ids({"role": "developer", "content": "Be brief."}, HI[0]) == system, "this template knows no developers"
    back = {
        "role": "assistant",
        "content": "Hello",
        "refusal": None,
        "audio": None,
        "annotations": [],
        "tool_calls": None,
    }
    assert chat(messages=[*HI, back, *HI])["choices"]


def test_tokens_there_and_back(post, complete):
    text = "naïve 漢字 😀 <|im_start|>"
    made = post("/tokenize", prompt=text, return_token_strs=True)
    assert made["count"] == len(made["tokens"]) == len(made["token_strs"])
    assert made["max_model_len"] == 512
    assert made["token_strs"][-1] == "<|im_start|>"
    assert post("/detokenize", tokens=made["tokens"])["prompt"] == text
    assert complete(prompt=text, max_tokens=1)["usage"]["prompt_tokens"] == made["count"]
    assert post("/tokenize", prompt="", model="smollm2-135m")["tokens"] == []


def test_models_one_by_one(real_server):
    listed = real_server.http.get("/v1/models").json()["data"]
    (only,) = listed
    assert only["max_model_len"] == 512
    assert real_server.http.get(f"/v1/models/{only['id']}").json() == only
    assert real_server.http.get("/version").json()["version"]
