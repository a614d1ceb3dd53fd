"""The same tokens whatever the chunk, block size, depth, batch or preemption."""

from pathlib import Path

import pytest
import torch

from foliolm.core.sampling import BeamSearch
from foliolm.model.loader import load_model
from support.beams import assert_same_beams, reference_beams, search
from support.same_tokens import assert_same_tokens
from support.tiny_models import VOCAB, ours_on, reference, reference_greedy, reference_logits
from support.torch_engine import generate, request

OUTPUT = 24
LENGTHS = (1, 2, 3, 5, 8, 15, 16, 17, 31, 32, 33, 40, 47, 63, 64, 70)
UNLIMITED = 100_000
# Every pair of (chunk, block size), (chunk, depth), (block size, depth), … occurs at least once.
PAIRWISE = [
    (1, 1, 0, False),
    (1, 16, 1, True),
    (1, 32, 0, True),
    (7, 1, 1, True),
    (7, 16, 0, False),
    (7, 32, 1, False),
    (64, 1, 0, True),
    (64, 16, 1, False),
    (64, 32, 0, False),
    (UNLIMITED, 1, 1, False),
    (UNLIMITED, 16, 0, True),
    (UNLIMITED, 32, 1, True),
]


def prompts_for(vocab: int, lengths=LENGTHS) -> list[list[int]]:
    return [[(17 * i * i + 31 * n + 3) % vocab for i in range(n)] for n in lengths]


@pytest.fixture(scope="module", params=["llama", "mistral windowed"])
def spoken_by_reference(request):
    kind, config = {"llama": ("llama", {}), "mistral windowed": ("mistral", {"sliding_window": 12})}[request.param]
    theirs = reference(kind, **config)
    return kind, theirs, [reference_greedy(theirs, prompt, OUTPUT) for prompt in prompts_for(VOCAB)]


@pytest.fixture(scope="module", params=["torch", "native", "portable"])
def small(request, spoken_by_reference):
    kind, theirs, expected = spoken_by_reference
    return ours_on(request.param, theirs, kind), expected


@pytest.mark.parametrize(("chunk", "block", "depth", "preempted"), PAIRWISE)
def test_a_batch_of_mixed_lengths_says_what_each_says_alone(small, chunk, block, depth, preempted):
    model, expected = small
    longest = -(-(max(LENGTHS) + OUTPUT) // block)
    blocks = 1 + (2 * longest if preempted else 16 * longest)
    requests = [request(i, prompt, max_tokens=OUTPUT) for i, prompt in enumerate(prompts_for(VOCAB))]
    run = generate(model, requests, chunk=chunk, block_size=block, num_blocks=blocks, depth=depth, max_model_len=128)
    assert (run.preemptions > 0) == preempted, f"{run.preemptions} preemptions"
    for i, (theirs, gaps) in enumerate(expected):
        assert_same_tokens(run.by_id[i].tokens, theirs, gaps)


def test_the_pairs_are_all_there():
    for a in range(4):
        for b in range(a):
            seen = {(row[a], row[b]) for row in PAIRWISE}
            assert len(seen) == len({row[a] for row in PAIRWISE}) * len({row[b] for row in PAIRWISE})


@pytest.fixture(scope="module")
def embedded():
    """The embedded model: ours in float32, and transformers'."""
    from foliolm.weights.builtin import BUILTIN_MODELS
    from foliolm.weights.checkpoint import open_path
    from foliolm.weights.home import home_folder

    builtin = BUILTIN_MODELS["smollm2-135m"]
    found = list(home_folder().rglob(Path(builtin.member).name))
    if not found:
        pytest.skip("the embedded model has not been pulled")
    files = open_path(found[0])
    model = load_model(
        files.shape,
        files.iter_tensors(),
        dtype=torch.float32,
        num_tokens=files.num_tokens,
        rope_freqs=files.rope_factors,
    )
    import transformers

    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        found[0].parent, gguf_file=found[0].name, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    return model, theirs


def test_embedded_model_has_transformers_logits(embedded, monkeypatch):
    model, theirs = embedded
    (prompt,) = prompts_for(40_000, [150])
    seen = []
    head = model.head

    def logits(_, hidden, lora=None):
        seen.append(head(hidden).float())
        return seen[-1].clone()

    monkeypatch.setattr(type(model), "logits", logits)
    generate(model, [request(1, prompt, max_tokens=1, prompt_logprobs=0)], chunk=64)
    expected = reference_logits(theirs, prompt)
    got = torch.cat([*seen[:-2], seen[-1], seen[-2]])
    torch.testing.assert_close(got, expected[:, : model.num_tokens], atol=1e-3, rtol=0)


EMBEDDED_LENGTHS = [1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 20, 31, 33, 50]


@pytest.fixture(scope="module")
def spoken(embedded):
    prompts = prompts_for(40_000, EMBEDDED_LENGTHS)
    return [(prompt, *reference_greedy(embedded[1], prompt, 5)) for prompt in prompts]


@pytest.mark.parametrize(("chunk", "block", "depth"), [(64, 16, 0), (UNLIMITED, 32, 1)])
def test_embedded_model_says_what_transformers_says(embedded, spoken, chunk, block, depth):
    requests = [request(i, prompt, max_tokens=5) for i, (prompt, _, _) in enumerate(spoken)]
    run = generate(embedded[0], requests, chunk=chunk, block_size=block, depth=depth)
    for i, (_, theirs, gaps) in enumerate(spoken):
        assert_same_tokens(run.by_id[i].tokens, theirs, gaps)


def test_embedded_model_finds_the_beams_that_transformers_finds(embedded):
    model, theirs = embedded
    # "The capital of France is" and the like: texts, so that hypotheses differ in earnest and some end.
    prompts = [[504, 3575, 282, 4649, 314], [1780, 314, 260, 582, 30, 1812, 314, 253]]
    for first, (prompt, beam) in enumerate(zip(prompts, (BeamSearch(4), BeamSearch(3, 0.5, True)), strict=True)):
        requests = search(10 * first + 1, prompt, beam, 10, (2, 30))
        run = generate(model, requests)
        got = [run.by_id[one.request_id] for one in requests]
        scored = [
            (one.tokens, sum(entry.logprob for entry in one.logprobs) / len(one.tokens) ** beam.length_penalty)
            for one in got
        ]
        assert_same_beams(scored, reference_beams(theirs, prompt, beam, 10, (2, 30)))
