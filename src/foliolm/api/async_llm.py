"""``AsyncLLM``: streamed generation from asyncio, with the engine in a process of its own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

from foliolm.api.choice import Choice, Delta
from foliolm.api.generation import Deadlines, Generation
from foliolm.api.launch import start_engine
from foliolm.api.llm import Prompt
from foliolm.api.lora_request import LoadIds, LoRARequest
from foliolm.api.results import CompletionOutput, RequestOutput
from foliolm.core.config import EngineConfig
from foliolm.core.errors import EngineDeadError
from foliolm.core.request import EngineRequest, FinishReason
from foliolm.core.sampling import SamplingParams
from foliolm.text.stream import TextStream
from foliolm.weights.store import pull

if TYPE_CHECKING:
    from foliolm.weights.checkpoint import LoadFormat


class AsyncLLM:
    """A model, and an engine in a process of its own, for one event loop.

    Any number of requests may run at once; they share the engine's batch. An engine whose process dies is started
    again, as under ``foliolm serve``; its open requests raise.

    Example::

        async with AsyncLLM("smollm2-135m") as llm:
            async for output in llm.generate("The capital of France is", SamplingParams(max_tokens=8, temperature=0)):
                print(output.outputs[0].text)

    Args:
        model: built-in name, Hugging Face repository id, folder or file; fetched if it is missing.
        report: takes lines about the start-up.
        settings: any of ``EngineConfig``'s.

    Raises:
        ConfigError, ModelError, EngineDeadError: as the engine's start, which this waits for.
    """

    def __init__(
        self, model: str = "smollm2-135m", *, report: Callable[[str], None] = lambda line: None, **settings: Any
    ) -> None:
        self.config = EngineConfig(model=model, **settings)
        files = pull(self.config.model, load_format=cast("LoadFormat", self.config.load_format))
        started = start_engine(self.config, files, report)
        self.client, self.model, self.info = started.client, started.model, started.info
        self._attached = False
        self._adapters = LoadIds(len(self.config.lora_modules))
        self._loading = asyncio.Lock()

    def get_default_sampling_params(self) -> SamplingParams:
        """The model's own sampling defaults."""
        return SamplingParams(**self.model.sampling_defaults)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        timeout_s: float | None = None,
        lora_request: LoRARequest | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Complete a prompt. Each output holds all that there is so far; the last one is ``finished``.

        Leaving the iteration ends the request.

        Args:
            prompt: a text, or a list of token ids.
            sampling_params: None: the model's defaults. ``max_tokens`` None: up to the end of the context.
            priority: lower runs earlier, under the priority policy.
            timeout_s: seconds after which the request is given up.
            lora_request: its adapter, loaded if it is not yet.

        Raises:
            RequestError: the prompt or a parameter is wrong.
            QueueFullError: as many wait as may.
            EngineDeadError: the engine died, or failed in a step.
            RequestTimeoutError: it took too long.
        """
        text = prompt if isinstance(prompt, str) else None
        ids = await self.model.encode_off_loop(prompt, "prompt") if isinstance(prompt, str) else list(prompt)
        async for output in self._run(text, ids, sampling_params, "prompt", priority, timeout_s, lora_request):
            yield output

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        timeout_s: float | None = None,
        lora_request: LoRARequest | None = None,
        **options: Any,
    ) -> AsyncIterator[RequestOutput]:
        """Answer a conversation, as ``generate`` does a prompt; ``options`` are ``ChatTemplate.encode``'s.

        Raises:
            RequestError: the model has no chat template or it refuses the messages; else as ``generate``.
        """
        ids = await self.model.encode_chat_off_loop(messages, **options)
        async for output in self._run(None, ids, sampling_params, "messages", priority, timeout_s, lora_request):
            yield output

    def close(self) -> None:
        """Stop the engine. Idempotent."""
        self.client.close()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    async def _run(
        self,
        text: str | None,
        ids: list[int],
        sampling_params: SamplingParams | None,
        field: str,
        priority: int,
        timeout_s: float | None,
        lora_request: LoRARequest | None,
    ) -> AsyncIterator[RequestOutput]:
        if not self._attached:
            self.client.attach()
            self._attached = True
        adapter = None if lora_request is None else await self._load_id(lora_request)
        sampling = self.get_default_sampling_params() if sampling_params is None else sampling_params
        generation = self._generation(ids, sampling, field, priority, timeout_s, adapter)
        wholes = [Delta() for _ in generation.choices]
        try:
            await generation.start()
            async for choice, delta in generation.deltas():
                if choice.dead is not None:
                    raise choice.dead
                if delta.finish_reason is FinishReason.ERROR:
                    raise EngineDeadError(delta.error or "the engine ended the request with an error")
                _extend(wholes[choice.index], delta)
                yield _output(text, ids, sampling, generation.choices, wholes)
        finally:
            generation.abort()
            generation.close()

    async def _load_id(self, wanted: LoRARequest) -> int:
        """The load id of an adapter, which is loaded if it is not yet.

        Raises:
            RequestError: its files are wrong, or ``enable_lora`` is not set.
        """
        async with self._loading:
            load_id = self._adapters.known(wanted)
            if load_id is None:
                load_id = self._adapters.fresh()
                order = {"load_id": load_id, "name": wanted.lora_name, "path": wanted.lora_path}
                await self.client.ask("load_adapter", **order)
                before = self._adapters.loaded(wanted, load_id)
                if before is not None:
                    await self.client.ask("unload_adapter", load_id=before)
            return load_id

    def _generation(
        self,
        ids: list[int],
        sampling: SamplingParams,
        field: str,
        priority: int,
        timeout_s: float | None,
        adapter: int | None,
    ) -> Generation:
        self.model.check_prompt(ids, field)
        self.model.check_sampling(sampling)
        room = self.model.room(len(ids), sampling.max_tokens)
        fitted = replace(sampling, max_tokens=room, min_tokens=min(sampling.min_tokens, room))
        generation = Generation(self.client, deadlines=Deadlines(total_s=timeout_s, source="timeout_s"))
        arrival = time.monotonic_ns()
        for child in range(sampling.num_sequences):
            request = EngineRequest(
                request_id=0,
                prompt_token_ids=tuple(ids),
                sampling=fitted.child(child),
                eos_token_ids=self.model.eos_token_ids,
                arrival_ns=arrival,
                priority=priority,
                sibling=child,
                adapter=adapter,
            )
            stream = TextStream(self.model.tokenizer, ids, request.sampling)

            def make(
                notify: Callable[[], None],
                end: Callable[[int], None],
                on_turn: Callable[[], None],
                child: int = child,
                stream: TextStream = stream,
                request: EngineRequest = request,
            ) -> Choice:
                return Choice(child, ids, request.sampling, stream, notify, end, on_turn=on_turn)

            generation.add(request, make)
        return generation


def _extend(whole: Delta, delta: Delta) -> None:
    whole.text += delta.text
    whole.token_ids += delta.token_ids
    whole.logprobs += delta.logprobs
    whole.finish_reason = delta.finish_reason or whole.finish_reason
    whole.stop_reason = delta.stop_reason if delta.stop_reason is not None else whole.stop_reason


def _output(
    text: str | None, ids: list[int], sampling: SamplingParams, choices: Sequence[Choice], wholes: Sequence[Delta]
) -> RequestOutput:
    reported = sampling.logprobs is not None
    completions = tuple(
        CompletionOutput(
            index=choice.index,
            text=whole.text,
            token_ids=tuple(whole.token_ids),
            logprobs=tuple(whole.logprobs) if reported else None,
            cumulative_logprob=sum(entry.logprob for entry in whole.logprobs) if reported else None,
            finish_reason=None if whole.finish_reason is None else str(whole.finish_reason),
            stop_reason=whole.stop_reason,
            stamps=choice.stamps,
        )
        for choice, whole in zip(choices, wholes, strict=True)
    )
    prompt_logprobs = tuple(choices[0].prompt_logprobs) if sampling.prompt_logprobs is not None else None
    return RequestOutput(text, tuple(ids), prompt_logprobs, completions)
