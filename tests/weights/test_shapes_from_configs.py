"""Shapes read from configs, against transformers' own configs."""

import pytest
import transformers

from foliolm.core.errors import ModelError
from foliolm.shape.hf_config import shape_from_config
from foliolm.shape.model import RopeScaling
from support.tiny_models import reference, shape_of

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 128}
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}


def config(kind: str = "llama", **fields):
    return {**reference(kind).config.to_dict(), "dtype": "float32", **fields}


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_shape_is_that_of_transformers_model(kind, tied) -> None:
    model = reference(kind, tie_word_embeddings=tied)
    expected = shape_of(model, kind, weight_bits=32.0)
    assert shape_from_config({**model.config.to_dict(), "dtype": "float32"}, f"tiny-{kind}") == expected


@pytest.mark.parametrize(
    ("rope", "expected", "context"),
    [
        (LLAMA3, RopeScaling("llama3", 8.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0), 512),
        (YARN, RopeScaling("yarn", 4.0, 128), 512),
        (LINEAR, RopeScaling("linear", 2.0), 1024),
    ],
)
def test_rope_is_read_in_both_spellings(rope, expected, context) -> None:
    new = shape_from_config(config(rope_parameters=rope), "m")
    old_scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    old_config = {key: value for key, value in config().items() if key != "rope_parameters"}
    old = shape_from_config({**old_config, "rope_theta": rope["rope_theta"], "rope_scaling": old_scaling}, "m")
    older_scaling = {("type" if key == "rope_type" else key): value for key, value in old_scaling.items()}
    older = shape_from_config({**old_config, "rope_theta": rope["rope_theta"], "rope_scaling": older_scaling}, "m")
    assert new == old == older
    assert (new.rope_scaling, new.rope_theta, new.max_position_embeddings) == (expected, rope["rope_theta"], context)


def test_yarn_takes_the_written_context_as_the_trained_one_where_no_other_is_written() -> None:
    rope = {"rope_type": "yarn", "factor": 4.0}
    shape = shape_from_config(config(rope_parameters=rope), "m")
    assert (shape.rope_scaling.original_max_position, shape.max_position_embeddings) == (512, 2048)


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "su", "made-up"])
def test_an_unsupported_rope_is_named(kind) -> None:
    with pytest.raises(ModelError, match=rf"rope_type '{kind}'.*default, linear, llama3, yarn"):
        shape_from_config(config(rope_parameters={"rope_type": kind, "factor": 2.0}), "m")


@pytest.mark.parametrize(
    "field",
    ["model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size",
     "max_position_embeddings"],
)  # fmt: skip
def test_a_missing_field_is_named(field) -> None:
    fields = config()
    del fields[field]
    with pytest.raises(ModelError, match=rf"my-model: config\.json has no {field}"):
        shape_from_config(fields, "my-model")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_size", "48"), ("hidden_size", 0), ("hidden_size", 48.0), ("num_hidden_layers", True),
        ("num_key_value_heads", 4), ("hidden_act", "gelu"), ("tie_word_embeddings", "yes"), ("rms_norm_eps", -1.0),
        ("partial_rotary_factor", 0.5), ("dtype", "int3"),
    ],
)  # fmt: skip
def test_a_senseless_field_is_named_with_its_value(field, value) -> None:
    with pytest.raises(ModelError, match=field) as error:
        shape_from_config(config(**{field: value}), "m")
    assert repr(value) in str(error.value)


def test_an_unknown_family_is_named() -> None:
    with pytest.raises(ModelError, match=r"'mamba'.*llama"):
        shape_from_config(config(model_type="mamba"), "m")


def test_qwen_windows_only_where_the_flag_says_so() -> None:
    window = {"sliding_window": 64, "max_window_layers": 1, "layer_types": None}
    off = shape_from_config(config("qwen2", use_sliding_window=False, **window), "m")
    on = shape_from_config(config("qwen2", use_sliding_window=True, **window), "m")
    assert (off.sliding_window, off.windowed_layers) == (None, ())
    assert (on.sliding_window, on.windowed_layers) == (64, (1, 2))


@pytest.mark.parametrize(
    ("name", "experts", "mla"),
    [
        ("MixtralConfig", (8, 2, 14336), None),
        ("Qwen3MoeConfig", (128, 8, 768), None),
        ("Qwen2MoeConfig", (60, 4, 1408), None),
        ("DeepseekV3Config", (256, 8, 2048), (512, 64, 128, 128, 1536)),
        ("GptOssConfig", (128, 4, 2880), None),
        ("Gemma2Config", None, None),
        ("Gemma3TextConfig", None, None),
    ],
)
def test_families_that_can_only_be_planned(name, experts, mla) -> None:
    theirs = getattr(transformers, name)()
    shape = shape_from_config({**theirs.to_dict(), "dtype": "bfloat16"}, name)
    assert (shape.num_layers, shape.hidden_size) == (theirs.num_hidden_layers, theirs.hidden_size)
    moe = shape.moe and (shape.moe.num_experts, shape.moe.experts_per_token, shape.moe.intermediate_size)
    assert moe == experts
    latent = shape.mla and (
        shape.mla.kv_lora_rank, shape.mla.qk_rope_head_dim, shape.mla.qk_nope_head_dim, shape.mla.v_head_dim,
        shape.mla.q_lora_rank,
    )  # fmt: skip
    assert latent == mla
    kinds = getattr(theirs, "layer_types", None) or []
    sliding = tuple(layer for layer, kind in enumerate(kinds) if kind == "sliding_attention")
    assert shape.windowed_layers == sliding


@pytest.mark.parametrize(
    ("quantised", "expected"),
    [
        ({"quant_method": "fp8"}, ("fp8", 8.0)),
        ({"quant_method": "mxfp4"}, ("mxfp4", 4.25)),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, ("awq", 4.15625)),
    ],
)
def test_stored_quantisation_is_read(quantised, expected) -> None:
    shape = shape_from_config(config(quantization_config=quantised), "m")
    assert (shape.weight_dtype, shape.weight_bits) == expected


def test_the_text_part_of_a_model_that_sees_is_taken() -> None:
    shape = shape_from_config({"model_type": "mistral3", "text_config": config("mistral")}, "m")
    assert (shape.family, shape.num_layers) == ("mistral", 3)
