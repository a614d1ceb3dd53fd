"""Adapters on disk: what is read of them, and what is refused with both numbers."""

import json
import math
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from foliolm.core.errors import RequestError
from foliolm.shape.lora import HEAD, adapter_params
from foliolm.weights.lora_files import open_adapter
from support.adapters import ALL, write_adapter
from support.tiny_models import reference, shape_of


@pytest.fixture(scope="module")
def model():
    return reference("llama")


@pytest.fixture(scope="module")
def shape(model):
    return shape_of(model, "llama")


def edit(folder, **changes):
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value != "gone"}))
    return folder


def edit_tensors(folder, change):
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def refused(folder, shape, *words, max_rank=16):
    with pytest.raises(RequestError) as caught:
        open_adapter(str(folder), shape, max_rank).read()
    for word in words:
        assert str(word) in str(caught.value), str(caught.value)
    assert caught.value.field == "lora_path"


def test_scale_is_alpha_over_rank_or_over_its_root(tmp_path, model, shape):
    """alpha 16, rank 64: 0.25, or rank-stabilised 2.0; patterns name modules of their own."""
    plain = open_adapter(str(write_adapter(tmp_path / "a", model, rank=16, alpha=4)), shape, 64)
    assert set(plain.scales.values()) == {0.25}
    stable = write_adapter(tmp_path / "b", model, ALL, rank=64, alpha=16, use_rslora=True, ranks={"v_proj": 4})
    edit(stable, alpha_pattern={r"layers\.1\.self_attn\.q_proj": 32})
    files = open_adapter(str(stable), shape, 64)
    assert files.scales[0, "q_proj"] == 2.0 and files.scales[1, "q_proj"] == 4.0
    assert files.scales[0, "v_proj"] == 16 / math.sqrt(4)
    assert files.max_rank == 64 and files.ranks[2, "v_proj"] == 4
    a, b = files.read()[1, "q_proj"]
    stored = load_file(stable / "adapter_model.safetensors")
    name = "base_model.model.model.layers.1.self_attn.q_proj"
    assert torch.equal(a, stored[f"{name}.lora_A.weight"])
    assert torch.equal(b, 4.0 * stored[f"{name}.lora_B.weight"])


def test_what_an_adapter_holds(tmp_path, model, shape):
    files = open_adapter(str(write_adapter(tmp_path / "a", model, (*ALL, "lm_head"), rank=4)), shape, 16)
    sizes = sum(tensor.numel() for tensor in load_file(tmp_path / "a" / "adapter_model.safetensors").values())
    body, head = adapter_params(shape, files.ranks)
    assert body + head == sizes and head == 4 * (160 + 48)
    assert (HEAD, "lm_head") in files.read()


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["q_proj", "v_proj"], "layers_to_transform": [0, 2]},
        {"target_modules": r".*layers\.[12]\.(self_attn\.k|mlp\.up)_proj"},
        {"target_modules": "all-linear", "exclude_modules": ["down_proj"], "use_rslora": True},
        {"target_modules": ["lm_head", "o_proj"], "rank_pattern": {"lm_head": 2}, "alpha_pattern": {"o_proj": 3}},
    ],
)
def test_what_peft_writes_is_read(tmp_path, settings, shape):
    """PEFT's own folder, its B matrices made random; each linear's change is what PEFT computes."""
    from peft import LoraConfig, get_peft_model

    base = reference("llama")
    peft = get_peft_model(base, LoraConfig(r=4, lora_alpha=6, task_type="CAUSAL_LM", **settings))
    generator = torch.Generator().manual_seed(5)
    changes = {}
    for name, module in peft.named_modules():
        if hasattr(module, "lora_B") and len(module.lora_B):
            weight = module.lora_B["default"].weight
            weight.data = torch.randn(weight.shape, generator=generator)
            changes[name.removeprefix("base_model.model.")] = module.get_delta_weight("default")
    peft.save_pretrained(tmp_path)
    pairs = open_adapter(str(tmp_path), shape, 16).read()
    assert len(pairs) == len(changes) > 0
    for (layer, module), (a, b) in pairs.items():
        (name,) = [name for name in changes if name.endswith(module) and (layer == HEAD or f"layers.{layer}." in name)]
        assert torch.allclose(b @ a, changes[name], atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"peft_type": "IA3"}, ("peft_type", "IA3")),
        ({"use_dora": True}, ("use_dora", "DoRA")),
        ({"modules_to_save": ["lm_head"]}, ("modules_to_save", "lm_head")),
        ({"bias": "all"}, ("bias", "'all'")),
        ({"lora_alpha": "gone"}, ("lora_alpha is missing",)),
        ({"r": 0}, ("r is 0", "at least 1")),
        ({"r": 8}, ("(4, 48)", "rank 8", "(8, 48)")),
        ({"r": 64}, ("rank is 64", "limit is 16", "--max-lora-rank")),
        ({"rank_pattern": {"q_proj": 64}}, ("rank is 64", "limit is 16")),
        ({"rank_pattern": ["q_proj"]}, ("rank_pattern", "an object")),
        ({"target_modules": ["q_proj", "embed_tokens"]}, ("'embed_tokens'", "lm_head")),
        ({"target_modules": ["q_proj"]}, ("v_proj.lora_", "target_modules does not name it")),
        ({"target_modules": ["q_proj", "v_proj", "o_proj"]}, ("lacks", "o_proj.lora_A.weight", "3 more of 18")),
        ({"target_modules": "(q_proj"}, ("no regular expression",)),
        ({"target_modules": 7}, ("target_modules is 7",)),
        ({"target_modules": []}, ("is no linear of",)),
        ({"init_lora_weights": "pissa_niter_4"}, ("pissa", "convert")),
        ({"layers_to_transform": ["x"]}, ("layers_to_transform",)),
        ({"fan_in_fan_out": True}, ("fan_in_fan_out",)),
        ({"lora_alpha": float("nan")}, ("lora_alpha is nan",)),
    ],
)
def test_what_is_not_served_is_refused_by_name(tmp_path, model, shape, changes, words):
    refused(edit(write_adapter(tmp_path / "a", model), **changes), shape, *words)


def test_tensors_that_do_not_fit_are_refused_with_both_shapes(tmp_path, model, shape):
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    wrong_base = write_adapter(tmp_path / "a", reference("llama", hidden_size=96))
    refused(wrong_base, shape, "(4, 96)", "(4, 48)")
    dora = write_adapter(tmp_path / "b", model)
    edit_tensors(dora, lambda t: t.update({f"{name}.lora_magnitude_vector": torch.ones(48)}))
    refused(dora, shape, "lora_magnitude_vector", "DoRA is not served")
    stranger = write_adapter(tmp_path / "c", model)
    edit_tensors(stranger, lambda t: t.update({"base_model.model.score.weight": torch.ones(2, 48)}))
    refused(stranger, shape, "'score.weight'", "no such linear")
    infinite = write_adapter(tmp_path / "d", model)
    edit_tensors(infinite, lambda t: t[f"{name}.lora_A.weight"].fill_(math.inf))
    refused(infinite, shape, "not finite", "q_proj.lora_A")
    whole = write_adapter(tmp_path / "e", model)
    edit_tensors(whole, lambda t: t.update({f"{name}.lora_A.weight": torch.ones(4, 48, dtype=torch.int32)}))
    refused(whole, shape, "stored as I32")
    resized = write_adapter(tmp_path / "f", model)
    edit_tensors(resized, lambda t: t.update({"base_model.model.model.embed_tokens.weight": torch.ones(170, 48)}))
    refused(resized, shape, "(170, 48)", "(160, 48)", "vocabulary of its own")


def test_folders_that_are_none(tmp_path, model, shape):
    refused(tmp_path / "nowhere", shape, "nowhere", "no folder")
    refused("x" * 5000, shape, "xxx")
    refused("nul\0byte", shape, "nul")
    folder = write_adapter(tmp_path / "a", model)
    (folder / "adapter_config.json").write_text("{")
    refused(folder, shape, "not JSON")
    folder = write_adapter(tmp_path / "b", model)
    (folder / "adapter_model.safetensors").unlink()
    refused(folder, shape, "holds no adapter_model.safetensors")
    folder = write_adapter(tmp_path / "c", model)
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    refused(folder, shape, "truncated")
    path.write_bytes(struct.pack("<Q", 20) + b"x" * 20)
    refused(folder, shape, "not a safetensors file")
