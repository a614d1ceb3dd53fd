"""Models and devices by name, and parameter counts that equal the published ones."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from foliolm.core.errors import ConfigError
from foliolm.shape.device import device_from_dict, device_from_file
from foliolm.shape.inventory import Part, active_params, inventory, moe_layers, total_params
from foliolm.shape.load import load_device, load_model_shape
from foliolm.shape.presets import device_names, device_preset, model_names, model_preset
from foliolm.shape.probed import save_probed

NAMES = model_names()


@pytest.mark.parametrize("name", NAMES)
def test_parameter_count_equals_the_published_one(name):
    preset = model_preset(name)
    if preset.published_params is None:
        assert preset.confidence != "high"
        pytest.skip("the published count was not checked")
    assert total_params(preset.shape) == preset.published_params
    assert preset.source


def test_there_are_all_presets():
    assert len(NAMES) == 25
    assert len(device_names()) == 25
    assert sum(model_preset(name).published_params is not None for name in NAMES) == 22


def test_presets_agree_with_the_shared_ones(shared):
    for entry in json.loads((shared / "presets" / "models.json").read_text()):
        shape = model_preset(entry["id"]).shape
        assert total_params(shape) == entry["computed"]["total_params"], entry["id"]
        # There the final norm is left out of the active count.
        expected = entry["computed"]["active_params_per_token_excl_embedding_and_final_norm"] + shape.hidden_size
        assert active_params(shape) == expected, entry["id"]
    for entry in json.loads((shared / "presets" / "hardware.json").read_text()):
        device = device_preset(entry["id"])
        assert (device.bandwidth_gbps, device.bf16_tflops_dense, device.confidence) == (
            entry["bandwidth_gbps"],
            entry["bf16_tflops_dense"],
            entry["confidence"],
        )


def test_a_tied_head_is_counted_once_and_read_once():
    tied = model_preset("qwen3-4b").shape
    untied = replace(tied, tie_word_embeddings=False)
    assert total_params(untied) - total_params(tied) == tied.vocab_size * tied.hidden_size
    assert active_params(untied) == active_params(tied)


def test_moe_counts_layers_experts_and_active_ones():
    shape = model_preset("deepseek-v3").shape
    assert moe_layers(shape) == 58
    experts = sum(t.params for t in inventory(shape) if t.part is Part.EXPERT)
    assert experts == 58 * 256 * 3 * 7168 * 2048
    inactive = total_params(shape) - shape.vocab_size * shape.hidden_size - active_params(shape)
    assert inactive == experts * (256 - 8) // 256


def test_every_second_layer_may_be_moe():
    shape = model_preset("qwen3-30b-a3b").shape
    assert shape.moe is not None
    assert moe_layers(replace(shape, moe=replace(shape.moe, layer_step=2))) == 24
    assert moe_layers(replace(shape, moe=replace(shape.moe, layer_step=2, first_dense_layers=1))) == 24
    with pytest.raises(ConfigError, match="first_dense_layers is 49"):
        moe_layers(replace(shape, moe=replace(shape.moe, first_dense_layers=49)))


@pytest.mark.parametrize("name", ["qwen3-8b", "QWEN3-8B", "Qwen/Qwen3-8B", "qwen/qwen3-8b"])
def test_a_name_is_the_hub_id_or_its_last_part_in_any_case(name):
    assert load_model_shape(name).name == "Qwen/Qwen3-8B"


@pytest.mark.parametrize(
    ("name", "near"), [("qwen3-8", "qwen3-8b"), ("deepseekv3", "deepseek-v3"), ("llama-3.1-8", "llama-3.1-8b")]
)
def test_a_near_miss_suggests_the_nearest(name, near):
    with pytest.raises(ConfigError, match=near):
        load_model_shape(name)


def test_a_far_miss_lists_the_presets():
    with pytest.raises(ConfigError, match=r"presets: .*qwen3-8b"):
        load_model_shape("zzzzzz")
    with pytest.raises(ConfigError, match="did you mean h100-sxm"):
        load_device("h100sxm")


def test_memory_is_what_the_driver_reports_where_that_is_known():
    assert load_device("rtx4090").memory_bytes == 24081 * 2**20
    assert load_device("h100-sxm").memory_bytes == 80 * 2**30


def test_a_device_from_a_file(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"id": "mine", "memory_gb": 48, "bandwidth_gbps": 864, "bf16_tflops_dense": 100}))
    device = load_device(str(path))
    assert (device.memory_bytes, device.bandwidth, device.flops()) == (48 * 2**30, 864e9, 100e12)
    assert device.flops("fp8") == device.flops()  # no such arithmetic: it runs in 16 bits
    assert device_from_dict(device.to_dict()) == device


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"id": "x", "memory_gb": 1}, "'bandwidth_gbps' is missing"),
        ({"id": "x", "memory_gb": -1, "bandwidth_gbps": 1, "bf16_tflops_dense": 1}, "memory_gb is -1"),
        ({"id": "x", "memory_gb": 1, "bandwidth_gbps": float("nan"), "bf16_tflops_dense": 1}, "bandwidth_gbps is nan"),
        ({"id": "x", "memory_gb": 1, "bandwidth_gbps": 1}, "it needs bf16_tflops_dense"),
        ({"id": "x", "memory_gb": 1, "bandwidth_gbps": 1, "bf16_tflops": 1}, "unknown field 'bf16_tflops'"),
        ({"id": "x", "memory_gb": 1, "bandwidth_gbps": 1, "fp32_tflops": 1, "kind": "tpu"}, "kind is 'tpu'"),
        ({"id": 7, "memory_gb": 1, "bandwidth_gbps": 1, "fp32_tflops": 1}, "id is 7"),
    ],
)
def test_a_wrong_device_file_names_the_field(tmp_path, entry, said):
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps(entry))
    with pytest.raises(ConfigError, match=said):
        device_from_file(path)


def test_a_device_file_that_is_no_json(tmp_path):
    path = tmp_path / "wrong.json"
    path.write_text("{")
    with pytest.raises(ConfigError, match="not JSON"):
        load_device(str(path))
    with pytest.raises(ConfigError, match="No such file"):
        load_device(str(tmp_path / "none.json"))


def test_this_machine_is_what_was_probed(tmp_path, monkeypatch):
    monkeypatch.setenv("FOLIOLM_HOME", str(tmp_path / "home"))
    with pytest.raises(ConfigError, match="run: foliolm probe"):
        load_device("this-machine")
    save_probed(load_device("l4"))
    assert load_device("This-Machine") == load_device("l4")
    assert [path.name for path in (tmp_path / "home").iterdir()] == ["device.json"]


def test_a_config_json_and_its_preset_give_the_same_counts(tmp_path):
    config = {
        "model_type": "qwen3",
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 12288,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "torch_dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    for name in (tmp_path, tmp_path / "config.json"):
        assert total_params(load_model_shape(str(name))) == 8190735360
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        load_model_shape(str(tmp_path / ".."))


def test_family_traits_make_a_config_of_gpt_oss_count_exactly(tmp_path):
    config = {
        "model_type": "gpt_oss",
        "hidden_size": 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "intermediate_size": 2880,
        "vocab_size": 201088,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "attention_bias": True,
        "tie_word_embeddings": False,
        "max_position_embeddings": 131072,
        "quantization_config": {"quant_method": "mxfp4"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = load_model_shape(str(tmp_path))
    assert total_params(shape) == model_preset("gpt-oss-20b").published_params == 20914757184
    assert shape.windowed_layers == model_preset("gpt-oss-20b").shape.windowed_layers
