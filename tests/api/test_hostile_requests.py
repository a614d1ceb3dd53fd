"""Requests that are malformed or mean harm: each is refused by name, and nobody else notices."""

import json
import threading

import pytest

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "Hi"}]
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def chat(**fields):
    return CHAT, {"messages": HI, **fields}


def turns(*messages, **fields):
    return CHAT, {"messages": list(messages), **fields}


def text(**fields):
    return TEXT, {"prompt": "one two three", "max_tokens": 8, **fields}


def tool(**fields):
    return {"type": "function", "function": {"name": "f", **fields}}


def schema(value):
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": value}}


def nested(depth):
    value = {"type": "string"}
    for _ in range(depth):
        value = {"type": "object", "properties": {"a": value}}
    return value


BIG = 10**12
REFUSED = [
    # Numbers out of range.
    (text(n=0), "n"),
    (text(n=-1), "n"),
    (text(n=5_000_000), "n"),
    (text(n=2**70), "n"),
    (text(n=1.5), "n"),
    (text(n=True), "n"),
    (text(prompt=["a"] * 300), "n"),
    (text(prompt=["a"] * 100, n=3), "n"),
    (text(max_tokens=0), "max_tokens"),
    (text(max_tokens=-1), "max_tokens"),
    (text(max_tokens="8"), "max_tokens"),
    (chat(max_tokens=0), "max_tokens"),
    (chat(max_completion_tokens=0), "max_completion_tokens"),
    (chat(max_completion_tokens=-7), "max_completion_tokens"),
    (text(min_tokens=9), "min_tokens"),
    (text(min_tokens=-1), "min_tokens"),
    (text(temperature=-0.1), "temperature"),
    (text(temperature=1e308), "temperature"),
    (text(temperature=[1]), "temperature"),
    (text(top_p=-1), "top_p"),
    (text(top_p=0), "top_p"),
    (text(top_p=1.01), "top_p"),
    (text(top_k=-2), "top_k"),
    (text(top_k=0.5), "top_k"),
    (text(min_p=-0.5), "min_p"),
    (text(min_p=2), "min_p"),
    (text(presence_penalty=2.1), "presence_penalty"),
    (text(frequency_penalty=-2.1), "frequency_penalty"),
    (text(repetition_penalty=0), "repetition_penalty"),
    (text(repetition_penalty=-1), "repetition_penalty"),
    (text(repetition_penalty=1e9), "repetition_penalty"),
    (text(seed=2**70), "seed"),
    (text(seed=-(2**64)), "seed"),
    (text(seed="x"), "seed"),
    (text(logprobs=10**9), "logprobs"),
    (text(logprobs=-1), "logprobs"),
    (text(prompt_logprobs=21), "prompt_logprobs"),
    (text(prompt_logprobs=-1), "prompt_logprobs"),
    (text(prompt_logprobs=1, stream=True), "prompt_logprobs"),
    (chat(top_logprobs=10**9, logprobs=True), "logprobs"),
    (chat(top_logprobs=5), "top_logprobs"),
    (chat(logprobs=3), "logprobs"),
    (text(best_of=1, n=2), "best_of"),
    (text(best_of=0), "best_of"),
    (text(best_of=5), "best_of"),
    (text(priority=3), "priority"),
    (text(timeout=0), "timeout"),
    (text(timeout=-1), "timeout"),
    # Token ids that do not exist.
    (text(logit_bias={"99999999": 5}), "logit_bias"),
    (text(logit_bias={"-1": 5}), "logit_bias"),
    (text(logit_bias={"x": 5}), "logit_bias"),
    (text(logit_bias={"5": 101}), "logit_bias"),
    (text(logit_bias={"5": "1"}), "logit_bias"),
    (text(logit_bias={str(i): 1 for i in range(2000)}), "logit_bias"),
    (text(logit_bias=[1]), "logit_bias"),
    (text(stop_token_ids=[99999999]), "stop_token_ids"),
    (text(stop_token_ids=[-1]), "stop_token_ids"),
    (text(stop_token_ids=list(range(2000))), "stop_token_ids"),
    (text(allowed_token_ids=[]), "allowed_token_ids"),
    (text(allowed_token_ids=[49152]), "allowed_token_ids"),
    (text(allowed_token_ids=[-5]), "allowed_token_ids"),
    (text(prompt=[1, 99999999]), "prompt"),
    (text(prompt=[-1]), "prompt"),
    (text(prompt=[BIG]), "prompt"),
    (text(prompt=[1.5]), "prompt"),
    (text(prompt=[[1], [49152]]), "prompt"),
    # Prompts.
    ((TEXT, {}), "prompt"),
    (text(prompt=None), "prompt"),
    (text(prompt=""), "prompt"),
    (text(prompt=[]), "prompt"),
    (text(prompt=[[]]), "prompt"),
    (text(prompt=["a", ""]), "prompt"),
    (text(prompt=["a", 1]), "prompt"),
    (text(prompt={"text": "a"}), "prompt"),
    (text(prompt="word " * 600), "prompt"),
    (text(prompt="x" * 2_000_000), "prompt"),
    (text(prompt=[5] * 512), "prompt"),
    (text(add_special_tokens="no"), "add_special_tokens"),
    # Stop strings and words.
    (text(stop=""), "stop"),
    (text(stop=["a", ""]), "stop"),
    (text(stop=["x"] * 17), "stop"),
    (text(stop="y" * 100_000), "stop"),
    (text(stop=[1]), "stop"),
    (text(bad_words=[" "]), "bad_words"),
    (text(bad_words=["b" * 100_000]), "bad_words"),
    (text(bad_words=["a"] * 1000), "bad_words"),
    # Messages.
    (turns(), "messages"),
    ((CHAT, {}), "messages"),
    ((CHAT, {"messages": "Hi"}), "messages"),
    (turns("Hi"), "messages.0"),
    (turns({"role": "user"}), "messages.0.content"),
    (turns({"role": "user", "content": None}), "messages.0.content"),
    (turns({"role": "user", "content": []}), "messages.0.content"),
    (turns({"role": "user", "content": 7}), "messages.0.content"),
    (turns({"role": "narrator", "content": "x"}), "messages.0.role"),
    (turns({"content": "x"}), "messages.0.role"),
    (turns({"role": "user", "content": "x", "mood": "y"}), "messages.0.mood"),
    (turns({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}), None),
    (turns({"role": "user", "content": "word " * 600}), "messages"),
    (turns(*[{"role": "user", "content": ""}] * 5000), "messages"),
    (turns({"role": "assistant", "content": None}), "messages.0.content"),
    (turns({"role": "user", "content": "x", "tool_calls": [CALL]}), "messages.0.tool_calls"),
    (turns({"role": "tool", "content": "x"}), "messages.0.tool_call_id"),
    (turns({"role": "tool", "content": "x", "tool_call_id": "c9"}), "messages.0.tool_call_id"),
    (turns({"role": "user", "content": "x", "tool_call_id": "c1"}), "messages.0.tool_call_id"),
    (
        turns({"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": "{"}}]}),
        "messages.0.tool_calls.0.function.arguments",
    ),
    (
        turns({"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": "[1]"}}]}),
        "messages.0.tool_calls.0.function.arguments",
    ),
    (chat(continue_final_message=True), "continue_final_message"),
    (chat(continue_final_message=True, add_generation_prompt=True), "continue_final_message"),
    (chat(chat_template_kwargs={"no_such_variable": 1}), "chat_template_kwargs.no_such_variable"),
    (chat(chat_template="{{ 7 }}"), "chat_template"),
    # Fields that are not served, or do not exist.
    (chat(frobnicate=1), "frobnicate"),
    (text(frobnicate=None), "frobnicate"),
    (text(suffix="the end"), "suffix"),
    (chat(echo=True), "echo"),
    (chat(audio={"voice": "alloy"}), "audio"),
    (chat(modalities=["text", "audio"]), "modalities"),
    (chat(functions=[{"name": "f"}]), "functions"),
    (chat(function_call="auto"), "function_call"),
    (chat(store=True), "store"),
    (chat(service_tier="priority"), "service_tier"),
    (chat(prediction={"type": "content", "content": "x"}), "prediction"),
    (chat(web_search_options={}), "web_search_options"),
    (chat(reasoning_effort="high"), "reasoning_effort"),
    (chat(verbosity="low"), "verbosity"),
    (text(use_beam_search=True, n=2, temperature=0.5), "temperature"),
    (text(use_beam_search=True, n=2, top_p=0.5), "top_p"),
    (text(use_beam_search=True, n=2, stop=["x"]), "stop"),
    (text(use_beam_search=True, n=3, best_of=2), "best_of"),
    (text(use_beam_search=True, n=2, best_of=17), "best_of"),
    (text(use_beam_search=True, n=2, length_penalty=1e9), "length_penalty"),
    (text(use_beam_search=True, n=2, early_stopping="soon"), "early_stopping"),
    (text(length_penalty=2.0), "length_penalty"),
    (text(early_stopping=True), "early_stopping"),
    (text(truncate_prompt_tokens=5), "truncate_prompt_tokens"),
    (text(guided_json={}), "guided_json"),
    (text(logits_processors=["os.system"]), "logits_processors"),
    (text(stream_options={"include_usage": True}), "stream_options"),
    (text(stream_options={"include_usage": True, "x": 1}, stream=True), "stream_options.x"),
    (text(stream_options={"include_obfuscation": True}, stream=True), "stream_options.include_obfuscation"),
    (text(stream="yes"), "stream"),
    (text(metadata={str(i): "x" for i in range(17)}), "metadata"),
    (text(metadata={"a": "x" * 513}), "metadata"),
    (text(metadata={"a": 1}), "metadata.a"),
    (text(user="u" * 257), "user"),
    (text(request_id="r" * 257), "request_id"),
    (text(request_id="a\r\nset-cookie: b"), "request_id"),
    (text(cache_salt=7), "cache_salt"),
    # Structured output.
    (chat(response_format={"type": "yaml"}), "response_format.type"),
    (chat(response_format={"type": "json_schema"}), "response_format.json_schema"),
    (chat(response_format={"type": "text", "json_schema": {"name": "s"}}), "response_format.json_schema"),
    (chat(response_format=schema({"type": "frob"})), "response_format.json_schema.schema"),
    (chat(response_format=schema({"not": {}})), "response_format.json_schema.schema"),
    (chat(response_format=schema({"enum": []})), "response_format.json_schema.schema"),
    (chat(response_format=schema({"$ref": "http://example.com/x.json"})), "response_format.json_schema.schema"),
    (chat(response_format=schema({"$ref": "file:///etc/passwd"})), "response_format.json_schema.schema"),
    (chat(response_format=schema({"type": "string", "pattern": "("})), "response_format.json_schema.schema"),
    (
        chat(response_format=schema({"$ref": "#/$defs/x", "$defs": {"x": {"$ref": "#/$defs/x"}}})),
        "response_format.json_schema.schema",
    ),
    (chat(response_format=schema({"description": "x" * 300_000})), "response_format.json_schema.schema"),
    (chat(response_format=schema(nested(70))), "response_format.json_schema.schema"),
    (text(structured_outputs={}), "structured_outputs"),
    (text(structured_outputs={"regex": "a", "choice": ["b"]}), "structured_outputs"),
    (text(structured_outputs={"regex": "("}), "structured_outputs.regex"),
    (text(structured_outputs={"regex": "(?=x)y"}), "structured_outputs.regex"),
    (text(structured_outputs={"choice": []}), "structured_outputs.choice"),
    (text(structured_outputs={"choice": [1]}), "structured_outputs.choice.0"),
    (text(structured_outputs={"grammar": "start: nowhere"}), "structured_outputs.grammar"),
    (text(structured_outputs={"grammar": "not a grammar"}), "structured_outputs.grammar"),
    (text(structured_outputs={"grammar": "root ::= (" * 9000}), "structured_outputs.grammar"),
    (text(structured_outputs={"json": "{"}), "structured_outputs.json"),
    (text(structured_outputs={"json": "7"}), "structured_outputs.json"),
    (
        text(structured_outputs={"regex": "a", "whitespace_pattern": " "}),
        "structured_outputs.whitespace_pattern",
    ),
    (text(structured_outputs={"json_object": True, "whitespace_pattern": "("}), "structured_outputs.json_object"),
    (text(structured_outputs={"regex": "a"}, response_format={"type": "json_object"}), "structured_outputs"),
    # Tools.
    (chat(tools=[{"type": "retrieval"}]), "tools.0.type"),
    (chat(tools=[tool(name="no spaces please")]), "tools.0.function.name"),
    (chat(tools=[tool(parameters=[1])]), "tools.0.function.parameters"),
    (chat(tools=[TOOL, TOOL]), "tools.1.function.name"),
    (chat(tools=[tool(name=f"f{i}") for i in range(129)]), "tools"),
    (chat(tool_choice="required"), "tool_choice"),
    (chat(tools=[TOOL], tool_choice="perhaps"), "tool_choice"),
    (chat(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "g"}}), "tool_choice"),
    (
        chat(tools=[tool(parameters={"type": "frob"})], tool_choice="required"),
        "tools.0.function.parameters",
    ),
    (chat(tools=[TOOL], tool_choice="required", response_format={"type": "json_object"}), "tool_choice"),
    (chat(tools=[TOOL], structured_outputs={"regex": "a"}), "structured_outputs.regex"),
    # Tokens.
    (("/tokenize", {}), "prompt"),
    (("/tokenize", {"prompt": "a", "messages": HI}), "prompt"),
    (("/tokenize", {"prompt": "a", "tools": [TOOL]}), "tools"),
    (("/tokenize", {"messages": HI, "add_special_tokens": True}), "add_special_tokens"),
    (("/tokenize", {"prompt": "x" * 3_000_000}), "prompt"),
    (("/detokenize", {"tokens": [99999999]}), "tokens"),
    (("/detokenize", {"tokens": [-1]}), "tokens"),
    (("/detokenize", {"tokens": "abc"}), "tokens"),
]

RAW = [
    b"",
    b"{",
    b"null",
    b"[]",
    b'"prompt"',
    b"\xff\xfe\x00",
    b'{"prompt": "a", "temperature": NaN}',
    b'{"prompt": "a", "temperature": 1e999}',
    b'{"prompt": "a", "top_p": Infinity}',
    b'{"prompt": "\\ud800"}',
    b"[" * 100_000,
    b'{"prompt":' * 50_000,
    b"prompt=a&max_tokens=3",
]

OTHERS = [
    ("GET", "/v1/completions", 405),
    ("POST", "/v1/models", 405),
    ("GET", "/v1/nothing", 404),
    ("GET", "/v1/models/no-such-model", 404),
    ("GET", "/v1/models/%00%ff", 404),
    ("GET", "/../../etc/passwd", 404),
    ("DELETE", "/v1/chat/completions", 405),
]


def test_there_are_enough_of_them():
    assert len(REFUSED) + len(RAW) + len(OTHERS) >= 120
    assert len({json.dumps(case) for case in REFUSED}) == len(REFUSED), "no two are the same"


@pytest.mark.parametrize(("case", "param"), REFUSED, ids=[f"{i}-{param}" for i, (_, param) in enumerate(REFUSED)])
def test_it_is_refused_by_name(real_server, case, param):
    path, body = case
    answer = real_server.http.post(path, json=body)
    assert answer.status_code == 400, answer.text[:500]
    assert len(answer.content) < 4096, "an error does not repeat what was sent"
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    if param is None:
        assert error["param"].startswith("messages.0.content"), error
    else:
        assert error["param"] == param, error
        assert param.split(".")[0] in error["message"], "the message names the field too"


@pytest.mark.parametrize("raw", RAW, ids=range(len(RAW)))
@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_a_body_that_is_no_json_object_of_the_right_kind(real_server, path, raw):
    answer = real_server.http.post(path, content=raw)
    assert answer.status_code == 400, answer.text[:500]
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert len(answer.content) < 4096


@pytest.mark.parametrize(("method", "path", "status"), OTHERS)
def test_a_path_or_method_that_does_not_exist(real_server, method, path, status):
    answer = real_server.http.request(method, path, json={} if method == "POST" else None)
    assert answer.status_code == status
    assert answer.json()["error"]["message"]


def test_a_model_that_is_not_served_is_404(real_server):
    for path, body in (text(model="gpt-nope"), chat(model="x" * 10_000), ("/tokenize", {"prompt": "a", "model": "y"})):
        answer = real_server.http.post(path, json=body)
        assert answer.status_code == 404
        assert answer.json()["error"]["param"] == "model"
        assert len(answer.content) < 1000


def test_thousands_of_faults_make_a_short_error(real_server):
    answer = real_server.http.post(CHAT, json={"messages": [{"role": 1, "content": {}, "x": 2}] * 12_000})
    assert answer.status_code == 400
    assert len(answer.content) < 4096


def test_nobody_else_notices_and_nothing_is_left(real_server):
    """After all of the above: a stream that runs while a sample of it is sent again is what it is when alone."""
    _, body = text(prompt="The sea is", max_tokens=40, temperature=0, ignore_eos=True)

    def stream():
        parts = []
        with real_server.http.stream("POST", TEXT, json={**body, "stream": True}) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    parts.append(json.loads(line[6:])["choices"][0]["text"])
                    begun.set()
        return "".join(parts)

    begun = threading.Event()
    alone = stream()
    begun.clear()
    beside = []
    canary = threading.Thread(target=lambda: beside.append(stream()))
    canary.start()
    assert begun.wait(60)
    for (path, hostile), _ in REFUSED[::9]:
        assert real_server.http.post(path, json=hostile).status_code == 400
        assert real_server.http.get("/health").status_code == 200
    canary.join(120)
    assert beside == [alone]
    assert real_server.http.get("/health").status_code == 200
    real_server.assert_all_free()
    assert real_server.gauge("num_failed_steps_total") == 0
