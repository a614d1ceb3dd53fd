"""Adapters as clients see them: chosen by name, loaded and unloaded under traffic, refused with both numbers."""

import json
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest
import torch
from server_process import ServerProcess
from tokenizers import Tokenizer

from support.adapters import merged, write_adapter
from support.tiny_files import save_folder
from support.tiny_models import reference, reference_greedy

PROMPT = [7, 3, 90, 41, 11, 8, 120, 5, 77, 31, 2, 9, 44, 45, 46, 47, 51, 60, 61, 62]


@pytest.fixture(scope="module")
def base():
    model = reference("llama", vocab_size=270, tie_word_embeddings=True)
    with torch.no_grad():
        model.get_input_embeddings().weight[0] = 0.0  # the end token is never the likeliest
    return model


@pytest.fixture(scope="module")
def home(base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    save_folder(base, folder / "base", num_tokens=270)
    for index, name in enumerate(("a", "b", "c", "d", "e")):
        write_adapter(folder / name, base, rank=2 + index, seed=index + 1, size=0.3)
    write_adapter(folder / "big", base, rank=64)
    write_adapter(folder / "other", reference("llama", hidden_size=96))
    return folder


@pytest.fixture(scope="module")
def server(home):
    modules = [flag for name in ("a", "b") for flag in ("--lora-modules", f"{name}={home / name}")]
    flags = ["--enable-lora", "--max-loras", "2", "--max-cpu-loras", "3", "--max-lora-rank", "16", *modules]
    limits = ["--max-model-len", "400", "--num-gpu-blocks-override", "256", "--max-num-seqs", "8", "--dtype", "float32"]
    limits += ["--num-threads", "1", "--served-model-name", "base"]
    running = ServerProcess("-m", "foliolm", "serve", str(home / "base"), "--port", "0", *flags, *limits)
    yield running
    running.assert_all_free()
    assert running.stop() == 0


@pytest.fixture(scope="module")
def says(base, home):
    """What each adapter, or the bare model, answers to the prompt; by transformers."""
    tokenizer = Tokenizer.from_file(str(home / "base" / "tokenizer.json"))
    known = {}

    def answer(name, count=12):
        if (name, count) not in known:
            model = base if name is None else merged(base, home / name)
            tokens, _ = reference_greedy(model, PROMPT, count)
            known[name, count] = tokenizer.decode(tokens)
        return known[name, count]

    return answer


def body(model, count=12, **more):
    return {"model": model, "prompt": PROMPT, "max_tokens": count, "temperature": 0, "ignore_eos": True, **more}


def ask(server, model, count=12, **more):
    answer = server.http.post("/v1/completions", json=body(model, count, **more))
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == model
    return answer.json()["choices"][0]["text"]


def load(server, name, path, **more):
    return server.http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(path), **more})


def unload(server, name):
    return server.http.post("/v1/unload_lora_adapter", json={"lora_name": name})


def names(server):
    return [entry["id"] for entry in server.http.get("/v1/models").json()["data"]]


def test_the_model_field_chooses_and_all_share_a_batch(server, says):
    assert says("a") != says(None) != says("b")
    entry = server.http.get("/v1/models/a").json()
    assert entry["parent"] == "base" and entry["root"].endswith("/a")
    assert names(server) == ["base", "a", "b"]
    models = ["a", "b", "base"] * 3
    with ThreadPoolExecutor(len(models)) as pool:
        answers = list(pool.map(lambda name: ask(server, name), models))
    assert answers == [says(None if name == "base" else name) for name in models]
    assert ask(server, "a", n=2, stream=False) == says("a")


def test_an_unknown_adapter_is_404_and_named(server):
    answer = server.http.post("/v1/completions", json=body("nobody"))
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert "'nobody'" in error["message"] and "base, a, b" in error["message"] and error["param"] == "model"
    assert unload(server, "nobody").status_code == 404


@pytest.mark.parametrize(
    ("folder", "words"),
    [("big", ("64", "16", "--max-lora-rank")), ("other", ("(4, 96)", "(4, 48)")), ("nowhere", ("nowhere",))],
)
def test_a_load_that_fails_leaves_the_server_as_it_was(server, home, says, folder, words):
    before = names(server)
    answer = load(server, "new", home / folder)
    assert answer.status_code == 400
    assert all(word in answer.json()["error"]["message"] for word in words)
    assert names(server) == before
    assert ask(server, "a") == says("a")


def test_names_that_are_taken(server, home):
    assert load(server, "base", home / "c").status_code == 400
    again = load(server, "a", home / "a")
    assert again.status_code == 200 and again.json()["loaded"] is False
    elsewhere = load(server, "a", home / "c")
    assert elsewhere.status_code == 400 and "load_inplace" in elsewhere.json()["error"]["message"]
    assert server.http.post("/v1/load_lora_adapter", json={"lora_name": "x"}).status_code == 400


def test_what_was_replaced_under_its_name_is_never_met_again(server, home, says):
    """The prompt's blocks were kept by the first load of the name; the second computes its own."""
    assert load(server, "x", home / "c").status_code == 200
    assert ask(server, "x") == ask(server, "x") == says("c")
    assert load(server, "x", home / "d", load_inplace=True).json()["loaded"] is True
    assert ask(server, "x") == says("d")
    assert unload(server, "x").status_code == 200
    assert server.http.post("/v1/completions", json=body("x")).status_code == 404
    assert load(server, "x", home / "c").status_code == 200
    assert ask(server, "x") == says("c")
    assert unload(server, "x").json()["unloaded"] is True


def stream_while_its_adapter_goes(server, home, says) -> int:
    """Stream from an adapter, replace it at the first token; returns how many requests used it then: this or none."""
    assert load(server, "x", home / "c").status_code == 200
    text, in_use = "", None
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body("x", 380, stream=True), timeout=300) as stream:
        for line in stream.iter_lines():
            if not line.startswith("data: {"):
                continue
            text += json.loads(line[6:])["choices"][0]["text"]
            if in_use is None:
                answer = unload(server, "x")
                assert answer.status_code == 200
                in_use = answer.json()["requests_in_use"]
                assert unload(server, "x").status_code == 404
                assert load(server, "x", home / "e").status_code == 200
                assert ask(server, "x") == says("e")
    assert text == says("c", 380)
    assert unload(server, "x").status_code == 200
    return in_use


def test_a_stream_keeps_the_adapter_that_it_began_with(server, home, says):
    # On a busy machine a stream's tokens may all be there before its client has read the first.
    assert any(stream_while_its_adapter_goes(server, home, says) == 1 for _ in range(10))


def test_loads_of_one_name_at_once_make_one(server, home):
    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(lambda _: load(server, "y", home / "d"), range(20)))
    assert [answer.status_code for answer in answers] == [200] * 20
    assert sum(answer.json()["loaded"] for answer in answers) == 1
    assert len({answer.json()["load_id"] for answer in answers}) == 1
    assert names(server).count("y") == 1
    with ThreadPoolExecutor(2) as pool:
        codes = sorted(pool.map(lambda _: unload(server, "y").status_code, range(2)))
    assert codes == [200, 404]


def test_more_adapters_than_host_memory_and_slots_hold(server, home, says):
    """Five at once where three may be in host memory and two in a step: all are answered, and right."""
    for name in ("c", "d", "e"):
        assert load(server, name, home / name).status_code == 200
    wanted = ["a", "b", "c", "d", "e", "base"] * 3
    with ThreadPoolExecutor(len(wanted)) as pool:
        answers = list(pool.map(lambda name: ask(server, name), wanted))
    assert answers == [says(None if name == "base" else name) for name in wanted]
    assert server.gauge("lora_adapters_held") <= 3
    assert server.gauge("lora_adapter_loads_total") >= 5
    assert server.gauge("lora_adapter_bytes_read_total") > 0
    text = server.http.get("/metrics").text
    labels = 'max_lora="2",model_name="base",running_lora_adapters="",waiting_lora_adapters=""'
    assert f'foliolm:lora_requests_info{{engine="0",{labels}}}' in text
    for name in ("c", "d", "e"):
        assert unload(server, name).status_code == 200


def test_an_engine_that_starts_again_has_the_adapters_that_are_offered(server, home, says):
    """One of the start was unloaded, another one loaded since: the fresh engine is brought to the same."""
    assert load(server, "x", home / "d").status_code == 200
    assert unload(server, "b").status_code == 200
    (engine,) = [child for child in psutil.Process(server.process.pid).children() if "process" in child.cmdline()[2]]
    engine.kill()
    server.until("engine_restarts_total", 1)
    deadline = time.monotonic() + 60
    while (answer := server.http.post("/v1/completions", json=body("x"))).status_code != 200:
        assert time.monotonic() < deadline, answer.text
        time.sleep(0.05)
    assert answer.json()["choices"][0]["text"] == says("d")
    assert ask(server, "a") == says("a")
    assert server.http.post("/v1/completions", json=body("b")).status_code == 404
    assert unload(server, "x").status_code == 200
    assert load(server, "b", home / "b").status_code == 200
    assert ask(server, "b") == says("b")
