"""The command line's frame: light, and clear about what is wrong."""

import json
import socket
import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "fastapi", "zmq", "openai", "scipy", "matplotlib", "huggingface_hub", "numpy")


def foliolm(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "foliolm", *arguments], capture_output=True, text=True, timeout=120, check=False
    )


def loaded_after(code):
    script = f"{code}\nimport json, sys; print(json.dumps([m for m in {HEAVY!r} if m in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def test_importing_the_package_loads_nothing_heavy():
    assert loaded_after("import foliolm; foliolm.SamplingParams(max_tokens=3)") == []


@pytest.mark.parametrize("arguments", [["--help"], ["serve", "--help"], ["demo", "--help"], ["version"]])
def test_help_loads_nothing_heavy(arguments):
    code = (
        f"import sys; sys.argv = ['foliolm', *{arguments!r}]\n"
        "from foliolm.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code"
    )
    assert loaded_after(code) == []


def test_serve_has_a_flag_for_every_engine_setting_and_help_for_each():
    from foliolm.cli.flags import _help_texts
    from foliolm.core.config import config_fields

    texts = _help_texts()
    done = subprocess.run(
        [sys.executable, "-m", "foliolm", "serve", "--help"],
        capture_output=True, text=True, timeout=120, check=True, env={"COLUMNS": "300", "TERM": "dumb"},
    )  # fmt: skip
    for name in config_fields():
        assert len(texts[name]) > 5
        if name != "model":
            assert f"--{name.replace('_', '-')}" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--block-size", "0"], ["--block-size", "0", "at least 1"]),
        (["--dtype", "float8"], ["--dtype", "float8", "bfloat16"]),
        (["--watermark", "0.9"], ["--watermark", "0.9", "0.5"]),
        (["--port", "70000"], ["--port", "70000", "65535"]),
        (["--host", "no.such.host.invalid"], ["--host", "no.such.host.invalid"]),
        (["--shutdown-timeout", "-1"], ["--shutdown-timeout", "-1"]),
    ],
)
def test_wrong_flags_end_with_one_line_and_code_2(arguments, words):
    done = foliolm("serve", *arguments)
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert all(word in done.stderr for word in words), done.stderr


def test_a_port_in_use_is_said_before_anything_is_loaded():
    with socket.create_server(("127.0.0.1", 0)) as owner:
        port = owner.getsockname()[1]
        done = foliolm("serve", "/no/such/model", "--port", str(port))
    assert done.returncode == 2
    assert f"--port {port}" in done.stderr
    assert "in use" in done.stderr
    assert "/no/such/model" not in done.stderr


def test_an_unknown_command_or_flag_is_code_2():
    assert foliolm("sevre").returncode == 2
    assert foliolm("serve", "--no-such-flag").returncode == 2
