"""GGUF tensors: types, values, names, row order, against the gguf package and the original weights."""

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize

from foliolm.weights.checkpoint import open_path
from foliolm.weights.gguf_header import read_header
from foliolm.weights.gguf_types import TYPES
from support.tiny_files import add_value, embedded_model, gguf_name, state, write_gguf
from support.tiny_models import reference

K_QUANTS = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")


def tiny(kind: str, **sizes):
    return reference(kind, **{"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96, **sizes})


def test_block_sizes_are_those_of_the_gguf_package() -> None:
    for code, kind in TYPES.items():
        assert GGMLQuantizationType(code).name == kind.name
        assert GGML_QUANT_SIZES[GGMLQuantizationType(code)] == (kind.block_weights, kind.block_bytes)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_float_tensors_are_the_original_ones(kind: str, tied: bool, tmp_path) -> None:
    model = tiny(kind, tie_word_embeddings=tied)
    files = open_path(write_gguf(model, kind, tmp_path / "m.gguf"))
    original = state(model)
    read = dict(files.iter_tensors())
    assert set(read) == set(original)
    for name, tensor in read.items():
        assert tensor.dtype == torch.float32
        np.testing.assert_array_equal(tensor.numpy(), original[name], err_msg=name)


@pytest.mark.parametrize("quantised", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_quantised_tensors_are_what_the_gguf_package_reads(quantised: str, tmp_path) -> None:
    model = tiny("qwen2")  # no permutation: the package's reader gives the very same rows
    path = write_gguf(model, "qwen2", tmp_path / "m.gguf", quantised)
    files = open_path(path)
    theirs = {tensor.name: dequantize(tensor.data, tensor.tensor_type) for tensor in GGUFReader(path).tensors}
    original = state(model)
    for name, tensor in files.iter_tensors():
        np.testing.assert_array_equal(tensor.numpy(), theirs[gguf_name(name)].reshape(tensor.shape), err_msg=name)
        assert np.abs(tensor.numpy() - original[name]).max() < 0.2, name


@pytest.mark.parametrize("quantised", K_QUANTS)
def test_k_quants_are_what_the_gguf_package_reads(quantised: str, tmp_path) -> None:
    kind = GGMLQuantizationType[quantised]
    _, block_bytes = GGML_QUANT_SIZES[kind]
    rows = np.random.default_rng(7).integers(0, 256, (6, 2 * block_bytes), dtype=np.uint8)
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("blk.0.ffn_up.weight", rows, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensor = read_header(tmp_path / "m.gguf").tensors["blk.0.ffn_up.weight"]
    assert tensor.shape == (6, 512)
    data = np.memmap(tensor.path, np.uint8, "r", tensor.offset, (tensor.num_bytes,)).reshape(6, -1)
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(dequantize(data, kind), dequantize(rows, kind))


def test_raw_rows_stand_in_hugging_face_order(tmp_path) -> None:
    model = tiny("llama")
    files = open_path(write_gguf(model, "llama", tmp_path / "m.gguf", "Q4_1"))
    for name, tensor in files.iter_tensors():
        raw = files.raw_tensor(name)
        assert raw.shape == tuple(tensor.shape)
        floats = dequantize(raw.rows, GGMLQuantizationType[raw.type_name]).reshape(raw.shape)
        np.testing.assert_array_equal(floats, tensor.numpy(), err_msg=name)


def test_biases_of_q_and_k_are_put_back_in_order(tmp_path) -> None:
    model = tiny("llama", attention_bias=True)
    files = open_path(write_gguf(model, "llama", tmp_path / "m.gguf"))
    assert files.shape.qkv_bias
    assert files.shape.o_bias
    for name, tensor in files.iter_tensors():
        np.testing.assert_array_equal(tensor.numpy(), state(model)[name], err_msg=name)


def test_rope_freqs_are_exposed_and_are_no_weight(tmp_path) -> None:
    factors = np.linspace(1, 8, 8)
    path = write_gguf(tiny("llama"), "llama", tmp_path / "m.gguf", rope_freqs=factors)
    files = open_path(path)
    np.testing.assert_array_equal(files.rope_factors, factors.astype(np.float32))
    assert "rope_freqs.weight" not in dict(files.iter_tensors())


def test_metadata_of_every_scalar_type_is_read_as_the_gguf_package_reads_it(tmp_path) -> None:
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    for name, value in (("uint8", 250), ("int8", -5), ("uint16", 65000), ("int16", -300), ("int32", -70000)):
        getattr(writer, f"add_{name}")(f"t.{name}", value)
    for name, value in (("uint64", 2**60), ("int64", -(2**40)), ("float64", 0.1), ("float32", 0.25)):
        getattr(writer, f"add_{name}")(f"t.{name}", value)
    for key, value in (("t.bool", True), ("t.text", "naïve"), ("t.list", ["a", "é"]), ("t.ids", [3, 1, 2])):
        add_value(writer, key, value)
    writer.add_tensor("x", np.ones((2, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    ours = read_header(tmp_path / "m.gguf").metadata
    for key, field in GGUFReader(tmp_path / "m.gguf").fields.items():
        if key.startswith("t."):
            value = ours[key]
            assert (value.tolist() if isinstance(value, np.ndarray) else value) == field.contents(), key


def test_the_embedded_model() -> None:
    files = embedded_model()
    shape = files.shape
    assert (shape.family, shape.num_layers, shape.hidden_size, shape.num_heads) == ("llama", 30, 576, 9)
    assert (shape.num_kv_heads, shape.head_dim, shape.intermediate_size) == (3, 64, 1536)
    assert (shape.vocab_size, files.num_tokens, shape.rope_theta) == (49152, 49152, 100_000.0)
    assert shape.tie_word_embeddings
    assert (shape.weight_dtype, shape.weight_bits, shape.embedding_bits) == ("q4_1", 5.0, 8.5)
    assert files.eos_token_ids[0] == 2  # <|im_end|>
    assert 0 in files.eos_token_ids  # <|endoftext|>
    header = read_header(files.source)
    stored = header.tensors["blk.3.attn_k.weight"]
    data = np.memmap(stored.path, np.uint8, "r", stored.offset, (stored.num_bytes,)).reshape(192, -1)
    # Rows 0, 1 of a head in the file are rows 0 and 32 of it: the two that RoPE turns together.
    key = files.gguf.floats("model.layers.3.self_attn.k_proj.weight")
    in_file = dequantize(data, GGMLQuantizationType.Q4_1)
    np.testing.assert_array_equal(key[[64, 96, 65, 97]], in_file[64:68])
