"""Tokenizers rebuilt from GGUF metadata and read from folders, against the originals they were made from."""

import functools
import itertools
import json
import random
import re

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from foliolm.core.errors import ModelError
from foliolm.text.gguf_tokenizer import tokenizer_from_gguf
from foliolm.text.load import load_text
from foliolm.text.pretokenizers import RULES, pre_tokenizer
from foliolm.text.tokenizer import Tokenizer
from foliolm.weights.checkpoint import open_path
from support.tiny_files import add_value, character_tokenizer, save_folder
from support.tiny_models import reference

CORPUS = [
    "The quick brown fox jumps over the lazy dog, doesn't it? It's 12345 or 2024-05-17.",
    "    def function(argument):\n        return argument ** 2  # comment\n\n",
    "Größe, naïve café, déjà vu; МОСКВА Привет мир; 漢字かな交じり文。 안녕하세요",
    "WE'LL SHOUT!!! ... and/or (brackets) [more] {most} <html></html>\r\n\ttab",
    "3.14159 1,000,000 ½ ² Ⅷ ٣٤٥ x86_64 CamelCaseWordsHere snake_case_words",
] * 40
PROBES = [
    *CORPUS[:5], "  two  spaces", "12345", "Cafe\u0301",
    "👩‍👩‍👧‍👦 🏳️‍🌈", "\t\ttabs", "line\r\nline\r\n\r\n", "", " ", "\n\n\n a",
    "I'M I'm I'LL", "a\u00a0b", "x\u200by", "١٢٣٤", "don't", "…—–", "\ufffd", "ß\u0307", "a\0b",
]  # fmt: skip


@functools.cache
def trained(rule_name: str) -> Backend:
    """A byte-level BPE tokenizer trained with a rule's split."""
    rule = RULES[rule_name]
    backend = Backend(models.BPE(ignore_merges=rule.whole_words))
    spec = json.loads(backend.to_str())
    spec["pre_tokenizer"] = pre_tokenizer(rule)
    backend = Backend.from_str(json.dumps(spec))
    if rule.nfc:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=["<|endoftext|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def metadata_of(backend: Backend, pre: str) -> dict:
    spec = json.loads(backend.to_str())
    tokens = sorted(spec["model"]["vocab"], key=lambda token: spec["model"]["vocab"][token])
    special = {token["content"] for token in spec["added_tokens"]}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array([3 if token in special else 1 for token in tokens]),
        "tokenizer.ggml.merges": [" ".join(merge) for merge in spec["model"]["merges"]],
        "tokenizer.ggml.add_bos_token": False,
    }


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2", "tekken"])
def test_a_byte_level_tokenizer_is_the_one_it_was_made_from(pre) -> None:
    original = trained(pre)
    metadata = metadata_of(original, pre)
    ours = Tokenizer(tokenizer_from_gguf(metadata, "m.gguf"), len(metadata["tokenizer.ggml.tokens"]))
    for text in PROBES:
        ids = ours.encode(text, add_special_tokens=False)
        assert ids == original.encode(text, add_special_tokens=False).ids, text
        if not RULES[pre].nfc:
            assert ours.decode(ids) == text
    assert ours.encode("a<|im_end|>b", parse_special=True)[1] == 1


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "tekken"])
def test_split_rules_are_those_that_transformers_has(pre, tmp_path) -> None:
    from gguf import GGUFWriter
    from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

    metadata = metadata_of(trained(pre), pre)
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    for key, value in metadata.items():
        add_value(writer, key, value.tolist() if isinstance(value, np.ndarray) else value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    architecture, tokenizer_dict, _ = get_gguf_tokenizer(str(tmp_path / "m.gguf"))
    theirs, _ = convert_gguf_tokenizer(architecture, tokenizer_dict)
    ours = Backend.from_str(json.dumps(tokenizer_from_gguf(metadata, "m.gguf")))
    for text in PROBES:
        pieces = ours.pre_tokenizer.pre_tokenize_str(text)
        assert pieces == theirs.pre_tokenizer.pre_tokenize_str(text), text


def test_every_named_rule_can_be_built() -> None:
    for name in RULES:
        metadata = metadata_of(trained("gpt-2"), name)
        spec = tokenizer_from_gguf(metadata, "m.gguf")
        assert Tokenizer(spec, 700).encode("Hello 42", add_special_tokens=False)


def sentencepiece_metadata(**more) -> dict:
    """A SentencePiece vocabulary as GGUF files carry it: scores fall with the id, bytes for what is not in it."""
    words = [match for text in CORPUS[:5] for match in re.findall(r"\S+", text)]
    pieces: dict[str, None] = {}
    for length in (2, 3, 5, 8):
        for word in words:
            for start in range(0, len(word), length):
                pieces[("▁" if start == 0 else "") + word[start : start + length]] = None
    characters = sorted({character for piece in pieces for character in piece})
    pairs = sorted({piece[i : i + 2] for piece in pieces for i in range(len(piece) - 1)})
    normal = [*dict.fromkeys([*pairs, *(piece for piece in pieces if len(piece) > 1)]), *characters]
    random.Random(11).shuffle(normal)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *normal]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array([2, 3, 3, *[6] * 256, *[1] * len(normal)]),
        "tokenizer.ggml.scores": np.array([0.0] * 259 + [-float(rank) for rank in range(len(normal))], np.float32),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        **more,
    }


def sentencepiece_twin(metadata: dict, text: str) -> list[int]:
    """SentencePiece's own rule: join the two neighbours whose union scores best, leftmost first, until none does."""
    tokens = metadata["tokenizer.ggml.tokens"]
    ids = {token: number for number, token in enumerate(tokens)}
    normal = {t for t, kind in zip(tokens, metadata["tokenizer.ggml.token_type"], strict=True) if kind == 1}
    score = dict(zip(tokens, metadata["tokenizer.ggml.scores"], strict=True))
    prefix = "▁" if metadata.get("tokenizer.ggml.add_space_prefix", True) and text else ""
    parts = list(prefix + text.replace(" ", "▁"))
    while True:
        joins = [(-score[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in normal]
        if not joins:
            break
        _, at = min(joins)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    found: list[int] = []
    for part in parts:
        found += [ids[part]] if part in normal else [3 + byte for byte in part.encode()]
    return found


@pytest.mark.parametrize("prefixed", [True, False])
def test_a_sentencepiece_tokenizer_merges_by_score(prefixed) -> None:
    metadata = sentencepiece_metadata(**{"tokenizer.ggml.add_space_prefix": prefixed})
    ours = Tokenizer(tokenizer_from_gguf(metadata, "m.gguf"), len(metadata["tokenizer.ggml.tokens"]), 1, 2)
    for text in PROBES:
        ids = ours.encode(text, add_special_tokens=False)
        assert ids == sentencepiece_twin(metadata, text), text
        assert ours.decode(ids) == text
    assert ours.encode("fox")[0] == 1  # SentencePiece models begin with a begin token unless the file says otherwise
    assert ours.encode("a</s>b", parse_special=True).count(2) == 1
    assert 2 not in ours.encode("a</s>b")


def test_a_begin_token_in_the_text_is_not_added_again() -> None:
    metadata = sentencepiece_metadata()
    ours = Tokenizer(tokenizer_from_gguf(metadata, "m.gguf"), len(metadata["tokenizer.ggml.tokens"]), 1, 2)
    assert ours.encode("<s>fox", parse_special=True).count(1) == 1
    assert ours.encode("fox", parse_special=True).count(1) == 1
    assert ours.encode("<s>fox").count(1) == 1  # the added one: the text's own is text


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"tokenizer.ggml.pre": "brand-new"}, r"tokenizer\.ggml\.pre is 'brand-new'.*llama-bpe"),
        ({"tokenizer.ggml.pre": None}, r"tokenizer\.ggml\.pre is None"),
        ({"tokenizer.ggml.model": "rwkv"}, "'rwkv'"),
        ({"tokenizer.ggml.merges": None}, r"tokenizer\.ggml\.merges"),
        ({"tokenizer.ggml.tokens": None}, r"tokenizer\.ggml\.tokens"),
        ({"tokenizer.ggml.token_type": np.array([1, 2])}, "2 entries"),
        ({"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": 7000}, "7000"),
    ],
)
def test_a_tokenizer_that_cannot_be_rebuilt_is_refused(changes, told) -> None:
    metadata = metadata_of(trained("gpt-2"), "gpt-2")
    with pytest.raises(ModelError, match=told):
        tokenizer_from_gguf({**metadata, **changes}, "m.gguf")


def test_a_folder_tokenizer_is_its_tokenizer_json(tmp_path) -> None:
    original = trained("llama-bpe")
    folder = save_folder(reference("llama", vocab_size=704), tmp_path / "model")
    original.save(str(folder / "tokenizer.json"))
    config = {"bos_token": {"content": "<|endoftext|>"}, "eos_token": "<|im_end|>", "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    files = open_path(folder)
    tokenizer, template = load_text(files)
    assert template is None
    assert files.num_tokens == tokenizer.num_tokens == original.get_vocab_size()
    for text in PROBES:
        ids = original.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text, add_special_tokens=False) == ids
        assert tokenizer.encode(text) == [0, *ids]


def test_a_token_that_only_the_config_lists_is_known(tmp_path) -> None:
    folder = save_folder(reference("llama"), tmp_path / "model", num_tokens=150)
    decoder = {"150": {"content": "<|tool|>", "special": True, "normalized": False}}
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": decoder}))
    tokenizer, _ = load_text(open_path(folder))
    assert tokenizer.num_tokens == 151
    assert tokenizer.encode("a<|tool|>", parse_special=True)[-1] == 150
    assert 150 not in tokenizer.encode("a<|tool|>")


def test_a_folder_without_a_tokenizer_says_so(tmp_path) -> None:
    folder = save_folder(reference("llama"), tmp_path / "model")
    with pytest.raises(ModelError, match="holds no tokenizer"):
        load_text(open_path(folder))


def test_a_decoder_of_another_kind_is_refused() -> None:
    spec = {**character_tokenizer(100), "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}}
    with pytest.raises(ModelError, match="WordPiece"):
        Tokenizer(spec, 100)
