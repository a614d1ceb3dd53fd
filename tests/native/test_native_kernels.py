"""The native kernels against float64, on this CPU's best target and on the portable one."""

import ctypes
import math
import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foliolm.core.errors import ConfigError
from foliolm.executor.torch.measured import measure_limits
from foliolm.model.native_loader import load_native
from foliolm.model.native_lora import NativeLora
from foliolm.ops.lora import LoraRows
from foliolm.ops.native import abi, build, library
from foliolm.ops.native.abi import Format
from foliolm.ops.native.packed import pack_floats, pack_ggml
from foliolm.ops.native.target import TARGETS, best_target
from foliolm.shape.lora import HEAD
from support.tiny_models import kernels, ours, ours_on, reference, shape_of
from support.torch_engine import generate, request

# Of the largest result: what 32-bit sums, 16-bit and 8-bit activations may cost.
TOLERANCE = {
    Format.F32: 1e-5,
    Format.BF16: 1e-5,
    Format.I8: 1e-3,
    Format.Q8_0: 1e-3,
    Format.Q4_0: 0.03,
    Format.Q4_1: 0.03,
}


@pytest.fixture(scope="module", params=["native", "portable"])
def native(request):
    return kernels(request.param)


FEW = 4
"""Rows that 8-bit weights in blocks meet with 16 bits on every CPU; more have 8 where a CPU multiplies bytes."""


def tolerance(form, rows):
    return 0.03 if form is Format.Q8_0 and rows > FEW else TOLERANCE[form]


def product(lib, parts, bias, x, threads=2, lora=None, index=0, deterministic=False):
    structs = (abi.Weight * 3)(*(part.struct() for part in parts))
    linear = abi.Linear(len(parts), structs, None if bias is None else bias.data_ptr())
    y = torch.full((len(x), sum(part.n for part in parts)), math.nan)
    call = (ctypes.byref(linear), x.data_ptr(), len(x), y.data_ptr(), threads, deterministic, lora, index)
    lib.check(lib.calls.folio_linear(*call))
    return y


def error_of(form, got, x, weights, added=0.0):
    """The largest error of x · weightsᵀ + added, as a share of the largest result."""

    def error(taken):
        expected = taken.double() @ weights.double().T + added
        return float((got.double() - expected).abs().max()) / max(1.0, float(expected.abs().max()))

    # Where a CPU multiplies pairs of bfloat16, many rows are rounded as such weights are.
    return min(error(x), error(x.bfloat16())) if form is Format.BF16 else error(x)


def threads_on_one_core():
    """Which of this process' threads may run on a single core only, and that."""
    masks = {int(tid): os.sched_getaffinity(int(tid)) for tid in os.listdir("/proc/self/task")}
    return {tid: next(iter(mask)) for tid, mask in masks.items() if len(mask) == 1}


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="cores are chosen on Linux")
def test_as_many_threads_as_cores_keep_to_one_each(native):
    """Two that share one would wait for each other; the caller is free again afterwards, and so are other numbers."""
    allowed = os.sched_getaffinity(0)
    if len(allowed) < 2:
        pytest.skip("one core")
    weight, x = pack_floats(native, torch.randn(40, 64), Format.F32), torch.randn(20, 64)
    for _ in range(2):
        product(native, [weight], None, x, threads=len(allowed) + 1)
        before = threads_on_one_core()
        product(native, [weight], None, x, threads=len(allowed))
        kept = {tid: core for tid, core in threads_on_one_core().items() if tid not in before}
        assert len(kept) == len(set(kept.values())) == len(allowed) - 1
        assert set(kept.values()) <= allowed
        assert os.sched_getaffinity(0) == allowed


@settings(max_examples=25)
@given(
    st.sampled_from(list(Format)),
    st.integers(1, 70),
    st.integers(1, 200),
    st.one_of(st.integers(1, 20), st.integers(44, 70)),
    st.integers(1, 3),
    st.integers(0, 2**31),
)
def test_products_match_float64(native, form, n, k, rows, threads, seed):
    generator = torch.Generator().manual_seed(seed)
    parts = [pack_floats(native, torch.randn(n + i, k, generator=generator), form) for i in range(threads)]
    bias = torch.randn(sum(part.n for part in parts), generator=generator)
    x = torch.randn(rows, k, generator=generator)
    stored = torch.cat([part.rows(native, list(range(part.n))) for part in parts])
    got = product(native, parts, bias, x, threads)
    assert error_of(form, got.double() - bias.double(), x, stored) <= tolerance(form, rows)


@pytest.mark.parametrize("form", [Format.BF16, Format.Q8_0])
def test_deterministic_products_round_no_activations_for_speed(native, form):
    """Many rows may be rounded to what a CPU multiplies faster; with the setting a row is what it is alone."""
    weight = pack_floats(native, torch.randn(40, 99, generator=torch.Generator().manual_seed(6)), form)
    x = torch.randn(20, 99, generator=torch.Generator().manual_seed(7))
    together = product(native, [weight], None, x, deterministic=True)
    expected = x.double() @ weight.rows(native, list(range(40))).double().T
    assert (together.double() - expected).abs().max() <= TOLERANCE[form] * expected.abs().max()
    for at in (0, 19):
        assert torch.equal(product(native, [weight], None, x[at : at + 1], deterministic=True)[0], together[at])


def x_with_outliers(rows, k, every, size):
    x = torch.randn(rows, k, generator=torch.Generator().manual_seed(5))
    x[::every, 37] = size
    return x


@pytest.mark.parametrize("form", [Format.Q4_0, Format.Q4_1])
@pytest.mark.parametrize(("rows", "deterministic"), [(40, False), (70, True)])
def test_4_bit_products_of_a_row_are_the_same_in_whatever_batch(native, form, rows, deterministic):
    """Few rows meet the weights as they are stored, many may meet them expanded; the same sums in the same order. Even
    more meet them as bytes, where the CPU multiplies bytes, but not with the setting."""

    def of(x):
        return product(native, [weight], None, x, deterministic=deterministic)

    weight = pack_floats(native, torch.randn(50, 1000, generator=torch.Generator().manual_seed(6)), form)
    x = x_with_outliers(rows, 1000, 3, 400.0)
    x[4] *= 1e-35  # next to nothing
    x[5] = 0
    together = of(x)
    assert torch.isfinite(together).all()
    for at in (0, 3, 4, 5, 31, rows - 1):
        assert torch.equal(of(x[at : at + 1])[0], together[at])
    assert torch.equal(of(x[rows - 10 :]), together[rows - 10 :])


@pytest.mark.parametrize("form", [Format.Q4_0, Format.Q4_1])
def test_4_bit_weights_as_bytes_keep_seven_bits(native, form):
    """Many rows: what weights lose by a scale for 128 of them is no more than what activations lose in 8 bits."""
    weight = pack_floats(native, torch.randn(100, 1000, generator=torch.Generator().manual_seed(6)), form)
    x = torch.randn(70, 1000, generator=torch.Generator().manual_seed(5))
    exact = x.double() @ weight.rows(native, list(range(100))).double().T

    def loss(got):
        return float((got - exact).norm() / exact.norm())

    stored, many = product(native, [weight], None, x, deterministic=True), product(native, [weight], None, x)
    assert loss(stored) < 0.008
    assert loss(many) < 0.012
    assert torch.equal(stored, many) != (native.name == "avx512-vnni")  # which alone makes bytes


@pytest.mark.parametrize("form", [Format.Q4_0, Format.Q4_1])
@pytest.mark.parametrize("rows", [1, 40, 60])
def test_an_outlier_leaves_its_neighbours_their_bits(native, form, rows):
    """8 bits a group alone would round what lies beside the outlier to whole multiples of 3."""
    w = torch.randn(20, 1000, generator=torch.Generator().manual_seed(6))
    w[:, :32] = 0
    w[:, 64:] = 0  # only the outlier's group counts
    weight = pack_floats(native, w, form)
    x = x_with_outliers(rows, 1000, 1, 400.0)
    expected = x.double() @ weight.rows(native, list(range(20))).double().T
    beside = x.clone()
    beside[:, 37] = 0
    scale = (beside.double() @ weight.rows(native, list(range(20))).double().T).abs().max()
    assert (product(native, [weight], None, x).double() - expected).abs().max() < 0.03 * scale


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("form", [Format.I8, Format.Q8_0, Format.Q4_0, Format.Q4_1])
def test_a_row_that_is_not_finite_gives_no_result_and_harms_nobody(native, form, bad):
    weight = pack_floats(native, torch.randn(20, 96, generator=torch.Generator().manual_seed(6)), form)
    x = torch.ones(9, 96)
    alone = product(native, [weight], None, x)
    x[4, 7] = bad
    got = product(native, [weight], None, x)
    assert torch.isnan(got[4]).all()
    assert torch.equal(got[[0, 3, 5, 8]], alone[[0, 3, 5, 8]])


def likeliest(lib, parts, bias, x, threads):
    structs = (abi.Weight * 3)(*(part.struct() for part in parts))
    linear = abi.Linear(len(parts), structs, None if bias is None else bias.data_ptr())
    best, index = torch.full((len(x),), 7.0), torch.full((len(x),), -1)
    call = (ctypes.byref(linear), x.data_ptr(), len(x), threads, 0, best.data_ptr(), index.data_ptr())
    lib.check(lib.calls.folio_likeliest(*call))
    return best.numpy(), index.numpy()


@settings(max_examples=25)
@given(
    st.sampled_from([Format.F32, Format.Q4_1]),
    st.sampled_from([1, 15, 16, 33, 4095, 4096, 4097, 9000]),
    st.integers(1, 40),
    st.integers(1, 3),
    st.lists(st.tuples(st.integers(0, 39), st.integers(0, 8999), st.sampled_from([math.nan, math.inf, -math.inf]))),
    st.integers(0, 2**31),
)
def test_the_likeliest_are_numpys_of_the_products(native, form, n, rows, threads, odd, seed):
    """Values repeat, so that there are ties; some are infinite or no number."""
    generator = torch.Generator().manual_seed(seed)
    weight = pack_floats(native, torch.randint(-2, 3, (n, 8), generator=generator).float(), form)
    x = torch.randint(-2, 3, (rows, 8), generator=generator).float()
    bias = torch.zeros(n)
    for row, column, value in odd:
        if row % 2:
            x[row % rows, 0] = value
        else:
            bias[column % n] = value
    y = product(native, [weight], bias, x, threads).numpy()
    best, index = likeliest(native, [weight], bias, x, threads)
    assert np.array_equal(index, y.argmax(-1))
    assert np.array_equal(best, y[np.arange(rows), y.argmax(-1)], equal_nan=True)


@settings(max_examples=25)
@given(
    st.sampled_from(list(Format)),
    st.sampled_from([Format.F32, Format.BF16]),
    st.tuples(st.integers(1, 70), st.integers(1, 100)),
    st.lists(st.integers(-1, 2), min_size=1, max_size=120),
    st.lists(st.integers(0, 40), min_size=3, max_size=3),
    st.integers(1, 3),
    st.integers(0, 2**31),
)
def test_adapters_products_match_float64(native, form, stored, sizes, slots, ranks, threads, seed):
    """Rows of three adapters and of none, in any order; a rank of 0 stands for one that does not touch this linear."""
    n, k = sizes
    shape = replace(shape_of(reference("llama"), "llama"), num_layers=1, hidden_size=k, vocab_size=n)
    lora = NativeLora(shape, native, n, 3, stored)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(len(slots), k, generator=generator)
    weight = pack_floats(native, torch.randn(n, k, generator=generator), form)
    added = torch.zeros(len(slots), n, dtype=torch.float64)
    bare = product(native, [weight], None, x, threads)
    mine = torch.tensor(slots)
    for slot, rank in enumerate(ranks):
        a, b = (torch.randn(*size, generator=generator) for size in ((max(1, rank), k), (n, max(1, rank))))
        if rank:
            lora.put(slot, lora.pack({(HEAD, "lm_head"): (a, b)}))
            a, b = (t if stored == Format.F32 else t.to(torch.bfloat16) for t in (a, b))
            added[mine == slot] += x[mine == slot].double() @ a.double().T @ b.double().T
        else:
            lora.put(slot, lora.pack({(0, "q_proj"): (torch.ones(2, k), torch.ones(48, 2))}))
    rows = LoraRows(np.array(slots, np.int32), 3, torch.device("cpu"))
    got = product(native, [weight], None, x, threads, ctypes.pointer(lora.struct(rows)), lora.head_index)
    assert error_of(form, got, x, weight.rows(native, list(range(n))), added) <= tolerance(form, len(x))
    if form in (Format.F32, Format.BF16):
        assert torch.equal(got[mine < 0], bare[mine < 0])  # in whatever batch, rows of no adapter are as they were


def test_a_row_of_an_empty_slot_is_refused(native):
    lora = NativeLora(replace(shape_of(reference("llama"), "llama"), num_layers=1), native, 8, 2, Format.F32)
    weight = pack_floats(native, torch.ones(8, 48), Format.F32)
    rows = LoraRows(np.array([1], np.int32), 2, torch.device("cpu"))
    with pytest.raises(RuntimeError, match="slot that is empty"):
        product(native, [weight], None, torch.ones(1, 48), 1, ctypes.pointer(lora.struct(rows)), lora.head_index)


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q8_0", "Q4_K"])
def test_ggml_blocks_keep_their_values(native, name):
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    kind = GGMLQuantizationType[name]
    generator = np.random.default_rng(3)
    n, k = 21, 512
    width = {"Q4_0": 18 * 16, "Q4_1": 20 * 16, "Q8_0": 34 * 16, "Q4_K": 144 * 2}[name]
    rows = generator.integers(0, 256, (n, width), np.uint8)
    blocks = rows.reshape(n, -1, {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34, "Q4_K": 144}[name])
    scales = 1 if name in ("Q4_0", "Q8_0") else 2
    blocks[:, :, : 2 * scales] = (
        generator.uniform(0.01, 2, (*blocks.shape[:2], scales)).astype(np.float16).view(np.uint8)
    )
    packed = pack_ggml(native, name, (n, k), rows)
    assert packed is not None
    expected = dequantize(rows, kind).reshape(n, k)
    # Q4_K's sub-block scales are a product of two; it is kept in half precision.
    limit = 1e-3 * np.abs(expected).max() if name == "Q4_K" else 0.0
    assert np.abs(packed.rows(native, list(range(n))).numpy() - expected).max() <= limit


def test_a_type_without_a_kernel_is_refused(native):
    assert pack_ggml(native, "Q3_K", (1, 256), np.zeros((1, 110), np.uint8)) is None


def rotation(k):
    """[k, k] float64: normalised Hadamard matrices of 64, then of what is left in powers of two, down the diagonal."""
    blocks, left = [], k
    while left:
        block = torch.ones(1, 1, dtype=torch.float64)
        while len(block) < 64 and 2 * len(block) <= left:
            block = torch.cat([torch.cat([block, block], 1), torch.cat([block, -block], 1)])
        blocks.append(block / len(block) ** 0.5)
        left -= len(block)
    return torch.block_diag(*blocks)


ODD_SIZES = [1, 3, 63, 64, 96, 100, 127, 130, 200]


@pytest.mark.parametrize("k", ODD_SIZES)
def test_int8_rounds_the_rotated_row_to_half_a_step(native, k):
    w = torch.randn(40, k, generator=torch.Generator().manual_seed(1)).double()
    w[::3, k // 2] = 30.0
    got = pack_floats(native, w, Format.I8).rows(native, list(range(40))).double()
    turned = w @ rotation(k)
    step = turned.abs().amax(1, keepdim=True) / 127
    assert (((got - w) @ rotation(k)).abs() <= step * 0.501).all()


@pytest.mark.parametrize("k", ODD_SIZES)
def test_a_row_that_int8_can_hold_comes_back_as_it_was(native, k):
    """Whole numbers, turned: nothing is rounded away, so what is left is what the two rotations cost."""
    whole = torch.randint(-127, 128, (20, k), generator=torch.Generator().manual_seed(2)).double()
    whole[:, 0] = 127
    w = whole @ rotation(k) * 0.037
    packed = pack_floats(native, w, Format.I8)
    got = packed.rows(native, list(range(20))).double()
    assert (got - w).abs().max() <= 1e-6 * w.abs().max()
    x = torch.randn(7, k, generator=torch.Generator().manual_seed(3))
    x[1] *= 1e-35  # next to nothing
    x[2, k // 3] = 3000.0
    expected = x.double() @ w.T
    error = (product(native, [packed], None, x).double() - expected).abs().amax(1)
    limit = 1e-3 * x.double().norm(dim=1) * w.norm(dim=1).max() / k**0.5
    assert (error <= limit + 1e-30).all()


def test_int8_is_packed_alike_on_every_target():
    w = torch.randn(40, 127, generator=torch.Generator().manual_seed(4))
    best, portable = (pack_floats(kernels(target), w, Format.I8).data for target in ("native", "portable"))
    assert torch.equal(best, portable)


def test_an_outlier_among_weights_costs_its_row_little(native):
    """A scale for a row as it is would leave the others no more than a few steps."""
    w = torch.randn(40, 576, generator=torch.Generator().manual_seed(1))
    w[:, 100] = 60.0
    error = pack_floats(native, w, Format.I8).rows(native, list(range(40))) - w
    plain = w - (w / (60.0 / 127)).round() * (60.0 / 127)
    assert error.square().mean() < 0.1 * plain.square().mean()


@settings(max_examples=15)
@given(
    st.lists(st.sampled_from(list(Format)), min_size=3, max_size=3),
    st.integers(1, 40),
    st.integers(1, 200),
    st.integers(1, 20),
    st.integers(0, 2**31),
)
def test_parts_of_unlike_formats_share_their_input(native, forms, n, k, rows, seed):
    """Each takes the form of activations that it wants: a linear of int8, rotated, and of stored blocks, not."""
    generator = torch.Generator().manual_seed(seed)
    forms = [*forms[:2], Format.I8] if Format.Q8_0 in forms[:2] else forms
    parts = [pack_floats(native, torch.randn(n + i, k, generator=generator), form) for i, form in enumerate(forms)]
    x = torch.randn(rows, k, generator=generator)
    got, at = product(native, parts, None, x), 0
    for part, form in zip(parts, forms, strict=True):
        stored = part.rows(native, list(range(part.n)))
        assert error_of(form, got[:, at : at + part.n], x, stored) <= tolerance(form, rows)
        at += part.n


SHAPES = [
    ("llama", {"head_dim": 64, "num_attention_heads": 3, "num_key_value_heads": 3}),
    ("llama", {"head_dim": 80, "num_attention_heads": 4, "num_key_value_heads": 1}),
    ("qwen2", {"num_attention_heads": 6, "num_key_value_heads": 2}),
    ("qwen3", {"head_dim": 96, "num_attention_heads": 8, "num_key_value_heads": 2}),
    ("mistral", {"head_dim": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "sliding_window": 20}),
    ("llama", {"head_dim": 256, "num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": True}),
]


@pytest.mark.parametrize(("kind", "config"), SHAPES, ids=[f"{kind}-{i}" for i, (kind, _) in enumerate(SHAPES)])
@pytest.mark.parametrize("target", ["native", "portable"])
def test_logprobs_are_pytorchs_for_every_shape(target, kind, config):
    """Mixed lengths, so that prompts, chunks and decodes share steps; every prompt position's logprob is compared."""
    theirs = reference(kind, **config)
    overrides = {"sliding_window": config["sliding_window"]} if "sliding_window" in config else {}
    models = [ours(theirs, kind, **overrides), ours_on(target, theirs, kind, **overrides)]
    prompts = [[(7 * i * i + 11 * n) % 160 for i in range(n)] for n in (1, 9, 40, 70)]
    runs = [
        generate(
            model,
            [request(i, prompt, max_tokens=6, prompt_logprobs=0) for i, prompt in enumerate(prompts)],
            chunk=17,
            block_size=8,
        )
        for model in models
    ]
    for i in range(len(prompts)):
        plain, native = (run.by_id[i] for run in runs)
        assert native.tokens == plain.tokens
        for a, b in zip(plain.prompt_logprobs[1:], native.prompt_logprobs[1:], strict=True):
            assert a.logprob == pytest.approx(b.logprob, abs=2e-4)


@pytest.mark.parametrize("kv", [torch.float32, torch.int8])
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(("target", "kind"), [("native", "llama"), ("native", "mistral"), ("portable", "llama")])
def test_many_rows_are_what_they_are_in_small_steps(target, kind, threads, kv, monkeypatch):
    """In a step of hundreds of tokens each thread takes lots of them alone; in small ones all share each product."""
    sizes = {"head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3}
    windows = {"sliding_window": 50} if kind == "mistral" else {}
    model = ours_on(target, reference(kind, **sizes, **windows), kind, **windows)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    model.kv_dtype = kv
    model.deterministic = True
    prompts = [[(7 * i * i + 11 * n) % 160 for i in range(n)] for n in (390, 3, 200)]
    asked = [request(i, prompt, max_tokens=3, prompt_logprobs=0) for i, prompt in enumerate(prompts)]
    large, small = (generate(model, asked, chunk=chunk, block_size=16) for chunk in (1000, 100))
    for i in range(len(prompts)):
        assert large.by_id[i].tokens == small.by_id[i].tokens
        assert large.by_id[i].prompt_logprobs[1:] == small.by_id[i].prompt_logprobs[1:]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("target", ["native", "portable"])
def test_an_int8_model_is_the_float_model_of_its_rounded_weights(target, tied):
    """Rotated or not, look-up of the embedding and head included: all that differs are 16-bit activations."""
    sizes = {"hidden_size": 72, "head_dim": 16, "intermediate_size": 100, "tie_word_embeddings": tied}
    theirs = reference("qwen3", **sizes)
    shape, lib = shape_of(theirs, "qwen3"), kernels(target)
    weights = dict(theirs.state_dict())
    rounded = {
        name: pack_floats(lib, value, Format.I8).rows(lib, list(range(len(value)))) if value.dim() == 2 else value
        for name, value in weights.items()
    }
    models = [load_native(lib, shape, weights.items(), weights="int8"), load_native(lib, shape, rounded.items())]
    prompt = [(7 * i * i + 3) % 160 for i in range(40)]
    a, b = (
        generate(model, [request(0, prompt, max_tokens=4, prompt_logprobs=0)], chunk=17).by_id[0] for model in models
    )
    assert [e.logprob for e in a.prompt_logprobs[1:]] == pytest.approx(
        [e.logprob for e in b.prompt_logprobs[1:]], abs=0.003
    )


@pytest.mark.parametrize(("kv", "limit"), [(torch.bfloat16, 0.15), (torch.int8, 0.15)])
@pytest.mark.parametrize("target", ["native", "portable"])
def test_a_smaller_kv_cache_changes_little(target, kv, limit):
    theirs = reference("llama", head_dim=64, num_attention_heads=4, num_key_value_heads=2)
    exact = ours_on(target, theirs, "llama")
    rounded = ours_on(target, theirs, "llama")
    rounded.kv_dtype = kv
    prompt = [(7 * i * i + 3) % 160 for i in range(90)]
    entries = [
        generate(model, [request(0, prompt, max_tokens=1, prompt_logprobs=0)], chunk=23).by_id[0].prompt_logprobs[1:]
        for model in (exact, rounded)
    ]
    gaps = [abs(a.logprob - b.logprob) for a, b in zip(*entries, strict=True)]
    assert 0 < max(gaps) < limit


@pytest.mark.parametrize(("kind", "config"), [SHAPES[1], SHAPES[4]], ids=["llama", "mistral"])
@pytest.mark.parametrize("kv", [torch.float32, torch.int8])
@pytest.mark.parametrize("target", ["native", "portable"])
def test_deterministic_results_are_the_same_in_whatever_batch_and_chunks(target, kind, config, kv):
    """Bit by bit; and not without the setting, else it would do nothing."""
    theirs = reference(kind, **config)
    overrides = {"sliding_window": config["sliding_window"]} if "sliding_window" in config else {}
    model = ours_on(target, theirs, kind, **overrides)
    model.kv_dtype = kv
    prompts = [[(7 * i * i + 11 * n) % 160 for i in range(n)] for n in (1, 9, 40, 150)]
    asked = [request(i, prompt, max_tokens=12, logprobs=2, prompt_logprobs=0) for i, prompt in enumerate(prompts)]

    def outcomes(groups, chunk):
        """Tokens and logprobs of the requests, run group by group."""
        found = {}
        for group in groups:
            run = generate(model, [asked[i] for i in group], chunk=chunk, block_size=8)
            for i in group:
                entries = [*run.by_id[i].prompt_logprobs[1:], *run.by_id[i].logprobs]
                found[i] = (run.by_id[i].tokens, [entry.logprob for entry in entries])
        return found

    settings = [([[0], [1], [2], [3]], 1000), ([[0, 1, 2, 3]], 17), ([[3, 1], [2, 0]], 64)]
    loose = [outcomes(*setting) for setting in settings]
    assert any(other != loose[0] for other in loose[1:])
    model.deterministic = True
    first, *others = (outcomes(*setting) for setting in settings)
    assert all(other == first for other in others)
    for i in range(len(prompts)):
        (tokens, logprobs), (loose_tokens, loose_logprobs) = first[i], loose[0][i]
        # Where two tokens are next to as likely, either may come; what follows is then another text.
        alike = next((n for n, pair in enumerate(zip(tokens, loose_tokens, strict=True)) if pair[0] != pair[1]), 11)
        compared = len(logprobs) - len(tokens) + alike + 1
        assert logprobs[:compared] == pytest.approx(loose_logprobs[:compared], abs=0.15 if kv == torch.int8 else 2e-4)


def test_the_best_target_is_one_that_the_cpu_has():
    assert best_target(frozenset()).name == "portable"
    assert best_target(TARGETS[1].needs).name == "avx2"
    assert best_target(TARGETS[0].needs).name == "avx512-vnni"


def test_without_a_compiler_pytorch_serves_and_says_why(monkeypatch, tmp_path):
    library.load_library.cache_clear()
    monkeypatch.setenv("FOLIOLM_HOME", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    try:
        choice = library.choose_kernels("auto")
        assert choice.library is None
        assert "no C++ compiler" in choice.reason
        with pytest.raises(ConfigError, match="native"):
            library.choose_kernels("native")
    finally:
        library.load_library.cache_clear()


def test_kernels_that_the_cpu_lacks_are_refused(monkeypatch):
    monkeypatch.setattr(library, "cpu_features", lambda: frozenset({"sse2"}))
    with pytest.raises(ConfigError, match=r"lacks .*avx2"):
        library.choose_kernels("avx2")


def test_a_failing_compiler_says_its_first_error(monkeypatch, tmp_path):
    monkeypatch.setenv("FOLIOLM_HOME", str(tmp_path))
    monkeypatch.setattr(build, "COMMON_FLAGS", ("-std=c++20", "-include", str(tmp_path / "nowhere.h")))
    with pytest.raises(build.BuildError, match=r"nowhere\.h"):
        build.built_library(TARGETS[-1])


def test_sizes_are_the_models_own(native):
    theirs = reference("qwen3")
    model = ours_on("native", theirs, "qwen3")
    assert model.shape == shape_of(theirs, "qwen3")
    matrices = sum(p.numel() for name, p in theirs.named_parameters() if p.dim() == 2)
    assert model.weight_bytes >= 4 * matrices


def test_the_machines_limits_are_measured_through_the_models_own_kernels(native):
    oracle = reference("llama")
    model = load_native(native, shape_of(oracle, "llama"), oracle.state_dict().items(), weights="int8")
    found = measure_limits(model)
    assert found.compute == f"{native.name} kernels, i8 weights"
    assert found == measure_limits(model), "a process measures once"
    assert 1e8 < found.read_bytes_per_s < 1e13
    assert 1e8 < found.flops_per_s < 1e14
    plain = measure_limits(ours(oracle, "llama"))
    assert plain.compute == "PyTorch on cpu, float32"
