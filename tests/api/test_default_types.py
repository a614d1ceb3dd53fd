"""The server as a user starts it: weights and KV in the number types that ``auto`` chooses on this machine.

The other tests through HTTP ask for float32, whose numbers are the oracle's.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest
from openai import OpenAI
from server_process import ServerProcess

from foliolm.ops.native.library import choose_kernels
from support.sure_answer import ANSWER, ANSWER_TOKENS, LEAST_LEAD, MESSAGES

FLAGS = ["--max-model-len", "512", "--num-gpu-blocks-override", "256", "--max-num-seqs", "8"]


@pytest.fixture(scope="module")
def server():
    running = ServerProcess("-m", "foliolm", "serve", "--port", "0", *FLAGS)
    yield running
    assert running.stop() == 0


def ask(server, **more):
    client = OpenAI(base_url=server.url + "/v1", api_key="none")
    answer = client.chat.completions.create(
        model="smollm2-135m", messages=MESSAGES, temperature=0, max_tokens=16, **more
    )
    return answer.choices[0]


def test_the_answer_is_right_alone_from_the_prefix_cache_and_in_a_batch(server):
    said = [ask(server).message.content for _ in range(2)]
    with ThreadPoolExecutor(6) as several:
        said += several.map(lambda _: ask(server).message.content, range(6))
    assert set(said) == {ANSWER}


def test_the_answer_that_tests_quote_leads_clearly_at_every_token(server):
    """Else rounding decides what other tests read, and they fail where nothing is wrong (``support.sure_answer``)."""
    tokens = ask(server, logprobs=True, top_logprobs=2).logprobs.content
    leads = [token.top_logprobs[0].logprob - token.top_logprobs[1].logprob for token in tokens]
    assert len(leads) == ANSWER_TOKENS
    assert min(leads) >= LEAST_LEAD, leads


def test_the_log_says_which_number_types_run(server):
    native = choose_kernels("auto").library is not None
    types = "weights q4_1, KV cache int8" if native else "weights float32, KV cache float32"
    assert any(types in line for line in server.lines), server.lines
