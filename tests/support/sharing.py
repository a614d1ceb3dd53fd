"""Random schedulers and prompts with common beginnings."""

from __future__ import annotations

import random

from foliolm.core.request import EngineRequest
from foliolm.core.sampling import SamplingParams
from support.treatments import random_treatments


def random_source(rng: random.Random, rid: int, config, trunks, now: int) -> EngineRequest:
    """A prompt that begins like others in half of the cases."""
    length = rng.randrange(1, config.max_model_len)
    trunk = rng.choice(trunks) if rng.random() < 0.6 else []
    own = [rng.randrange(4) for _ in range(length)]
    tokens = (trunk[: rng.randrange(len(trunk) + 1)] + own)[:length]
    sampling = SamplingParams(
        max_tokens=rng.randrange(1, config.max_model_len), prompt_logprobs=0 if rng.random() < 0.1 else None
    )
    eos = (5, 17, 123) if rng.random() < 0.3 else ()
    salt = rng.choice([None, None, None, "salt"])
    return EngineRequest(
        rid, tuple(tokens), sampling, eos, now, rng.randrange(3), cache_salt=salt, tenant=rng.choice("ab")
    )


def random_sharing_settings(rng: random.Random) -> dict:
    block_size, usable = rng.choice([1, 2, 4]), rng.randrange(3, 30)
    length, seqs = rng.randrange(2, max(3, usable * block_size + 1)), rng.randrange(1, 7)
    mode = rng.choice(["chunked", "chunked", "mixed", "prefill-first", "static"])
    return {
        "mode": mode,
        "block_size": block_size,
        "num_blocks": usable + 1,
        "max_model_len": length,
        "max_num_seqs": seqs,
        "max_num_batched_tokens": rng.randrange(seqs, seqs + 20) if mode == "chunked" else length + seqs,
        "long_prefill_token_threshold": rng.randrange(1, 20),
        "short_prompt_share": rng.choice([0, 0.25]),
        "watermark_blocks": rng.choice([0, 1]),
        "scheduling_policy": rng.choice(["fcfs", "priority", "prefix"]),
        "age_bound_s": rng.choice([5e-9, 1.0]),
        "fairness": rng.random() < 0.3,
        "enable_prefix_caching": True,
        **random_treatments(rng, usable),
    }
