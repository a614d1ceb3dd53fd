"""Every family and RoPE scaling against transformers' float32 logits, computed in chunks over paged KV."""

import pytest
import torch

from foliolm.core.plan import Admission, LogitsAt, Row, StepPlan
from foliolm.core.sampling import SamplingParams
from foliolm.executor.torch.executor import TorchExecutor
from support.tiny_models import VOCAB, ours, reference, reference_logits
from support.torch_engine import generate, request

TOKENS = [(i * 37 + 5) % VOCAB for i in range(90)]
THETA = {"rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    **THETA,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, **THETA}

CASES = {
    "llama": ("llama", {}, {}),
    "llama with biases": (
        "llama",
        {"attention_bias": True, "mlp_bias": True},
        {"qkv_bias": True, "o_bias": True, "mlp_bias": True},
    ),
    "llama tied": ("llama", {"tie_word_embeddings": True}, {}),
    "llama one head a group": ("llama", {"num_key_value_heads": 6}, {}),
    "llama linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.5, **THETA}}, {}),
    "llama llama3": ("llama", {"rope_parameters": LLAMA3}, {}),
    "llama yarn": ("llama", {"rope_parameters": YARN}, {}),
    "llama yarn, own temperature": ("llama", {"rope_parameters": {**YARN, "attention_factor": 1.3}}, {}),
    "mistral": ("mistral", {"sliding_window": None}, {}),
    "mistral windowed": ("mistral", {"sliding_window": 11}, {}),
    "qwen2": ("qwen2", {}, {}),
    "qwen2 windowed in part": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 11, "max_window_layers": 1},
        {"sliding_window": 11, "windowed_layers": (1, 2)},
    ),
    "qwen3": ("qwen3", {}, {}),
}


class Spy:
    """Collects every logit row that the model hands to the sampler."""

    def __init__(self, monkeypatch, model) -> None:
        self.rows = []
        head = model.head

        def logits(_, hidden, lora=None):
            self.rows.append(head(hidden).float())
            return self.rows[-1].clone()

        monkeypatch.setattr(type(model), "logits", logits)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("cuts", "block"), [((90,), 16), ((1, 2, 20, 21, 23, 64, 90), 4)])
def test_logits_equal_transformers(monkeypatch, name, cuts, block):
    kind, config, fields = CASES[name]
    theirs = reference(kind, **config)
    model = ours(theirs, kind, **fields)
    spy = Spy(monkeypatch, model)
    executor = TorchExecutor(model, num_blocks=60, block_size=block)
    asked = SamplingParams(temperature=0.0, prompt_logprobs=0)
    # Blocks in no order at all: nothing may rely on neighbours.
    table = tuple(1 + (7 * i) % 59 for i in range(-(-len(TOKENS) // block)))
    begin = 0
    for step, end in enumerate(cuts):
        first = begin == 0
        row = Row(
            1,
            end - begin,
            begin,
            (table,) * len(executor.kv.specs) if first else (),
            first,
            LogitsAt.ALL | (LogitsAt.LAST if end == len(TOKENS) else LogitsAt.NONE),
        )
        note = (Admission(1, tuple(TOKENS), len(TOKENS), asked, ()),) if first else ()
        result = executor.submit(StepPlan(step + 1, 0, rows=(row,), admissions=note)).wait()
        begin = end
    # The last step's sampled row comes before its prompt rows.
    got = torch.cat([*spy.rows[:-2], spy.rows[-1], spy.rows[-2]])
    expected = reference_logits(theirs, TOKENS)
    assert expected.abs().max() > 3, "a reference without contrast proves nothing"
    torch.testing.assert_close(got, expected, atol=1e-3, rtol=0)
    assert result.tokens == [[int(expected[-1].argmax())]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precisions_stay_close(dtype):
    theirs = reference("llama", initializer_range=0.1)
    run = generate(ours(theirs, "llama", dtype), [request(1, TOKENS[:40], logprobs=20, max_tokens=1)])
    expected = torch.log_softmax(reference_logits(theirs, TOKENS[:40])[-1], -1)
    (reported,) = run.by_id[1].logprobs
    for token, logprob in reported.top:
        assert abs(logprob - float(expected[token])) < 0.15


def test_gguf_rope_factors_stand_for_a_llama3_scaling():
    from foliolm.model.rotary import rotary_frequencies
    from support.tiny_models import shape_of

    scaled = shape_of(reference("llama", rope_parameters=LLAMA3), "llama")
    plain = shape_of(reference("llama"), "llama")
    expected, _ = rotary_frequencies(scaled)
    base, _ = rotary_frequencies(plain)
    factors = base / expected
    assert factors.max() > 7
    for shape in (plain, scaled):
        got, scale = rotary_frequencies(shape, factors.numpy())
        torch.testing.assert_close(got, expected)
        assert scale == 1.0
