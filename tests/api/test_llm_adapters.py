"""``LLM.generate(..., lora_request=…)`` on a small model."""

import asyncio

import pytest

from foliolm import LLM, AsyncLLM, LoRARequest, SamplingParams
from foliolm.core.errors import ConfigError, EngineDeadError, RequestError
from support.adapters import merged, write_adapter
from support.same_tokens import assert_same_tokens
from support.tiny_files import save_folder
from support.tiny_models import reference, reference_greedy

PROMPT = [7, 3, 90, 41, 11, 8, 120, 5, 77, 31]
SETTINGS = {
    "max_model_len": 128,
    "num_gpu_blocks_override": 64,
    "max_num_seqs": 8,
    "dtype": "float32",
    "num_threads": 1,
}
GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def base():
    return reference("llama", vocab_size=270)


@pytest.fixture(scope="module")
def home(base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    save_folder(base, folder / "base", num_tokens=270)
    for seed in (1, 2, 3):
        write_adapter(folder / str(seed), base, seed=seed, size=0.3)
    write_adapter(folder / "big", base, rank=64)
    return folder


def check(base, home, output, name):
    tokens, gaps = reference_greedy(base if name is None else merged(base, home / name), PROMPT, 8)
    assert_same_tokens(output.outputs[0].token_ids, tokens, gaps)


def test_one_for_all_or_one_a_prompt(base, home):
    lora = {name: LoRARequest(f"number {name}", int(name), str(home / name)) for name in ("1", "2")}
    with LLM(str(home / "base"), enable_lora=True, max_loras=2, max_cpu_loras=2, **SETTINGS) as llm:
        mixed = llm.generate([PROMPT] * 3, GREEDY, lora_request=[lora["1"], None, lora["2"]])
        for output, name in zip(mixed, ("1", None, "2"), strict=True):
            check(base, home, output, name)
        for output in llm.generate([PROMPT] * 2, GREEDY, lora_request=lora["2"]):
            check(base, home, output, "2")
        assert llm.engine.adapters.names((1, 2)) == ("number 1", "number 2")
        # Another folder under the same number is another adapter, whatever the cache holds of the old one.
        (output,) = llm.generate(PROMPT, GREEDY, lora_request=LoRARequest("new", 1, str(home / "3")))
        check(base, home, output, "3")
        assert llm.engine.adapters.names((1,)) == ()
        with pytest.raises(RequestError, match=r"rank is 64; the limit is 16"):
            llm.generate(PROMPT, GREEDY, lora_request=LoRARequest("big", 9, str(home / "big")))
        with pytest.raises(RequestError, match="3 entries for 1 prompts"):
            llm.generate(PROMPT, GREEDY, lora_request=[None] * 3)
        with pytest.raises(RequestError, match="lora_int_id is 0"):
            LoRARequest("zero", 0, "x")
        # Ten prompts of three adapters where two fit host memory: they are fed as room comes.
        lora["3"] = LoRARequest("number 3", 3, str(home / "3"))
        names = ["1", "2", "3", None] * 3
        wanted = [None if name is None else LoRARequest(name, 10 + int(name), str(home / name)) for name in names]
        for output, name in zip(llm.generate([PROMPT] * 12, GREEDY, lora_request=wanted), names, strict=True):
            check(base, home, output, name)
        assert llm.engine.check_invariants() == []
        assert len(llm.engine.adapters.held) == 2


def test_adapters_of_requests_that_a_fault_in_planning_ended_make_room(base, home, monkeypatch):
    lora = {name: LoRARequest(f"number {name}", int(name), str(home / name)) for name in ("1", "2", "3")}
    with LLM(str(home / "base"), enable_lora=True, max_loras=2, max_cpu_loras=2, **SETTINGS) as llm:
        engine = llm.engine
        planner = type(engine.scheduler._planner)
        plan, plans = planner.plan, []

        def third_raises(self, now):
            plans.append(now)
            return 1 // 0 if len(plans) == 3 else plan(self, now)

        monkeypatch.setattr(planner, "plan", third_raises)
        with pytest.raises(EngineDeadError, match="ZeroDivisionError"):
            llm.generate([PROMPT] * 2, GREEDY, lora_request=[lora["1"], lora["2"]])
        assert [engine.scheduler.adapters.num_live(load_id) for load_id in engine.adapters.held] == [0, 0]
        for name in ("3", "1", "2"):
            (output,) = llm.generate(PROMPT, GREEDY, lora_request=lora[name])
            check(base, home, output, name)
        assert engine.check_invariants() == []


def test_without_the_flag_and_with_wrong_flags(base, home):
    with LLM(str(home / "base"), **SETTINGS) as llm, pytest.raises(RequestError, match="--enable-lora"):
        llm.generate(PROMPT, GREEDY, lora_request=LoRARequest("a", 1, str(home / "1")))
    for settings, words in (
        ({"lora_modules": ("a=x",)}, "needs --enable-lora"),
        ({"enable_lora": True, "lora_modules": ("ax",)}, "NAME=FOLDER"),
        ({"enable_lora": True, "lora_modules": ("a=x", "a=y")}, "names 'a'"),
        ({"enable_lora": True, "max_loras": 4, "max_cpu_loras": 3}, "below --max-loras 4"),
        ({"enable_lora": True, "lora_modules": (f"a={home / 'big'}",)}, "limit is 16"),
        ({"lora_grouping": "random"}, "--lora-grouping"),
    ):
        with pytest.raises(ConfigError, match=words):
            LLM(str(home / "base"), **SETTINGS, **settings)


def test_asyncllm_takes_it_too(base, home):
    async def run():
        async with AsyncLLM(str(home / "base"), enable_lora=True, **SETTINGS) as llm:
            outputs = await asyncio.gather(
                *(
                    last(llm.generate(PROMPT, GREEDY, lora_request=LoRARequest(name, int(name), str(home / name))))
                    for name in ("1", "2", "1")
                )
            )
            for output, name in zip(outputs, ("1", "2", "1"), strict=True):
                check(base, home, output, name)

    async def last(stream):
        return [output async for output in stream][-1]

    asyncio.run(run())
