"""Field cases of kind G: model files that are tied, cut, split, padded, or not what they seem."""

import shutil
import struct
import subprocess
import sys
import unicodedata

import numpy as np
import pytest
import torch

from foliolm.core.errors import ModelError
from foliolm.model.loader import load_model
from foliolm.text.gguf_tokenizer import tokenizer_from_gguf
from foliolm.text.load import load_text
from foliolm.weights.checkpoint import open_path
from support.tiny_files import character_tokens, embedded_model, save_folder, state, write_gguf
from support.tiny_models import reference

LIMIT_MIB = 200
SIZES = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96}


def head_logits(files, hidden: torch.Tensor) -> torch.Tensor:
    """What our model's output head makes of hidden states, loaded as the executor loads it."""
    model = load_model(files.shape, files.iter_tensors(), dtype=torch.float32, num_tokens=files.num_tokens)
    with torch.inference_mode():
        return model.logits(hidden)


# --- G1: tied and untied output heads


@pytest.fixture(scope="module")
def hidden() -> torch.Tensor:
    return torch.randn(5, 64, generator=torch.Generator().manual_seed(3))


def expected_logits(model, hidden: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model.lm_head(hidden)


def add_head(folder, head: torch.Tensor) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "lm_head.weight": head}, folder / "model.safetensors", {"format": "pt"})


def test_g1_a_tied_head_is_the_embedding(tmp_path, hidden, caplog) -> None:
    model = reference("llama", tie_word_embeddings=True, **SIZES)
    folder = save_folder(model, tmp_path / "tied")
    expected = expected_logits(model, hidden)
    torch.testing.assert_close(head_logits(open_path(folder), hidden), expected)
    add_head(folder, model.model.embed_tokens.weight.detach().clone())
    torch.testing.assert_close(head_logits(open_path(folder), hidden), expected)
    assert "differs" not in caplog.text


def test_g1_a_second_head_that_differs_is_ignored_with_a_warning(tmp_path, hidden, caplog) -> None:
    model = reference("llama", tie_word_embeddings=True, **SIZES)
    folder = save_folder(model, tmp_path / "tied")
    add_head(folder, torch.zeros(160, 64))
    torch.testing.assert_close(head_logits(open_path(folder), hidden), expected_logits(model, hidden))
    assert "differs from the embedding" in caplog.text


def test_g1_an_untied_head_that_is_missing_fails_by_name(tmp_path) -> None:
    folder = save_folder(reference("llama", tie_word_embeddings=True, **SIZES), tmp_path / "untied")
    config = (folder / "config.json").read_text()
    assert '"tie_word_embeddings": true' in config
    (folder / "config.json").write_text(config.replace('"tie_word_embeddings": true', '"tie_word_embeddings": false'))
    with pytest.raises(ModelError, match=r"lm_head\.weight"):
        open_path(folder)


@pytest.mark.parametrize("tied", [True, False])
def test_g1_a_gguf_without_an_output_tensor_is_tied(tmp_path, hidden, tied) -> None:
    model = reference("llama", tie_word_embeddings=tied, **SIZES)
    files = open_path(write_gguf(model, "llama", tmp_path / "m.gguf"))
    assert files.shape.tie_word_embeddings is tied
    torch.testing.assert_close(head_logits(files, hidden), expected_logits(model, hidden))


def test_g1_any_parameter_left_out_fails_by_name(tmp_path) -> None:
    from safetensors.torch import load_file, save_file

    folder = save_folder(reference("qwen3"), tmp_path / "model")
    whole = load_file(folder / "model.safetensors")
    for name in ("model.norm.weight", "model.layers.1.self_attn.k_norm.weight", "model.layers.2.mlp.up_proj.weight"):
        rest = {key: tensor for key, tensor in whole.items() if key != name}
        save_file(rest, folder / "model.safetensors", {"format": "pt"})
        with pytest.raises(ModelError, match=name.replace(".", r"\.")):
            open_path(folder)


# --- G2: truncated and hostile files


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return write_gguf(reference("llama", **SIZES), "llama", tmp_path_factory.mktemp("g2") / "whole.gguf")


CHECK = r"""
import atexit, re, sys
from foliolm.cli.main import main

def peak():  # of this process alone: what the system reports of a child counts the memory of its parent's fork
    print("peak", re.search(r"VmHWM:\s+(\d+)", open("/proc/self/status").read())[1], file=sys.stderr)

atexit.register(peak)
main()
"""


def check_by_command(path) -> tuple[int, str, float]:
    """Exit code, stderr and peak MiB of ``foliolm pull PATH`` in a process of its own."""
    command = [sys.executable, "-c", CHECK, "pull", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    error, _, peak = done.stderr.rpartition("peak ")
    return done.returncode, error, int(peak) / 1024


@pytest.mark.parametrize("percent", [10, 50, 99, 99.99])
def test_g2_a_cut_file_is_refused_with_both_sizes(whole, tmp_path, percent) -> None:
    size = whole.stat().st_size
    kept = min(int(size * percent / 100), size - 1)
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(whole.read_bytes()[:kept])
    with pytest.raises(ModelError, match=r"cut\.gguf is truncated") as error:
        open_path(cut)
    assert f"{kept:,}" in str(error.value)


@pytest.mark.parametrize("kind", ["cut", "entries", "magic"])
def test_g2_the_command_refuses_it_in_little_memory(whole, tmp_path, kind) -> None:
    data = bytearray(whole.read_bytes())
    if kind == "cut":
        data = data[: len(data) // 2]
    elif kind == "entries":
        data[16:24] = struct.pack("<Q", 2**60)
    else:
        data[:4] = bytes(4)
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(data)
    code, error, peak = check_by_command(bad)
    assert code == 2
    assert "bad.gguf" in error
    assert {"cut": "truncated", "entries": "1,152,921,504,606,846,976", "magic": "bad magic"}[kind] in error
    assert "Traceback" not in error
    assert peak < LIMIT_MIB


def test_g2_every_count_and_length_is_held_against_the_files_size(whole, tmp_path) -> None:
    """A huge number in any eight bytes of the head: refused or harmless, never an allocation of that size."""
    data = whole.read_bytes()
    head = data.index(b"tokenizer.ggml.tokens")
    bad = tmp_path / "bad.gguf"
    refused = 0
    for at in [8, *range(16, head + 200, 7)]:
        bad.write_bytes(data[:at] + struct.pack("<Q", 2**61 + 3) + data[at + 8 :])
        try:
            open_path(bad)
        except ModelError as error:
            refused += "bad.gguf" in str(error)
    assert refused > 20


def test_g2_random_damage_never_ends_in_another_error(whole, tmp_path) -> None:
    data = whole.read_bytes()
    random = np.random.default_rng(17)
    bad = tmp_path / "bad.gguf"
    for _ in range(150):
        damaged = bytearray(data)
        for at in random.integers(0, 4000, 4):
            damaged[at] = random.integers(0, 256)
        bad.write_bytes(damaged)
        try:
            files = open_path(bad)
            load_text(files)
        except ModelError as error:
            assert str(error)


# --- G4: a tokenizer rebuilt from GGUF metadata


def corpus() -> list[str]:
    fixed = [
        "  two  spaces", "12345", "1 23 456 7890", "Cafe\u0301", "Café", "naïve", "👩‍👩‍👧‍👦", "🏳️‍🌈 flag", "🤷🏽‍♀️",
        "\ttab\ttabs\t", "line\r\nline\r\n", "\r", "\n", "\n\n\n", " ", "   ", " leading", "trailing ", "漢字かな",
        "한국어", "Привет, мир", "مرحبا بالعالم", "שלום", "ไทย", "हिन्दी", "½ ² Ⅷ ٣", "x²+y³", "१२३", " ٤٥٦", "①②",
        "don't I'll we've HE'S",
        "x86_64", "CamelCase snake_case", "https://example.org/a?b=c&d=e#f", "a\u00a0b", "zero\u200bwidth",
        "“quotes” — dashes…", "<|im_end|>", "<|im_start|>user", "def f(x):\n    return x**2\n",
        '{"a": [1, 2.5, null]}', "SELECT * FROM t WHERE a<>b;", "$\\frac{1}{2}$", "a" * 300,
    ]  # fmt: skip
    words = ["the", " model", "\n", " 42", "é", "  ", "漢", "🙂", "'s", "!", "\t", "Z", " résumé", "…", "3.14", "\r\n"]
    random = np.random.default_rng(23)
    made = ["".join(random.choice(words, 12)) for _ in range(200 - len(fixed))]
    return [*fixed, *made]


def test_g4_ids_are_those_of_transformers_tokenizer_of_the_same_file() -> None:
    from tokenizers.pre_tokenizers import Digits, Sequence
    from transformers import AutoTokenizer

    files = embedded_model()
    theirs = AutoTokenizer.from_pretrained(files.source.parent, gguf_file=files.source.name, local_files_only=True)
    plain = theirs.backend_tokenizer.pre_tokenizer
    # The model's own tokenizer.json splits numerals off one by one before all else. What transformers makes of the
    # file leaves that step out, which shows where white space stands before a numeral: there it gets the step.
    original = Sequence([Digits(individual_digits=True), plain])
    tokenizer, _ = load_text(files)
    texts = corpus()
    assert len(texts) == 200
    for text in texts:
        has_numerals = any(character.isnumeric() for character in text)
        theirs.backend_tokenizer.pre_tokenizer = original if has_numerals else plain
        ids = tokenizer.encode(text, parse_special=True)
        assert ids == theirs(text)["input_ids"], text
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_g4_an_unknown_pre_tokenizer_is_refused_by_name() -> None:
    metadata = {**embedded_model().gguf.metadata, "tokenizer.ggml.pre": "next-years-model"}
    with pytest.raises(ModelError, match="next-years-model"):
        tokenizer_from_gguf(metadata, "m.gguf")


def test_g4_composed_and_decomposed_letters_stay_apart() -> None:
    tokenizer, _ = load_text(embedded_model())
    composed, decomposed = "é", unicodedata.normalize("NFD", "é")
    assert tokenizer.decode(tokenizer.encode(composed)) == composed
    assert tokenizer.decode(tokenizer.encode(decomposed)) == decomposed


# --- G6: split GGUF files


@pytest.fixture
def parts(tmp_path):
    model = reference("llama", **SIZES)
    write_gguf(model, "llama", tmp_path / "tiny.gguf", split_tensors=11)
    found = sorted(tmp_path.glob("*.gguf"))
    assert [path.name for path in found] == [f"tiny-{number:05d}-of-00003.gguf" for number in (1, 2, 3)]
    return model, found


def test_g6_any_part_and_the_folder_give_all(parts) -> None:
    model, paths = parts
    for path in (*paths, paths[0].parent):
        read = dict(open_path(path).iter_tensors())
        assert set(read) == set(state(model))
        for name, tensor in read.items():
            np.testing.assert_array_equal(tensor.numpy(), state(model)[name])


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_g6_a_missing_part_is_named_from_any_other(parts, missing) -> None:
    _, paths = parts
    paths[missing].unlink()
    for path in paths:
        if path.exists():
            with pytest.raises(ModelError, match=rf"{paths[missing].name} is missing"):
                open_path(path)


def test_g6_a_renamed_part_is_named(parts) -> None:
    _, paths = parts
    renamed = paths[2].rename(paths[2].with_name("third.gguf"))
    with pytest.raises(ModelError, match=rf"{paths[2].name} is missing"):
        open_path(paths[0])
    with pytest.raises(ModelError, match=r"third\.gguf is part 3 of 3"):
        open_path(renamed)


def test_g6_parts_of_two_models_are_told_apart(parts) -> None:
    _, paths = parts
    shutil.copy(paths[0], paths[1])
    with pytest.raises(ModelError, match=rf"{paths[1].name} says that it is split 0"):
        open_path(paths[0])


def test_g6_a_wrong_count_is_an_error(parts) -> None:
    _, paths = parts
    data = bytearray(paths[1].read_bytes())
    at = data.index(b"split.count") + len(b"split.count") + 4
    assert data[at : at + 2] == struct.pack("<H", 3)
    data[at : at + 2] = struct.pack("<H", 5)
    paths[1].write_bytes(data)
    with pytest.raises(ModelError, match=r"of 5; by its name it is 1 of 3"):
        open_path(paths[0])


def test_g6_one_of_one_is_an_ordinary_file(tmp_path) -> None:
    path = write_gguf(reference("llama", **SIZES), "llama", tmp_path / "m.gguf")
    single = path.rename(tmp_path / "m-00001-of-00001.gguf")
    assert open_path(single).shape.num_layers == 3


# --- G8: vocabulary, token list and embedding rows that disagree


def test_g8_padding_rows_are_never_sampled(tmp_path) -> None:
    model = reference("llama", vocab_size=128, **SIZES)
    path = write_gguf(model, "llama", tmp_path / "m.gguf", tokens=character_tokens(100))
    for files in (open_path(path), open_path(save_folder(model, tmp_path / "folder", num_tokens=100))):
        assert (files.num_tokens, files.shape.vocab_size) == (100, 128)
        hidden = torch.randn(10_000, 64, generator=torch.Generator().manual_seed(5))
        logits = head_logits(files, hidden) / 5.0
        tokens = torch.multinomial(torch.softmax(logits, -1), 1, generator=torch.Generator().manual_seed(6))
        assert int(tokens.max()) < 100
        assert len(tokens.unique()) == 100


def test_g8_more_tokens_than_rows_is_an_error_with_both_numbers(tmp_path) -> None:
    model = reference("llama", vocab_size=100, **SIZES)
    path = write_gguf(model, "llama", tmp_path / "m.gguf", tokens=character_tokens(101))
    folder = save_folder(model, tmp_path / "folder", num_tokens=101)
    for bad in (path, folder):
        with pytest.raises(ModelError, match=r"101 tokens.*100 rows"):
            open_path(bad)


def test_g8_a_gguf_without_vocab_size_has_the_rows_of_its_embedding(tmp_path) -> None:
    model = reference("llama", vocab_size=128, **SIZES)
    path = write_gguf(
        model, "llama", tmp_path / "m.gguf", tokens=character_tokens(100), metadata={"llama.vocab_size": None}
    )
    files = open_path(path)
    assert (files.num_tokens, files.shape.vocab_size) == (100, 128)
    assert load_text(files)[0].num_tokens == 100
