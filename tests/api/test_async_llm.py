"""The asynchronous library on the embedded model."""

import asyncio
import itertools
import os
import signal

import pytest

from foliolm import AsyncLLM, SamplingParams
from foliolm.api.errors import RequestTimeoutError
from foliolm.core.errors import EngineDeadError, RequestError
from support.sure_answer import ANSWER, MESSAGES

GREEDY = SamplingParams(temperature=0, max_tokens=12)


async def last(outputs):
    final = None
    async for output in outputs:
        final = output
    return final


async def settled(llm):
    while (health := llm.client.health()[0]).stats.num_running or health.stats.num_waiting or health.error:
        await asyncio.sleep(0.02)
    return health


def test_it_streams_many_at_once_and_survives_its_engine(lean_settings):
    async def scenario():
        async with AsyncLLM("smollm2-135m", **lean_settings) as llm:
            grown = [output async for output in llm.chat(MESSAGES, GREEDY)]
            assert grown[-1].outputs[0].text == ANSWER
            assert grown[-1].finished
            assert not grown[0].finished
            texts = [output.outputs[0].text for output in grown]
            assert all(after.startswith(before) for before, after in itertools.pairwise(texts))

            prompts = [f"{n}, {n + 1}, {n + 2}," for n in range(8)]
            alone = await last(llm.generate(prompts[3], GREEDY))
            together = await asyncio.gather(*(last(llm.generate(prompt, GREEDY)) for prompt in prompts))
            assert together[3].outputs[0].token_ids == alone.outputs[0].token_ids
            assert len({output.outputs[0].text for output in together}) > 4

            pair = await last(llm.generate("Once", SamplingParams(n=2, seed=1, max_tokens=5, logprobs=1)))
            assert [output.index for output in pair.outputs] == [0, 1]
            assert [len(output.logprobs) for output in pair.outputs] == [5, 5]

            # Leaving early frees the engine; so does a deadline.
            endless = SamplingParams(ignore_eos=True)
            async for _ in llm.generate("Once", endless):
                break
            await settled(llm)
            with pytest.raises(RequestTimeoutError, match=r"timeout_s is 0\.3 s"):
                await last(llm.generate("Once", endless, timeout_s=0.3))
            await settled(llm)
            with pytest.raises(RequestError, match="empty"):
                await last(llm.generate([], GREEDY))

            running = asyncio.ensure_future(last(llm.generate("Once", endless)))
            while not llm.client.stats[0].num_running:
                await asyncio.sleep(0.02)
            os.kill(llm.client.processes[0].child.pid, signal.SIGKILL)
            with pytest.raises(EngineDeadError, match="SIGKILL"):
                await running
            assert (await settled(llm)).num_restarts == 1
            again = await last(llm.generate(prompts[3], GREEDY))
            assert again.outputs[0].token_ids == alone.outputs[0].token_ids

    asyncio.run(scenario())
