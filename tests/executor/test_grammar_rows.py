"""Rows with a grammar follow it; all others are sampled as if they were alone."""

import json
import re

import pytest

from foliolm.core.grammar import GrammarSpec
from foliolm.core.request import FinishReason
from foliolm.text.grammar import CompiledGrammars
from foliolm.text.tokenizer import Tokenizer
from support.tiny_files import character_tokenizer
from support.tiny_models import ours, reference
from support.torch_engine import generate, request

VOCAB = 300
EOS = (0,)
SHORT = GrammarSpec("regex", "[a-z]{3}-[0-9]{4}")
LONG = GrammarSpec("regex", "([a-z]{5} ){12}end")
LIST = GrammarSpec("json", json.dumps({"type": "array", "items": {"type": "boolean"}, "maxItems": 3}), whitespace="")


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(character_tokenizer(VOCAB), VOCAB, eos_token_id=0)


@pytest.fixture(scope="module")
def grammars(tokenizer):
    return CompiledGrammars(tokenizer, EOS)


@pytest.fixture(scope="module")
def model():
    return ours(reference("llama", vocab_size=VOCAB), "llama", vocab_size=VOCAB)


def prompts(count):
    return [[(7 * i + 3 * j) % 200 + 20 for j in range(9 + i)] for i in range(count)]


def constrained(first_id=1, **sampling):
    specs = [SHORT, LONG, LIST, LONG]
    return [
        request(first_id + i, prompt, EOS, max_tokens=90, grammar=spec, temperature=1.0, seed=i, **sampling)
        for i, (prompt, spec) in enumerate(zip(prompts(4), specs, strict=True))
    ]


def tokens_of(run):
    return {rid: got.tokens for rid, got in run.by_id.items()}


def test_they_follow_it_and_end_with_it(model, grammars, tokenizer):
    run = generate(model, constrained(), grammars=grammars)
    texts = {rid: tokenizer.decode(got.tokens) for rid, got in run.by_id.items()}
    assert re.fullmatch(SHORT.source, texts[1])
    assert re.fullmatch(LONG.source, texts[2])
    assert all(isinstance(entry, bool) for entry in json.loads(texts[3]))
    assert {got.finish for got in run.by_id.values()} == {FinishReason.STOP}


def test_their_neighbours_are_left_alone(model, grammars):
    free = [request(i, prompt, max_tokens=12, temperature=1.0, seed=50 + i) for i, prompt in enumerate(prompts(3), 10)]
    alone = generate(model, free)
    beside = generate(model, free + constrained(), grammars=grammars)
    assert {rid: got.tokens for rid, got in alone.by_id.items()} == {
        rid: beside.by_id[rid].tokens for rid in (10, 11, 12)
    }


@pytest.mark.parametrize(
    "setting",
    [{"depth": 1}, {"num_blocks": 14, "block_size": 8}, {"num_blocks": 14, "block_size": 8, "depth": 1}, {"chunk": 5}],
    ids=str,
)
def test_neither_preemption_nor_a_step_in_flight_changes_anything(model, grammars, setting):
    plain = generate(model, constrained(), grammars=grammars)
    other = generate(model, constrained(), grammars=grammars, max_model_len=100, **setting)
    assert other.preemptions > 0 or "num_blocks" not in setting
    assert {rid: got.tokens for rid, got in other.by_id.items()} == {
        rid: got.tokens for rid, got in plain.by_id.items()
    }


def test_it_ends_whatever_else_is_asked(model, grammars, tokenizer):
    run = generate(model, constrained(min_tokens=80, ignore_eos=True), grammars=grammars)
    assert re.fullmatch(SHORT.source, tokenizer.decode(run.by_id[1].tokens))
    assert run.by_id[1].finish is FinishReason.STOP


def test_logprobs_are_of_the_models_own_logits(model, grammars):
    (asked,) = [request(1, prompts(1)[0], EOS, max_tokens=20, grammar=SHORT, logprobs=2)]
    got = generate(model, [asked], grammars=grammars).by_id[1]
    assert len(got.logprobs) == len(got.tokens)
    assert any(entry.rank > 1 for entry in got.logprobs), "the model alone would have written something else"


def test_what_contradicts_the_grammar_fails_its_row_alone(model, grammars):
    wrong = request(1, prompts(1)[0], EOS, max_tokens=20, grammar=SHORT, allowed_token_ids=(5,))
    run = generate(model, [wrong, *constrained(2)], grammars=grammars)
    assert run.by_id[1].finish is FinishReason.ERROR
    assert "grammar" in run.by_id[1].error
    assert all(got.finish is FinishReason.STOP for rid, got in run.by_id.items() if rid != 1)


def test_without_a_compiler_it_fails_by_name(model):
    run = generate(model, [request(1, prompts(1)[0], EOS, grammar=SHORT), request(2, prompts(1)[0])])
    assert "compiles no grammars" in run.by_id[1].error
    assert run.by_id[2].finish is FinishReason.LENGTH
