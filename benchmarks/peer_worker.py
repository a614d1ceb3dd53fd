"""One engine on the workloads, under that engine's own Python; `peers.py` starts it.

    python peer_worker.py ENGINE MODEL ROUND WORKLOAD...

Loads the model, warms up, and prints JSON lines: {"precision"}, and for each workload {"workload", "wall_s",
"outputs"}, the last being each request's output tokens.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

# Packages that engines import have names like those of files here (`kernels`): this folder is looked in for `workloads`
# alone. An engine that starts processes imports this file again, without it in its path.
HERE = str(Path(__file__).resolve().parent)
sys.path[:] = [HERE, *(folder for folder in sys.path if folder != HERE)]
from workloads import Workload, workload  # noqa: E402

sys.path.remove(HERE)

Run = Callable[[Workload], tuple[float, list[int]]]
WARM_UP: Workload = [(list(range(200, 300)), 16)]
MAX_CONTEXT = 4096
MOST_TOKENS = 2048  # a step, where an engine asks for it


def foliolm(model: str) -> tuple[Run, str]:
    """FolioLM at its server's defaults."""
    from foliolm import LLM, SamplingParams

    llm = LLM(model)
    loaded = llm.engine.executor.model

    def run(work: Workload) -> tuple[float, list[int]]:
        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for _, n in work]
        start = time.perf_counter()
        outputs = llm.generate([prompt for prompt, _ in work], params)
        return time.perf_counter() - start, [len(output.outputs[0].token_ids) for output in outputs]

    kv = str(loaded.kv_dtype).removeprefix("torch.")
    return run, f"weights {loaded.weights_name}, KV {kv}"


def vllm(model: str) -> tuple[Run, str]:
    """vLLM's CPU build in bfloat16, bound to all the cores that there are."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{(os.cpu_count() or 1) - 1}")
    os.environ.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", "0")
    from vllm import LLM, SamplingParams

    llm = LLM(model, dtype="bfloat16", max_model_len=MAX_CONTEXT, enable_prefix_caching=True, seed=0)

    def run(work: Workload) -> tuple[float, list[int]]:
        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for _, n in work]
        prompts = [{"prompt_token_ids": prompt} for prompt, _ in work]
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - start, [len(output.outputs[0].token_ids) for output in outputs]

    return run, "weights bfloat16, KV bfloat16"


def openvino(model: str) -> tuple[Run, str]:
    """OpenVINO GenAI's continuous batching, prefix cache on, the GGUF's weights as it reads them."""
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 2
    scheduler.max_num_batched_tokens = MOST_TOKENS
    scheduler.max_num_seqs = 64
    scheduler.dynamic_split_fuse = True
    scheduler.enable_prefix_caching = True
    pipe = genai.ContinuousBatchingPipeline(model, scheduler_config=scheduler, device="CPU", properties={})

    def config(tokens: int):
        made = genai.GenerationConfig()
        made.max_new_tokens = made.min_new_tokens = tokens
        made.ignore_eos, made.do_sample = True, False
        return made

    def run(work: Workload) -> tuple[float, list[int]]:
        prompts = [ov.Tensor(np.array([prompt], dtype=np.int64)) for prompt, _ in work]
        configs = [config(n) for _, n in work]
        start = time.perf_counter()
        outputs = pipe.generate(prompts, configs)
        return time.perf_counter() - start, [len(output.m_generation_ids[0]) for output in outputs]

    return run, "weights of the GGUF, KV at OpenVINO's default"


def llama_cpp(model: str) -> tuple[Run, str]:
    """llama.cpp through its batch interface: decodes first, prompts in what is left of a batch, greedy."""
    import llama_cpp as llama
    import numpy as np

    llama.llama_backend_init()
    loaded = llama.llama_model_load_from_file(model.encode(), llama.llama_model_default_params())
    vocabulary = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(loaded))

    def run(work: Workload) -> tuple[float, list[int]]:
        params = llama.llama_context_default_params()
        params.n_ctx = sum(len(prompt) + n for prompt, n in work) + 64
        params.n_batch, params.n_ubatch, params.n_seq_max = MOST_TOKENS, 512, len(work)
        params.n_threads = params.n_threads_batch = os.cpu_count() or 1
        params.kv_unified = True
        context = llama.llama_init_from_model(loaded, params)
        batch = llama.llama_batch_init(MOST_TOKENS, 0, 1)
        computed, got, newest = [0] * len(work), [0] * len(work), [-1] * len(work)
        start = time.perf_counter()
        while any(have < n for have, (_, n) in zip(got, work, strict=True)):
            rows: list[tuple[int, int]] = []  # (place in the batch, request) of rows that are sampled
            size = 0

            def add(request: int, token: int, sampled: bool, rows=rows) -> None:
                nonlocal size
                batch.token[size], batch.pos[size] = token, computed[request]
                batch.n_seq_id[size], batch.seq_id[size][0], batch.logits[size] = 1, request, sampled
                computed[request] += 1
                if sampled:
                    rows.append((size, request))
                size += 1

            for request, (prompt, n) in enumerate(work):
                if computed[request] >= len(prompt) and got[request] < n:
                    add(request, newest[request], True)
            for request, (prompt, _) in enumerate(work):
                while computed[request] < len(prompt) and size < MOST_TOKENS:
                    add(request, prompt[computed[request]], computed[request] == len(prompt) - 1)
            batch.n_tokens = size
            if llama.llama_decode(context, batch):
                raise RuntimeError("llama_decode failed")
            for place, request in rows:
                logits = np.ctypeslib.as_array(llama.llama_get_logits_ith(context, place), shape=(vocabulary,))
                newest[request] = int(logits.argmax())
                got[request] += 1
        wall = time.perf_counter() - start
        llama.llama_batch_free(batch)
        llama.llama_free(context)
        return wall, got

    return run, "weights of the GGUF, KV float16"


ENGINES = {"foliolm": foliolm, "vllm": vllm, "openvino": openvino, "llama_cpp": llama_cpp}


def main() -> None:
    engine, model, round_, *names = sys.argv[1:]
    run, precision = ENGINES[engine](model)
    run(WARM_UP)
    print(json.dumps({"precision": precision}), flush=True)
    for name in names:
        wall, outputs = run(workload(name, int(round_)))
        print(json.dumps({"workload": name, "wall_s": wall, "outputs": outputs}), flush=True)


if __name__ == "__main__":
    main()
