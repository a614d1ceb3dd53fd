"""Loading: everything fits, or a sentence says what does not."""

import numpy as np
import pytest
import torch

from foliolm.core.errors import ModelError
from foliolm.model.loader import dummy_model, load_model, resolve_dtype
from foliolm.model.rotary import rotary_frequencies
from foliolm.ops.linear import PackedLinear, PlainLinear, can_pack
from foliolm.shape.model import MoEShape
from support.tiny_models import VOCAB, reference, shape_of
from support.torch_engine import generate, request


@pytest.fixture(scope="module")
def theirs():
    return reference("qwen2")


def load(theirs, weights, **fields):
    num_tokens = fields.pop("num_tokens", None)
    shape = shape_of(theirs, "qwen2", **fields)
    return load_model(shape, weights.items(), dtype=torch.float32, num_tokens=num_tokens)


def test_a_missing_parameter_is_named(theirs):
    weights = dict(theirs.state_dict())
    del weights["model.layers.1.self_attn.k_proj.bias"]
    with pytest.raises(ModelError, match=r"lack 'model\.layers\.1\.self_attn\.k_proj\.bias'$"):
        load(theirs, weights)


def test_a_wrong_shape_names_both(theirs):
    weights = dict(theirs.state_dict())
    name = "model.layers.0.mlp.up_proj.weight"
    weights[name] = weights[name][:-1]
    with pytest.raises(ModelError, match=r"up_proj.*\(79, 48\).*\(80, 48\)"):
        load(theirs, weights)


def test_a_parameter_that_the_model_has_not_is_an_error(theirs):
    weights = {**theirs.state_dict(), "model.layers.0.self_attn.o_proj.bias": torch.zeros(48)}
    with pytest.raises(ModelError, match=r"o_proj\.bias"):
        load(theirs, weights)


def test_a_parameter_given_twice_is_an_error(theirs):
    items = list(theirs.state_dict().items())
    with pytest.raises(ModelError, match="twice"):
        load_model(shape_of(theirs, "qwen2"), [*items, items[0]], dtype=torch.float32)


def test_a_tied_head_that_is_stored_all_the_same_is_fine():
    tied = reference("llama", tie_word_embeddings=True)
    weights = {**tied.state_dict(), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}
    assert "lm_head.weight" in weights
    assert load_model(shape_of(tied, "llama"), weights.items(), dtype=torch.float32).num_tokens == VOCAB


def test_order_and_kind_of_arrays_do_not_matter(theirs):
    weights = {name: np.asarray(value) for name, value in reversed(theirs.state_dict().items())}
    prompts = [request(1, range(30))]
    ours = generate(load(theirs, weights), prompts).by_id[1].tokens
    assert ours == generate(load(theirs, theirs.state_dict()), prompts).by_id[1].tokens


def test_more_tokens_than_embedding_rows_names_both_numbers(theirs):
    with pytest.raises(ModelError, match=r"161 tokens.*160 rows"):
        load(theirs, theirs.state_dict(), num_tokens=161)


def test_families_that_can_only_be_planned_are_refused(theirs):
    with pytest.raises(ModelError, match="deepseek"):
        load(theirs, {}, family="deepseek")
    with pytest.raises(ModelError, match="mixture of experts"):
        load(theirs, {}, moe=MoEShape(8, 2, 64))
    with pytest.raises(ModelError, match="7 heads"):
        load(theirs, {}, num_heads=7)


def test_rotary_factors_of_another_size_and_unknown_scalings_are_refused(theirs):
    from foliolm.shape.model import RopeScaling

    with pytest.raises(ModelError, match=r"rope_freqs has 3 values"):
        rotary_frequencies(shape_of(theirs, "qwen2"), np.ones(3))
    with pytest.raises(ModelError, match="original_max_position"):
        rotary_frequencies(shape_of(theirs, "qwen2", rope_scaling=RopeScaling("yarn", 2.0)))
    with pytest.raises(ModelError, match="longrope"):
        rotary_frequencies(shape_of(theirs, "qwen2", rope_scaling=RopeScaling("longrope", 2.0)))


def test_a_dummy_runs_and_repeats(theirs):
    shape = shape_of(theirs, "qwen2")
    prompts = [request(1, range(20))]
    texts = [generate(dummy_model(shape, dtype=torch.float32, seed=s), prompts).by_id[1].tokens for s in (3, 3, 4)]
    assert texts[0] == texts[1] != texts[2]


def test_weight_bytes_count_every_matrix(theirs):
    model = load(theirs, theirs.state_dict())
    stored = sum(value.numel() * 4 for value in theirs.state_dict().values())
    assert model.weight_bytes == stored


def test_auto_dtype_is_one_that_is_computed_natively():
    assert resolve_dtype("auto", torch.device("cuda")) is torch.bfloat16
    expected = torch.bfloat16 if can_pack(torch.bfloat16) else torch.float32
    assert resolve_dtype("auto", torch.device("cpu")) is expected
    with pytest.raises(ModelError, match="int3"):
        resolve_dtype("int3", torch.device("cpu"))


@pytest.mark.parametrize("with_bias", [False, True])
def test_linear_backends_agree(with_bias):
    torch.manual_seed(0)
    weight, bias = torch.randn(70, 33), torch.randn(70) if with_bias else None
    plain, packed = PlainLinear(weight, bias), PackedLinear(weight, bias)
    for rows in (1, 3, 16, 130):
        x, residual = torch.randn(rows, 33), torch.randn(rows, 70)
        kept = residual.clone()
        torch.testing.assert_close(packed(x), plain(x), atol=1e-4, rtol=0)
        torch.testing.assert_close(packed.add_to(residual, x), residual + plain(x), atol=1e-4, rtol=0)
        torch.testing.assert_close(plain.add_to(residual, x), residual + plain(x), atol=1e-4, rtol=0)
        assert torch.equal(residual, kept)
