"""Answers of a form, over HTTP with a real model."""

import json
import re

import openai
import pytest

ASK = [{"role": "user", "content": "Give me a person as JSON with name and age."}]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def client(real_server):
    return openai.OpenAI(base_url=f"{real_server.url}/v1", api_key="none", max_retries=0, timeout=120)


@pytest.fixture
def complete(real_server):
    def complete(**fields):
        answer = real_server.http.post("/v1/completions", json={"prompt": "Value:", "max_tokens": 40, **fields})
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"]

    return complete


def person_format(strict=True):
    return {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": strict}}


def test_a_schema_holds_every_choice_of_a_wild_model(client):
    answer = client.chat.completions.create(
        model="smollm2-135m",
        messages=ASK,
        response_format=person_format(),
        n=3,
        seed=5,
        temperature=2.0,
        max_completion_tokens=80,
    )
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        value = json.loads(choice.message.content)
        assert set(value) == {"name", "age"}
        assert len(value["name"]) <= 10
        assert 0 <= value["age"] <= 99


def test_the_clients_own_parsing_works(client):
    from pydantic import BaseModel

    class City(BaseModel):
        population: int
        coastal: bool

    answer = client.chat.completions.parse(
        model="smollm2-135m", messages=ASK, response_format=City, temperature=0, max_completion_tokens=60
    )
    assert isinstance(answer.choices[0].message.parsed, City)


def test_a_stream_is_the_same_in_pieces(client):
    options = {"model": "smollm2-135m", "messages": ASK, "response_format": person_format(), "temperature": 0}
    plain = client.chat.completions.create(**options, max_completion_tokens=60)
    chunks = list(client.chat.completions.create(**options, max_completion_tokens=60, stream=True))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == plain.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_any_object_is_one_or_is_cut_by_its_cap(client):
    answer = client.chat.completions.create(
        model="smollm2-135m",
        messages=ASK,
        response_format={"type": "json_object"},
        temperature=0,
        max_completion_tokens=80,
    )
    assert answer.choices[0].finish_reason == "stop"
    assert isinstance(json.loads(answer.choices[0].message.content), dict)
    cut = client.chat.completions.create(
        model="smollm2-135m",
        messages=ASK,
        response_format={"type": "json_object"},
        temperature=0,  # an object drawn at random may be an empty one
        max_completion_tokens=3,
    )
    assert cut.choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"regex": r"\d{4}-\d{2}-\d{2}"}, r"\d{4}-\d{2}-\d{2}"),
        ({"choice": ["red", "green", "blue"]}, "red|green|blue"),
        ({"grammar": 'root ::= num " + " num\nnum ::= [0-9]{1,3}'}, r"\d{1,3} \+ \d{1,3}"),
        ({"grammar": 'start: "<" /[a-z]{2,8}/ ">"'}, "<[a-z]{2,8}>"),
        ({"json": {"enum": [1, "two"]}}, '1|"two"'),
        ({"json": json.dumps({"const": [1, 2]}), "disable_any_whitespace": True}, r"\[1,2\]"),
        ({"json": {"const": [1, 2]}, "whitespace_pattern": " "}, r"\[ ?1 ?, ?2 ?\]"),
    ],
    ids=str,
)
def test_other_forms(complete, form, pattern):
    for seed in (1, 2):
        (choice,) = complete(structured_outputs=form, temperature=1.5, seed=seed)
        assert re.fullmatch(pattern, choice["text"])
        assert choice["finish_reason"] == "stop"


def test_the_form_wins_over_min_tokens_and_ignore_eos(complete):
    (choice,) = complete(structured_outputs={"choice": ["yes", "no"]}, min_tokens=30, ignore_eos=True)
    assert choice["text"] in ("yes", "no")
    assert choice["finish_reason"] == "stop"


def test_a_stop_string_still_ends_it(complete):
    (choice,) = complete(structured_outputs={"regex": "abc-def"}, stop=["-"])
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("abc", "stop", "-")


def test_several_forms_at_once(real_server):
    """Rows with different forms, and one without, in one batch."""
    from concurrent.futures import ThreadPoolExecutor

    forms = [{"choice": ["left", "right"]}, {"regex": "[0-9]{12}"}, None, {"json": PERSON}]

    def ask(form):
        body = {"prompt": "It is", "max_tokens": 16 if form is None else 60, "temperature": 1, "seed": 3}
        return real_server.http.post(
            "/v1/completions", json=body if form is None else {**body, "structured_outputs": form}
        ).json()["choices"][0]["text"]

    alone = [ask(form) for form in forms]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(ask, forms))
    assert together[0] in ("left", "right")
    assert re.fullmatch("[0-9]{12}", together[1])
    assert set(json.loads(together[3])) == {"name", "age"}
    assert together[2] == alone[2], "the one without a form writes what it writes when alone"
    real_server.assert_all_free()
