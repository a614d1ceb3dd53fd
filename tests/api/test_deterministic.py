"""``deterministic``: the same tokens whatever runs beside a request, and whatever happens to it."""

import pytest

from foliolm import LLM, SamplingParams
from foliolm.core.errors import ConfigError

PROMPTS = [f"A story of {n} short sentences about {what}:" for n in (2, 3) for what in ("rain", "a dog", "bread")]
LONG = "Once upon a time there was a town by the sea, " * 12
PARAMS = [SamplingParams(temperature=t, seed=i, max_tokens=40, ignore_eos=True) for i, t in enumerate([0, 1.0] * 4)]


def tokens(llm, prompts):
    return [tuple(output.outputs[0].token_ids) for output in llm.generate(prompts, PARAMS[: len(prompts)])]


def test_neighbours_chunks_caches_and_preemptions_change_no_token():
    prompts = [*PROMPTS, LONG + "and", LONG + "but"]
    with LLM("smollm2-135m", deterministic=True, self_calibration=False) as llm:
        together = tokens(llm, prompts)
        again = tokens(llm, prompts)  # prefixes are cached now
        alone = [tuple(llm.generate([p], [s])[0].outputs[0].token_ids) for p, s in zip(prompts, PARAMS, strict=True)]
    assert together == again == alone
    pressed = {"num_gpu_blocks_override": 32, "max_model_len": 256, "max_num_batched_tokens": 48}
    with LLM("smollm2-135m", deterministic=True, self_calibration=False, **pressed) as llm:
        assert tokens(llm, prompts) == together
        assert llm.engine.scheduler.stats().num_preemptions > 0


def test_it_is_refused_where_it_cannot_be_had():
    with pytest.raises(ConfigError, match="--deterministic needs the native kernels"):
        LLM("smollm2-135m", deterministic=True, kernels="torch")
