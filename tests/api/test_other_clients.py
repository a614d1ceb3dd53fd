"""Clients that people use, unchanged, against a real server with the embedded model.

The official client has a file of its own. Each of these is a process of its own: they take seconds and hundreds of
megabytes to import, and one of them changes what others share.
"""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from support.sure_answer import ANSWER, ANSWER_TOKENS, QUESTION, TOTAL_TOKENS

LITELLM = """
import asyncio, json, os, sys
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it fetches a list of prices when it is imported
import litellm

url, model, question = sys.argv[1:]
common = {
    "model": f"openai/{model}", "api_base": f"{url}/v1", "api_key": "none", "temperature": 0, "max_tokens": 20,
    "messages": [{"role": "user", "content": question}], "num_retries": 0,
}
plain = litellm.completion(**common)
chunks = list(litellm.completion(**common, stream=True, stream_options={"include_usage": True}))
built = litellm.stream_chunk_builder(chunks)
later = asyncio.run(litellm.acompletion(**common))
text = litellm.text_completion(
    model=f"text-completion-openai/{model}", api_base=f"{url}/v1", api_key="none", prompt="1, 2, 3,", max_tokens=4,
    temperature=0,
)
try:
    litellm.completion(**{**common, "max_tokens": -1})
    error = None
except litellm.BadRequestError as bad:
    error = str(bad)
print(json.dumps({
    "plain": plain.choices[0].message.content, "finish": plain.choices[0].finish_reason,
    "usage": plain.usage.total_tokens, "pieces": len(chunks),
    "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices),
    "built": built.choices[0].message.content, "built_usage": built.usage.total_tokens,
    "later": later.choices[0].message.content, "text": text.choices[0].text, "error": error,
}))
"""

LANGCHAIN = """
import asyncio, json, sys
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI

url, model, question = sys.argv[1:]
chat = ChatOpenAI(
    base_url=f"{url}/v1", api_key="none", model=model, temperature=0, max_tokens=20, max_retries=0, stream_usage=True
)
messages = [HumanMessage(question)]
plain = chat.invoke(messages)
chunks = list(chat.stream(messages))
whole = chunks[0]
for chunk in chunks[1:]:
    whole += chunk
batch = chat.batch([messages, [SystemMessage("Answer in one word."), *messages]])
later = asyncio.run(chat.ainvoke(messages))
logprobs = chat.bind(logprobs=True, top_logprobs=2).invoke(messages)
print(json.dumps({
    "plain": plain.content, "finish": plain.response_metadata["finish_reason"],
    "usage": plain.usage_metadata["total_tokens"], "pieces": len(chunks), "streamed": whole.content,
    "streamed_usage": whole.usage_metadata["total_tokens"], "batch": [answer.content for answer in batch],
    "later": later.content, "logprobs": len(logprobs.response_metadata["logprobs"]["content"]),
}))
"""


def answers(script, server, package):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed (the dev extra has it)")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, server.url, "smollm2-135m", QUESTION],
        capture_output=True, text=True, timeout=240, check=False, env={**os.environ, "LANGSMITH_TRACING": "false"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_litellm(real_server):
    got = answers(LITELLM, real_server, "litellm")
    assert (got["plain"], got["streamed"], got["built"], got["later"]) == (ANSWER,) * 4
    assert (got["finish"], got["usage"], got["built_usage"]) == ("stop", TOTAL_TOKENS, TOTAL_TOKENS)
    assert got["pieces"] > 5
    assert got["text"] == " 4, "
    assert "max_tokens" in got["error"]


def test_langchain(real_server):
    got = answers(LANGCHAIN, real_server, "langchain_openai")
    assert (got["plain"], got["streamed"], got["later"]) == (ANSWER,) * 3
    assert (got["finish"], got["usage"], got["streamed_usage"]) == ("stop", TOTAL_TOKENS, TOTAL_TOKENS)
    assert got["pieces"] > 5
    assert got["batch"][0] == ANSWER
    assert got["batch"][1]
    assert got["logprobs"] == ANSWER_TOKENS
