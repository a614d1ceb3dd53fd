"""Keys, TLS, browsers, ids, logs, limits of time and size, and the config file."""

import datetime
import json
import shutil
import ssl
import subprocess
import sys
import threading
import time

import pytest
from server_process import ServerProcess

SETTINGS = {"step_seconds": 0.02, "max_model_len": 512, "num_blocks": 1025, "max_num_seqs": 1, "max_queued_requests": 8}
COMPLETION = {"prompt": "abc", "max_tokens": 3}
KEYS = ["first-key", "second-key"]


def started(options, **more):
    return ServerProcess("-m", "fake_server", json.dumps(SETTINGS), "--options", json.dumps(options), **more)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    log = tmp_path_factory.mktemp("log") / "requests.jsonl"
    options = {
        "api_key": KEYS,
        "allowed_origins": ["https://app.example"],
        "max_body_bytes": 4096,
        "queue_timeout": 1.0,
        "request_timeout": 60,
        "request_log": str(log),
    }
    running = started(options, FOLIOLM_API_KEY="third-key,fourth-key")
    running.http.headers["authorization"] = f"Bearer {KEYS[0]}"
    running.log = log
    yield running
    assert running.stop() == 0


def logged(server, identifier):
    """The log's line of a request; it is written off the event loop, so it may come a little later."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        lines = [json.loads(line) for line in server.log.read_text().splitlines()]
        found = [line for line in lines if line["id"] == identifier]
        if found:
            (line,) = found
            return line
        time.sleep(0.02)
    raise AssertionError(f"no line for {identifier}")


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "Bearer",
        "Bearer x first-key",
        "Bearer wrong",
        "Bearer first-ke",
        "Bearer first-keyy",
        "Basic first-key",
        "first-key",
    ],
)
@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/load", "/nothing"])
def test_without_a_known_key_everything_but_health_is_shut(server, header, path):
    headers = {} if header is None else {"authorization": header}
    request = server.http.build_request("GET", path)
    request.headers.pop("authorization", None)
    request.headers.update(headers)
    answer = server.http.send(request)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.json()["error"]["type"] == "authentication_error"
    request = server.http.build_request("GET", "/health", headers={"authorization": "Bearer wrong"})
    assert server.http.send(request).status_code == 200


@pytest.mark.parametrize("key", [*KEYS, "third-key", "fourth-key"])
def test_every_key_opens(server, key):
    assert server.http.get("/v1/models", headers={"authorization": f"bearer {key}"}).status_code == 200


def test_a_browser_may_call_from_the_origins_that_are_allowed(server):
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    preflight = server.http.build_request(
        "OPTIONS", "/v1/completions", headers={"origin": "https://app.example", **asked}
    )
    del preflight.headers["authorization"]
    answer = server.http.send(preflight)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == "https://app.example"
    answer = server.http.post("/v1/completions", json=COMPLETION, headers={"origin": "https://app.example"})
    assert answer.headers["access-control-allow-origin"] == "https://app.example"
    refused = server.http.get("/v1/models", headers={"origin": "https://app.example", "authorization": "Bearer no"})
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "https://app.example", "a browser can read the refusal"
    other = server.http.post("/v1/completions", json=COMPLETION, headers={"origin": "https://evil.example"})
    assert "access-control-allow-origin" not in other.headers


def test_ids_come_back_and_stand_in_the_answer_and_the_log(server):
    answer = server.http.post("/v1/completions", json={**COMPLETION, "user": "u"}, headers={"x-request-id": "mine-1"})
    assert answer.headers["x-request-id"] == "mine-1"
    assert answer.json()["id"] == "cmpl-mine-1"
    line = logged(server, "mine-1")
    assert line["answer"] == "cmpl-mine-1"
    assert (line["method"], line["path"], line["status"]) == ("POST", "/v1/completions", 200)
    assert (line["prompt_tokens"], line["output_tokens"], line["finish_reasons"]) == (3, 3, ["length"])
    assert (line["model"], line["stream"], line["user"]) == ("fake", False, "u")
    assert 0 <= line["queue_s"] <= line["first_token_s"] <= line["seconds"]
    assert datetime.datetime.fromisoformat(line["time"]).tzinfo is not None

    unnamed = server.http.post("/v1/completions", json=COMPLETION)
    assert unnamed.headers["x-request-id"] == unnamed.json()["id"]
    for answer in (server.http.get("/v1/models"), server.http.post("/v1/completions", json={"prompt": 5})):
        assert answer.headers["x-request-id"].startswith("req-")
    line = logged(server, answer.headers["x-request-id"])
    assert line["status"] == 400
    assert "prompt" in line["error"]

    with server.http.stream("POST", "/v1/completions", json={**COMPLETION, "stream": True}) as response:
        response.read()
    assert logged(server, response.headers["x-request-id"])["output_tokens"] == 3


@pytest.mark.parametrize("bad", [b"", b"a b", b"x" * 257, "é".encode(), b"a\tb"])
def test_an_id_that_is_none_is_refused(server, bad):
    answer = server.http.get("/v1/models", headers=[(b"x-request-id", bad)])
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "x-request-id"


def test_probes_are_not_logged_but_refusals_are(server):
    server.http.get("/health")
    server.http.get("/metrics")
    refused = server.http.get("/metrics", headers={"authorization": "Bearer no"})
    assert logged(server, refused.headers["x-request-id"])["status"] == 401
    assert {json.loads(line)["path"] for line in server.log.read_text().splitlines()} >= {"/metrics"}
    assert not [line for line in server.log.read_text().splitlines() if '"/health"' in line]
    assert KEYS[0] not in server.log.read_text()


def test_the_body_limit_is_the_flags(server):
    answer = server.http.post("/v1/completions", content=b" " * 4097)
    assert answer.status_code == 413
    assert "4096" in answer.json()["error"]["message"]
    assert server.http.post("/v1/completions", json={**COMPLETION, "prompt": "a" * 300}).status_code == 200


def test_waiting_has_a_limit_of_its_own(server):
    """One seat: the second request waits, and hears after the queue's time that it was in vain."""
    done = []

    def occupy():
        done.append(server.http.post("/v1/completions", json={"prompt": "long", "max_tokens": 120}))

    occupant = threading.Thread(target=occupy)
    occupant.start()
    server.until("num_requests_running", 1)
    asked = time.monotonic()
    answer = server.http.post("/v1/completions", json=COMPLETION)
    waited = time.monotonic() - asked
    occupant.join()
    assert answer.status_code == 504
    assert "--queue-timeout is 1 s" in answer.json()["error"]["message"]
    assert waited >= 0.9
    assert done[0].status_code == 200, "who runs is not concerned, however long it takes"
    assert done[0].json()["usage"]["completion_tokens"] == 120
    server.assert_all_free()


def test_a_request_cannot_ask_for_more_time_than_the_server_gives():
    from foliolm.api.service import ServiceLimits

    limits = ServiceLimits(request_timeout_s=10)
    assert limits.deadlines(None).total_s == 10
    assert limits.deadlines(5).total_s == 5
    assert limits.deadlines(50).total_s == 10
    assert limits.deadlines(50).source == "--request-timeout"
    assert ServiceLimits().deadlines(50).total_s == 50


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate, and is not installed")
    folder = tmp_path_factory.mktemp("tls")
    subprocess.run(
        [
            *[
                "openssl",
                "req",
                "-x509",
                "-newkey",
                "ec",
                "-pkeyopt",
                "ec_paramgen_curve:P-256",
                "-nodes",
                "-days",
                "2",
            ],
            *["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"],
            *("-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")),
        ],
        check=True,
        capture_output=True,
    )
    return folder


def test_tls(certificate):
    options = {"ssl_keyfile": str(certificate / "key.pem"), "ssl_certfile": str(certificate / "cert.pem")}
    server = started(options, verify=ssl.create_default_context(cafile=str(certificate / "cert.pem")))
    try:
        assert server.url.startswith("https://")
        assert server.http.post("/v1/completions", json=COMPLETION).json()["usage"]["completion_tokens"] == 3
        with server.http.stream("POST", "/v1/completions", json={**COMPLETION, "stream": True}) as response:
            assert list(response.iter_lines())[-2] == "data: [DONE]"
    finally:
        assert server.stop() == 0


def serve(*arguments, **variables):
    return subprocess.run(
        [sys.executable, "-m", "foliolm", "serve", *arguments],
        capture_output=True, text=True, timeout=120, check=False, env={**variables},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--ssl-keyfile", "k.pem"], ["--ssl-certfile is not set"]),
        (["--ssl-keyfile", "no.pem", "--ssl-certfile", "no.pem"], ["--ssl-keyfile", "no.pem", "cannot be read"]),
        (["--api-key", ""], ["--api-key"]),
        (["--allowed-methods", "GET"], ["--allowed-origins"]),
        (["--allow-credentials", "--allowed-origins", "*"], ["--allow-credentials"]),
        (["--request-timeout", "0"], ["--request-timeout", "0"]),
        (["--engine-restarts", "-1"], ["--engine-restarts", "-1"]),
        (["--max-body-bytes", "10"], ["--max-body-bytes", "1024"]),
    ],
)
def test_wrong_options_are_refused_by_name(arguments, words):
    done = serve(*arguments)
    assert done.returncode == 2
    assert all(word in done.stderr for word in words), done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_wrong_pair_of_tls_files(certificate, tmp_path):
    (tmp_path / "junk.pem").write_text("junk")
    done = serve("--ssl-keyfile", str(tmp_path / "junk.pem"), "--ssl-certfile", str(certificate / "cert.pem"))
    assert done.returncode == 2
    assert "make no pair" in done.stderr


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("block-size: 0\n", ["--block-size is 0"]),
        ("block_size: 0\n", ["--block-size is 0"]),
        ("blok-size: 16\n", ["'blok-size'", "no flag of"]),
        ("port: [1, 2]\n", ["port is list"]),
        ("port: true\n", ["port is true"]),
        ("block-size: 16\nblock_size: 16\n", ["block_size", "twice"]),
        ("served-model-name: {a: 1}\n", ["served-model-name is dict", "a list"]),
        ("- port\n", ["holds a list"]),
        ("port: [\n", ["no valid YAML"]),
        ("watermark: 0.9\nport: 1\n", ["--watermark is 0.9"]),
    ],
)
def test_a_config_file_is_held_to_what_flags_are(tmp_path, text, words):
    path = tmp_path / "serve.yaml"
    path.write_text(text)
    done = serve("--config", str(path))
    assert done.returncode == 2
    assert all(word in done.stderr for word in words), done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_flags_beat_the_config_file(tmp_path):
    path = tmp_path / "serve.yaml"
    path.write_text("model: /no/such/model\nport: 70000\nblock-size: 0\nenable-chunked-prefill: false\n")
    done = serve("--config", str(path), "--port", "0", "--block-size", "16")
    assert "70000" not in done.stderr, done.stderr
    assert "block-size" not in done.stderr
    assert "/no/such/model" in done.stderr
    assert serve("--config", str(tmp_path / "none.yaml")).returncode == 2


def test_values_of_a_config_file_arrive_as_they_are_meant(tmp_path):
    code = (
        "import json, sys, typer\n"
        "from foliolm.api.options import ServerOptions\n"
        "from foliolm.cli.flags import ENGINE_FLAGS, FlagGroup, with_flags\n"
        "def command(settings: dict, server: dict, model: str = 'm'):\n"
        "    print(json.dumps([model, settings, server]))\n"
        "app = typer.Typer()\n"
        "app.command()(with_flags(command, (FlagGroup('server', ServerOptions, 'S'), ENGINE_FLAGS)))\n"
        "app()\n"
    )
    path = tmp_path / "c.yaml"
    path.write_text(
        "served-model-name: [one, two]\napi_key: secret\nport: 9\nwatermark: 0.5\nenable-prefix-caching: false\n"
        "model: other\nqueue-timeout: 3\nmax-model-len:\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "--config", str(path), "--port", "10"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    model, settings, server = json.loads(done.stdout)
    assert model == "other"
    assert settings == {"served_model_name": ["one", "two"], "watermark": 0.5, "enable_prefix_caching": False}
    assert server == {"api_key": ["secret"], "port": 10, "queue_timeout": 3.0}
