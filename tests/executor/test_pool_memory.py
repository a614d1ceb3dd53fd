"""The KV pool's size, from the memory that is there."""

from pathlib import Path

import pytest
import torch

from foliolm.core.errors import ConfigError
from foliolm.executor.torch import memory
from foliolm.executor.torch.kv_tensors import KVTensors
from foliolm.executor.torch.memory import _cgroup_room, available_memory, size_kv_pool
from support.tiny_models import ours, reference

GIB = 1 << 30


@pytest.fixture(scope="module")
def model():
    return ours(reference("llama"), "llama")


def size(model, **fields):
    fields = {"block_size": 16, "max_model_len": 512, "max_num_batched_tokens": 256, "max_num_seqs": 32, **fields}
    return size_kv_pool(model, **fields)


@pytest.mark.parametrize(("free", "expected"), [(100 * GIB, 4 * GIB), (8 * GIB, 2 * GIB), (GIB, GIB // 4)])
def test_the_smaller_of_4_gib_and_a_quarter(monkeypatch, model, free, expected):
    monkeypatch.setattr(memory, "available_memory", lambda: free)
    result = size(model)
    per_block = 3 * 2 * 2 * 8 * 4 * 16  # layers, K and V, heads, head size, float32, tokens
    assert result.num_blocks == expected // per_block
    assert result.kv == result.num_blocks * per_block
    assert result.weights + result.activations + result.reserve + result.kv == result.limit
    assert result.num_tokens == (result.num_blocks - 1) * 16
    assert result.num_full_requests == pytest.approx(result.num_tokens / 512, rel=1e-3)
    for part in (
        "weights",
        "activations",
        "reserve",
        "kv",
        f"{result.num_blocks - 1} blocks",
        f"{result.num_tokens} tokens",
    ):
        assert part in result.describe()


def test_the_user_decides(monkeypatch, model):
    monkeypatch.setattr(memory, "available_memory", lambda: 8 * GIB)
    assert size(model, num_gpu_blocks_override=40).num_blocks == 41
    assert size(model, kv_cache_memory_bytes=GIB).kv <= GIB < size(model, kv_cache_memory_bytes=GIB).kv + 6144 * 16
    assert "--kv-cache-memory-bytes" in size(model, kv_cache_memory_bytes=GIB).describe()


def test_a_length_that_does_not_fit_names_the_largest_that_would(monkeypatch, model):
    monkeypatch.setattr(memory, "available_memory", lambda: 8 * GIB)
    with pytest.raises(ConfigError, match=r"--max-model-len 512; the largest that fits is 496"):
        size(model, num_gpu_blocks_override=31)
    assert size(model, num_gpu_blocks_override=32).num_full_requests == 1.0


def test_more_than_there_is_fails_before_it_is_taken(monkeypatch, model):
    monkeypatch.setattr(memory, "available_memory", lambda: GIB)
    with pytest.raises(ConfigError, match=r"2\.00 GiB.*exceeds"):
        size(model, kv_cache_memory_bytes=2 * GIB)


def test_the_pool_is_what_the_sum_says(model):
    result = size(model, num_gpu_blocks_override=40)
    kv = KVTensors(model.shape, model.dtype, model.device, result.num_blocks, 16)
    assert kv.nbytes == result.kv
    assert len(kv.layers) == 3
    assert not any(layer.keys.any() or layer.values.any() for layer in kv.layers)


def write(folder: Path, limit: str, used: int, stat: str) -> tuple[Path, Path, Path]:
    paths = (folder / "limit", folder / "usage", folder / "stat")
    for path, text in zip(paths, (limit, str(used), stat), strict=True):
        path.write_text(text)
    return paths


def test_cgroup_limits_of_both_versions(tmp_path):
    stat = "anon 5\ninactive_file 300\n"
    assert _cgroup_room(*write(tmp_path, "1000\n", 700, stat)) == 600
    assert _cgroup_room(*write(tmp_path, "max\n", 700, stat)) is None
    assert _cgroup_room(*write(tmp_path, "1000\n", 700, "total_inactive_file 100\ninactive_file 50\n")) == 400
    assert _cgroup_room(*write(tmp_path, "9223372036854771712\n", 700, stat)) is None, "version 1's no limit"
    assert _cgroup_room(tmp_path / "none", tmp_path / "none", tmp_path / "none") is None


def test_available_memory_is_within_the_machines(monkeypatch):
    import psutil

    assert 0 < available_memory() <= psutil.virtual_memory().total
    monkeypatch.setattr(memory, "_cgroup_files", lambda: [(Path("/a"), Path("/b"), Path("/c"))])
    monkeypatch.setattr(memory, "_cgroup_room", lambda *_: 12345)
    assert available_memory() == 12345


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_says_what_the_cpu_says():
    from foliolm.model.loader import load_model
    from support.same_tokens import assert_same_tokens
    from support.tiny_models import reference_greedy, shape_of
    from support.torch_engine import generate, request

    theirs = reference("llama", hidden_size=384, head_dim=64, initializer_range=0.06)
    shape = shape_of(theirs, "llama")
    model = load_model(shape, theirs.state_dict().items(), dtype=torch.bfloat16, device="cuda")
    halved = theirs.to(torch.bfloat16)
    prompts = [[(13 * i + n) % 160 for i in range(n)] for n in (1, 5, 40, 300)]
    run = generate(
        model, [request(i, p, max_tokens=4) for i, p in enumerate(prompts)], block_size=256, num_blocks=20, depth=1
    )
    for i, prompt in enumerate(prompts):
        tokens, gaps = reference_greedy(halved, prompt, 4)
        assert_same_tokens(run.by_id[i].tokens, tokens, [0.0 if gap < 0.1 else gap for gap in gaps])
