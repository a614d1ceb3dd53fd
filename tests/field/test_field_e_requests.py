"""Kind e: what clients send and are sent. Chunks, finish reasons, caps, empty turns, scoring, lengths."""

import json
import threading

import psutil
import pytest

from support.sure_answer import MESSAGES

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
FRUITS = [{"role": "user", "content": "Name three fruits."}]


@pytest.fixture
def post(real_server):
    return lambda path, **body: real_server.http.post(path, json=body)


@pytest.fixture
def chunks(real_server):
    """The events of a stream, as objects; the form of the stream is checked on the way."""

    def chunks(path, **body):
        with real_server.http.stream("POST", path, json={**body, "stream": True}) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            raw = response.read().decode()
        parts = [event for event in raw.split("\n\n") if not event.startswith(":")]
        assert parts.pop() == "", "each event ends with an empty line"
        assert all(part.startswith("data: ") for part in parts)
        assert parts.pop() == "data: [DONE]"
        return [json.loads(part.removeprefix("data: ")) for part in parts]

    return chunks


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize(("path", "body"), [(CHAT, {"messages": FRUITS}), (TEXT, {"prompt": "Fruits:"})])
def test_e3_usage_comes_once_and_last(post, chunks, path, body, n):
    body = {**body, "max_tokens": 5, "n": n, "temperature": 0, "ignore_eos": True}
    *ordinary, last = chunks(path, **body, stream_options={"include_usage": True})
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in ordinary)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 5 * n
    assert last["usage"]["total_tokens"] == last["usage"]["prompt_tokens"] + 5 * n
    plain = post(path, **body).json()["usage"]
    cached = [usage.pop("prompt_tokens_details") for usage in (plain, last["usage"])]
    assert plain == last["usage"]
    assert all(0 <= details["cached_tokens"] <= plain["prompt_tokens"] for details in cached)
    assert not any("usage" in chunk for chunk in chunks(path, **body))


def test_e4_one_finish_reason_a_choice_and_nothing_after_it(post, chunks):
    for n in (1, 2):
        parts = [chunk["choices"][0] for chunk in chunks(CHAT, messages=FRUITS, max_tokens=3, n=n)]
        assert all("finish_reason" in part for part in parts)
        for index in range(n):
            reasons = [part["finish_reason"] for part in parts if part["index"] == index]
            assert reasons[-1] == "length"
            assert reasons[:-1] == [None] * (len(reasons) - 1)
    natural = chunks(CHAT, messages=MESSAGES, max_tokens=60, temperature=0)
    assert natural[-1]["choices"][0]["finish_reason"] == "stop"
    plain = post(CHAT, messages=MESSAGES, max_tokens=60, temperature=0).json()
    assert plain["choices"][0]["finish_reason"] == "stop"


def test_e5_an_index_is_a_choices_number(chunks):
    parts = chunks(CHAT, messages=FRUITS, n=3, temperature=1, seed=1, max_tokens=6)
    for name in ("id", "created", "model"):
        assert len({chunk[name] for chunk in parts}) == 1
    choices = [chunk["choices"][0] for chunk in parts]
    assert {choice["index"] for choice in choices} == {0, 1, 2}
    for index in range(3):
        mine = [choice for choice in choices if choice["index"] == index]
        assert mine[0]["delta"]["role"] == "assistant"
        assert "".join(choice["delta"].get("content", "") for choice in mine)
        assert sum(choice["finish_reason"] is not None for choice in mine) == 1


def test_e6_both_names_of_the_cap(post):
    newer = post(CHAT, messages=FRUITS, max_completion_tokens=5, ignore_eos=True).json()
    assert newer["usage"]["completion_tokens"] == 5
    assert newer["choices"][0]["finish_reason"] == "length"
    both = post(CHAT, messages=FRUITS, max_completion_tokens=3, max_tokens=9, ignore_eos=True).json()
    assert both["usage"]["completion_tokens"] == 3, "the newer name wins"
    assert post(TEXT, prompt="Fruits:", ignore_eos=True).json()["usage"]["completion_tokens"] == 16
    for cap in (0, -4):
        for name in ("max_tokens", "max_completion_tokens"):
            answer = post(CHAT, messages=FRUITS, **{name: cap})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)


def test_e8_empty_turns(post):
    def status(*messages):
        return post(CHAT, messages=list(messages), max_tokens=1).status_code

    hello, again = ({"role": "user", "content": text} for text in ("hello", "still there?"))
    assert status() == 400
    for role in ("assistant", "user", "system", "developer"):
        assert status(hello, {"role": role, "content": ""}, again) == 200
    assert status({"role": "user", "content": None}) == 400
    assert status({"role": "assistant", "content": None}, hello) == 400
    assert status({"role": "narrator", "content": "x"}) == 400
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    result = {"role": "tool", "tool_call_id": "c", "content": ""}
    assert status(hello, {"role": "assistant", "content": None, "tool_calls": [call]}, result) == 200
    assert post(TEXT, prompt="").status_code == 400


def test_e11_numbers_are_bounded_before_they_reach_the_engine(post, real_server):
    def resident():
        server = psutil.Process(real_server.process.pid)
        return sum(process.memory_info().rss for process in [server, *server.children(recursive=True)])

    hostile = [
        {"logit_bias": {"99999999": 5}},
        {"stop_token_ids": [99999999]},
        {"prompt": [1, 99999999]},
        {"prompt": [-1]},
        {"logprobs": 1000000000},
        {"n": 5000000},
        {"top_p": -1},
        {"temperature": 1e308},
        {"repetition_penalty": 0},
        {"seed": 1180591620717411303424},
    ]
    post(TEXT, prompt="warm", max_tokens=1)
    before = resident()
    for fields in hostile * 3:
        assert post(TEXT, **{"prompt": "one two three", "max_tokens": 8, **fields}).status_code == 400
        assert real_server.http.get("/health").status_code == 200
    assert resident() - before < 10 << 20


def test_e12_a_huge_body_stops_nobody(real_server):
    answers = []
    body = json.dumps({"prompt": "some words " * 2_500_000, "max_tokens": 8})
    huge = threading.Thread(target=lambda: answers.append(real_server.http.post(TEXT, content=body)))
    huge.start()
    while huge.is_alive():
        assert real_server.http.get("/health").status_code == 200
    (answer,) = answers
    assert answer.status_code in (400, 413)
    assert len(answer.content) < 4096


def test_e14_scoring_with_echo(post):
    answer = post(TEXT, prompt="the cat sat", max_tokens=0, echo=True, logprobs=1).json()
    choice = answer["choices"][0]
    logprobs = choice["logprobs"]
    assert len(logprobs["tokens"]) == answer["usage"]["prompt_tokens"]
    assert answer["usage"]["completion_tokens"] == 0
    assert logprobs["token_logprobs"][0] is None
    assert all(value <= 0 for value in logprobs["token_logprobs"][1:])
    assert "".join(logprobs["tokens"]) == choice["text"] == "the cat sat"
    # Characters of several tokens: offsets still cut the text.
    text = "naïve 漢字 😀 done"
    choice = post(TEXT, prompt=text, max_tokens=0, echo=True, logprobs=0).json()["choices"][0]
    offsets = choice["logprobs"]["text_offset"]
    assert offsets == sorted(offsets)
    cuts = [choice["text"][a:b] for a, b in zip(offsets, [*offsets[1:], None], strict=True)]
    assert "".join(cuts) == choice["text"] == text
    # A likely continuation scores above an unlikely one.
    sums = [
        sum(
            post(TEXT, prompt=text, max_tokens=0, echo=True, logprobs=1).json()["choices"][0]["logprobs"][
                "token_logprobs"
            ][1:]
        )
        for text in ("The capital of France is Paris.", "The capital of France is carrots.")
    ]
    assert sums[0] > sums[1]


def test_e14_the_numbers_are_those_of_a_forward_pass(post):
    import torch

    from foliolm.model.loader import load_model, resolve_dtype
    from foliolm.weights.store import open_model
    from support.torch_engine import generate, request

    files = open_model("smollm2-135m")
    device = torch.device("cpu")
    dtype = resolve_dtype("auto", device)
    model = load_model(files.shape, files.iter_tensors(), dtype=dtype, device=device, num_tokens=files.num_tokens)
    answer = post(TEXT, prompt="the cat sat", max_tokens=0, echo=True, logprobs=1, return_token_ids=True).json()[
        "choices"
    ][0]
    ids = answer["prompt_token_ids"]
    offline = generate(model, [request(1, ids, max_tokens=1, prompt_logprobs=0)]).by_id[1].prompt_logprobs
    expected = [entry.logprob for entry in offline[1:]]
    # bfloat16 has 8 bits: between 16 and 32 a logit is a multiple of an eighth.
    within = {"abs": 1e-3} if dtype is torch.float32 else {"abs": 0.1, "rel": 0.02}
    assert answer["logprobs"]["token_logprobs"][1:] == pytest.approx(expected, **within)


def test_e15_a_prompt_is_never_cut(post):
    def ask(length, max_tokens):
        return post(TEXT, prompt=[504] * length, max_tokens=max_tokens, ignore_eos=True)

    refused = ask(520, 1)
    assert refused.status_code == 400
    assert "520" in refused.json()["error"]["message"]
    assert "512" in refused.json()["error"]["message"]
    clamped = ask(508, 10).json()
    assert clamped["usage"]["completion_tokens"] == 4
    assert clamped["choices"][0]["finish_reason"] == "length"
    assert ask(511, 1).json()["usage"]["completion_tokens"] == 1
    assert ask(512, 1).status_code == 400


def test_e17_the_first_chunk_has_the_role_and_no_later_one(chunks):
    first, *later = chunks(CHAT, messages=FRUITS, max_tokens=4)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert not any("role" in chunk["choices"][0]["delta"] for chunk in later)
    assert not any(chunk["choices"][0]["delta"].get("content") is None for chunk in later[:-1])
