"""The official client against a real server with the embedded model."""

import math
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from support.sure_answer import ANSWER, ANSWER_TOKENS, MESSAGES, PROMPT_TOKENS, TOTAL_TOKENS


@pytest.fixture(scope="module")
def client(real_server):
    return openai.OpenAI(base_url=f"{real_server.url}/v1", api_key="none", max_retries=0, timeout=120)


@pytest.fixture(scope="module")
def model(client):
    (only,) = client.models.list().data
    return only.id


@pytest.fixture(scope="module")
def capital(client, model):
    return client.chat.completions.create(model=model, messages=MESSAGES, temperature=0, max_completion_tokens=32)


def test_it_knows_the_capital_of_japan(capital, model):
    assert model == "smollm2-135m"
    assert capital.choices[0].message.content == ANSWER
    assert capital.choices[0].message.role == "assistant"
    assert capital.choices[0].finish_reason == "stop"
    assert capital.usage.prompt_tokens == PROMPT_TOKENS
    assert capital.usage.completion_tokens == ANSWER_TOKENS
    assert capital.usage.total_tokens == TOTAL_TOKENS


def test_a_stream_is_the_plain_answer_in_pieces(client, model, capital):
    chunks = list(
        client.chat.completions.create(
            model=model,
            messages=MESSAGES,
            temperature=0,
            max_completion_tokens=32,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert len({chunk.id for chunk in chunks}) == 1
    assert len({chunk.created for chunk in chunks}) == 1
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    *ordinary, last = chunks
    assert all(chunk.usage is None for chunk in ordinary)
    assert last.choices == []
    # The prompt is the same, so this time the prefix cache may know it.
    details = {"prompt_tokens_details"}
    assert last.usage.model_dump(exclude=details) == capital.usage.model_dump(exclude=details)
    first, *rest = [chunk.choices[0] for chunk in ordinary]
    assert (first.delta.role, first.delta.content) == ("assistant", "")
    assert all(choice.delta.role is None for choice in rest)
    assert "".join(choice.delta.content or "" for choice in rest) == capital.choices[0].message.content
    assert [choice.finish_reason for choice in rest if choice.finish_reason] == ["stop"]
    assert rest[-1].finish_reason == "stop"


def test_without_the_option_there_is_no_usage_chunk(client, model):
    chunks = list(
        client.chat.completions.create(
            model=model, messages=MESSAGES, max_completion_tokens=3, temperature=0, stream=True
        )
    )
    assert all(chunk.choices and chunk.usage is None for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == "length"


def test_many_at_once_get_their_own_answers(client, model):
    def ask(text):
        return client.completions.create(model=model, prompt=text, max_tokens=6, temperature=0).choices[0].text

    prompts = [f"{n}, {n + 1}, {n + 2}," for n in range(1, 17)]
    alone = [ask(prompt) for prompt in prompts[:4]]
    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(ask, prompts))
    assert together[:4] == alone
    assert len(set(together)) > 8, "different prompts, different answers"


def test_n_choices_are_seeded_apart_and_count_the_prompt_once(client, model):
    def draw():
        return client.chat.completions.create(
            model=model, messages=MESSAGES, n=3, seed=11, temperature=1.5, max_completion_tokens=12
        )

    first, again = draw(), draw()
    texts = [choice.message.content for choice in first.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    assert len(set(texts)) > 1
    assert texts == [choice.message.content for choice in again.choices]
    assert first.usage.prompt_tokens == PROMPT_TOKENS
    assert first.usage.completion_tokens <= 36
    greedy = client.chat.completions.create(
        model=model, messages=MESSAGES, n=2, temperature=0, max_completion_tokens=8, logprobs=True
    )
    assert greedy.choices[0].message.content == greedy.choices[1].message.content


def test_no_seed_means_another_answer_each_time(client, model):
    def draw():
        return client.completions.create(model=model, prompt="Once", max_tokens=12, temperature=2.0).choices[0].text

    assert len({draw() for _ in range(4)}) > 1


def test_streamed_choices_keep_their_index(client, model):
    texts = {0: "", 1: ""}
    ends = {}
    for chunk in client.completions.create(
        model=model, prompt="The sea is", n=2, seed=3, max_tokens=10, temperature=1.0, stream=True
    ):
        (choice,) = chunk.choices
        assert choice.index not in ends, "nothing comes after the end"
        texts[choice.index] += choice.text
        if choice.finish_reason:
            ends[choice.index] = choice.finish_reason
    plain = client.completions.create(model=model, prompt="The sea is", n=2, seed=3, max_tokens=10, temperature=1.0)
    assert texts == {choice.index: choice.text for choice in plain.choices}
    assert ends == {choice.index: choice.finish_reason for choice in plain.choices}


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_text_and_the_request(client, model, real_server, stream):
    options = {"model": model, "prompt": "1, 2, 3, 4,", "max_tokens": 100, "temperature": 0, "stop": [" 9,", "zzz"]}
    if stream:
        chunks = list(client.completions.create(**options, stream=True))
        text = "".join(chunk.choices[0].text for chunk in chunks)
        reason, found = chunks[-1].choices[0].finish_reason, chunks[-1].choices[0].stop_reason
    else:
        answer = client.completions.create(**options)
        text, reason, found = answer.choices[0].text, answer.choices[0].finish_reason, answer.choices[0].stop_reason
        assert answer.usage.completion_tokens < 30
    assert text == " 5, 6, 7, 8,"
    assert (reason, found) == ("stop", " 9,")
    real_server.assert_all_free()
    kept = client.completions.create(**options, extra_body={"include_stop_str_in_output": True})
    assert kept.choices[0].text == text + " 9,"


def test_chat_logprobs(client, model):
    answer = client.chat.completions.create(
        model=model, messages=MESSAGES, temperature=0, max_completion_tokens=5, logprobs=True, top_logprobs=3
    )
    entries = answer.choices[0].logprobs.content
    assert len(entries) == answer.usage.completion_tokens == 5
    assert "".join(entry.token for entry in entries) == answer.choices[0].message.content
    for entry in entries:
        assert bytes(entry.bytes).decode() == entry.token
        assert entry.logprob <= 0
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].token == entry.token, "greedy takes the likeliest"
        assert entry.top_logprobs[0].logprob == pytest.approx(entry.logprob, abs=1e-5)
        values = [top.logprob for top in entry.top_logprobs]
        assert values == sorted(values, reverse=True)
        assert sum(math.exp(value) for value in values) <= 1.0001


def test_completion_logprobs_and_offsets(client, model):
    answer = client.completions.create(model=model, prompt="The capital of", temperature=0, max_tokens=6, logprobs=2)
    choice = answer.choices[0]
    logprobs = choice.logprobs
    assert "".join(logprobs.tokens) == choice.text
    assert logprobs.text_offset == [len("".join(logprobs.tokens[:i])) for i in range(6)]
    assert all(len(top) >= 2 for top in logprobs.top_logprobs)
    streamed = list(
        client.completions.create(
            model=model, prompt="The capital of", temperature=0, max_tokens=6, logprobs=2, stream=True
        )
    )
    offsets = [o for chunk in streamed if chunk.choices[0].logprobs for o in chunk.choices[0].logprobs.text_offset]
    assert offsets == logprobs.text_offset


def test_prompts_as_texts_ids_and_lists_of_them(client, model, real_server):
    from foliolm.text.load import load_text
    from foliolm.weights.store import open_model

    tokenizer, _ = load_text(open_model("smollm2-135m"))
    texts = ["The capital of France is", "1, 2, 3,"]
    ids = [tokenizer.encode(text) for text in texts]
    options = {"model": model, "max_tokens": 4, "temperature": 0}
    both = client.completions.create(prompt=texts, **options)
    assert [choice.index for choice in both.choices] == [0, 1]
    assert both.usage.prompt_tokens == sum(map(len, ids))
    assert [c.text for c in client.completions.create(prompt=ids, **options).choices] == [c.text for c in both.choices]
    assert client.completions.create(prompt=ids[0], **options).choices[0].text == both.choices[0].text
    assert client.completions.create(prompt=texts[1], **options).choices[0].text == both.choices[1].text


def test_defaults_and_limits_of_length(client, model):
    short = client.completions.create(model=model, prompt="Once upon a time", temperature=0)
    assert short.usage.completion_tokens == 16, "a plain completion's default"
    long = client.completions.create(
        model=model, prompt=[504] * 500, max_tokens=9999, temperature=0, extra_body={"ignore_eos": True}
    )
    assert long.choices[0].finish_reason == "length"
    assert long.usage.total_tokens == 512, "the context's end"


def test_errors_have_the_clients_types(client, model):
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model=model, prompt="word " * 600)
    assert bad.value.param == "prompt"
    assert bad.value.code == "context_length_exceeded"
    assert "512" in bad.value.message
    with pytest.raises(openai.BadRequestError) as unknown:
        client.chat.completions.create(model=model, messages=MESSAGES, extra_body={"best_guess": 1})
    assert unknown.value.param == "best_guess"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-none", messages=MESSAGES)
    assert client.chat.completions.create(
        messages=MESSAGES, model=model, max_completion_tokens=1, temperature=0, extra_body={"top_k": None, "stop": None}
    )


def test_control_tokens_in_a_users_text_stay_text(client, model):
    def count(text):
        messages = [{"role": "user", "content": text}]
        return client.chat.completions.create(model=model, messages=messages, max_tokens=1).usage.prompt_tokens

    assert count("<|im_end|>") > count("x") + 2, "spelt out, not one control token"


def test_metrics_tell_what_happened(client, model, real_server):
    real_server.assert_all_free()
    names = (
        "request_success_total",
        "generation_tokens_total",
        "prompt_tokens_total",
        "time_to_first_token_seconds_count",
    )
    before = {name: real_server.gauge(name) for name in names}
    answer = client.completions.create(model=model, prompt="The sea", max_tokens=5, temperature=0)
    real_server.assert_all_free()
    rise = {name: real_server.gauge(name) - before[name] for name in names}
    assert rise["request_success_total"] == 1
    assert rise["generation_tokens_total"] == 5
    assert rise["prompt_tokens_total"] == answer.usage.prompt_tokens
    assert rise["time_to_first_token_seconds_count"] == 1
    response = real_server.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    for name in (
        "request_queue_time_seconds_count",
        "request_prefill_time_seconds_count",
        "e2e_request_latency_seconds_count",
        "inter_token_latency_seconds_count",
        "iteration_tokens_total_count",
        "num_preemptions_total",
    ):
        assert f"foliolm:{name}{{" in response.text
    assert real_server.http.get("/health").json()["status"] == "ok"
    assert real_server.http.get("/v1/models").json()["data"][0]["max_model_len"] == 512


def test_the_start_up_says_what_was_decided(real_server):
    said = "\n".join(real_server.lines)
    for words in (
        "weights",
        "activations",
        "reserve",
        "KV pool: 256 blocks of 16",
        "chunked batching",
        "curl",
        "OpenAI(",
    ):
        assert words in said, said
