"""Hugging Face folders: single and sharded, and everything that can be wrong with one."""

import json
import shutil
import struct

import numpy as np
import pytest
import torch

from foliolm.core.errors import ConfigError, ModelError
from foliolm.weights.checkpoint import dummy_model, open_path
from support.tiny_files import save_folder, state
from support.tiny_models import reference

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def model():
    return reference("llama")


@pytest.fixture
def folder(model, tmp_path):
    return save_folder(model, tmp_path / "model")


@pytest.fixture
def shards(model, tmp_path):
    folder = save_folder(model, tmp_path / "sharded", max_shard_size="40KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


def edit(path, **values):
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**content, **values}))


def test_single_and_sharded_hold_the_same_tensors(model, folder, shards) -> None:
    for path in (folder, shards):
        files = open_path(path)
        read = dict(files.iter_tensors())
        assert set(read) == set(state(model))
        for name, tensor in read.items():
            np.testing.assert_array_equal(tensor.numpy(), state(model)[name])
        assert files.weight_bytes == sum(tensor.nbytes for tensor in read.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tensors_come_as_they_are_stored(model, dtype, tmp_path) -> None:
    half = reference("llama").to(dtype)
    files = open_path(save_folder(half, tmp_path / "half"))
    assert {tensor.dtype for _, tensor in files.iter_tensors()} == {dtype}
    assert files.shape.weight_dtype == str(dtype).removeprefix("torch.")


def test_shards_without_an_index_are_found_by_their_names(shards, model) -> None:
    (shards / INDEX).unlink()
    assert len(dict(open_path(shards).iter_tensors())) == len(state(model))
    last = sorted(shards.glob("*.safetensors"))[-1]
    last.unlink()
    with pytest.raises(ModelError, match=rf"{last.name} is missing"):
        open_path(shards)


def test_a_shard_that_the_index_names_but_that_is_not_there_is_named(shards) -> None:
    first = sorted(shards.glob("*.safetensors"))[0]
    first.unlink()
    with pytest.raises(ModelError, match=rf"{first.name} is missing"):
        open_path(shards)


def test_an_index_cannot_reach_outside_its_folder(shards) -> None:
    index = json.loads((shards / INDEX).read_text())
    name = next(iter(index["weight_map"]))
    index["weight_map"][name] = "../other.safetensors"
    (shards / INDEX).write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"\.\./other\.safetensors"):
        open_path(shards)


@pytest.mark.parametrize("share", [0.0001, 0.1, 0.5, 0.9999])
def test_a_truncated_file_is_refused_with_both_sizes(folder, share) -> None:
    path = folder / "model.safetensors"
    size = path.stat().st_size
    kept = int(size * share)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ModelError, match="truncated") as error:
        open_path(folder)
    assert f"{kept:,}" in str(error.value)


def test_a_header_that_claims_to_be_huge_is_refused(folder) -> None:
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2**60) + b"{}")
    with pytest.raises(ModelError, match="1,152,921,504,606,846,976"):
        open_path(folder)


def test_a_git_lfs_pointer_is_recognised(folder) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 538090408\n"
    (folder / "model.safetensors").write_text(pointer)
    with pytest.raises(ModelError, match=r"Git LFS pointer.*538090408"):
        open_path(folder)


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("config.json", "", "empty"),
        ("config.json", "{", "not JSON"),
        ("config.json", "[]", "must be an object"),
        ("config.json", "<!DOCTYPE html><html>", "web page"),
        ("model.safetensors", "\x10\0\0\0\0\0\0\0" + "x" * 16, "not a safetensors file"),
        ("tokenizer.json", "{}", "no model.vocab"),
    ],
)
def test_damaged_files_are_named(folder, name, content, told) -> None:
    (folder / name).write_text(content)
    with pytest.raises(ModelError, match=told) as error:
        open_path(folder)
    assert name in str(error.value)


def test_pickled_weights_alone_are_not_loaded(folder) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match="pickled"):
        open_path(folder)


def test_a_tensor_of_another_shape_is_named_with_both_shapes(folder) -> None:
    edit(folder / "config.json", intermediate_size=96)
    with pytest.raises(ModelError, match=r"gate_proj.*\[80, 48\].*\[96, 48\]"):
        open_path(folder)


def test_a_bias_that_the_config_does_not_know_is_refused(tmp_path) -> None:
    folder = save_folder(reference("llama", attention_bias=True), tmp_path / "biased")
    edit(folder / "config.json", attention_bias=False)
    with pytest.raises(ModelError, match=r"layers\.0\.self_attn\.\w_proj\.bias"):
        open_path(folder)


def test_layers_beyond_the_config_are_left_out(folder, caplog) -> None:
    edit(folder / "config.json", num_hidden_layers=2)
    files = open_path(folder)
    assert not any(name.startswith("model.layers.2.") for name, _ in files.iter_tensors())
    assert "not part of the model" in caplog.text


def test_quantised_weights_are_refused_by_method(folder) -> None:
    edit(folder / "config.json", quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 128})
    with pytest.raises(ModelError, match="gptq"):
        open_path(folder)


def test_a_model_that_can_only_be_planned_is_refused_by_family(folder) -> None:
    edit(folder / "config.json", model_type="mixtral", num_local_experts=4, num_experts_per_tok=2)
    with pytest.raises(ModelError, match=r"mixtral.*llama, mistral, qwen2, qwen3"):
        open_path(folder)


def test_several_end_tokens_and_the_defaults_come_from_the_configs(folder) -> None:
    edit(folder / "config.json", eos_token_id=[5, 7], bos_token_id=1)
    defaults = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.1, "do_sample": True}
    edit(
        folder / "generation_config.json",
        eos_token_id=[9, 5],
        bos_token_id=3,
        max_new_tokens=64,
        min_p=None,
        **defaults,
    )
    files = open_path(folder)
    assert files.eos_token_ids == (9, 5, 7)
    assert files.bos_token_id == 3
    expected = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.1, "max_tokens": 64}
    assert files.generation_defaults == expected


@pytest.mark.parametrize(
    ("field", "value"), [("temperature", -1), ("top_p", "0.9"), ("top_k", 2.5), ("eos_token_id", "x")]
)
def test_a_senseless_generation_config_is_named(folder, field, value) -> None:
    edit(folder / "generation_config.json", **{field: value})
    with pytest.raises(ModelError, match=rf"generation_config\.json has {field}"):
        open_path(folder)


def test_an_end_token_outside_the_vocabulary_is_refused(folder) -> None:
    edit(folder / "generation_config.json", eos_token_id=1000)
    with pytest.raises(ModelError, match=r"1000.*160"):
        open_path(folder)


def test_dummy_needs_no_weights(folder) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="holds no"):
        open_path(folder)
    files = open_path(folder, load_format="dummy")
    assert files.format == "dummy"
    assert files.shape.num_layers == 3
    with pytest.raises(ModelError, match="no weights"):
        next(files.iter_tensors())
    assert open_path(folder / "config.json", name=str(folder), load_format="dummy").shape == files.shape
    assert dummy_model(files.shape).num_tokens == 160


def test_an_unknown_load_format_is_refused(folder) -> None:
    with pytest.raises(ConfigError, match="npz"):
        open_path(folder, load_format="npz")


def test_a_folder_with_a_gguf_file_alone_is_that_file(tmp_path) -> None:
    from support.tiny_files import write_gguf

    model = reference("llama", hidden_size=64, num_attention_heads=4)
    path = write_gguf(model, "llama", tmp_path / "only.gguf")
    assert open_path(tmp_path).source == path
    shutil.copy(path, tmp_path / "other.gguf")
    with pytest.raises(ModelError, match=r"only\.gguf, other\.gguf"):
        open_path(tmp_path)
