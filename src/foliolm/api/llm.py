"""``LLM``: offline generation in this process, in vLLM's shape."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

from foliolm.api.beams import BeamSearchOutput, BeamSearchParams, searched
from foliolm.api.choice import Choice, Delta
from foliolm.api.lora_request import LoadIds, LoRARequest, LoRARequests, one_each
from foliolm.api.results import CompletionOutput, RequestOutput
from foliolm.api.served_model import ServedModel
from foliolm.assemble import build_engine
from foliolm.core.config import EngineConfig
from foliolm.core.errors import EngineDeadError, QueueFullError, RequestError
from foliolm.core.request import EngineRequest, FinishReason
from foliolm.core.sampling import SamplingParams
from foliolm.engine.client import InProcessClient
from foliolm.engine.collector import pass_over_what_is, walk_all_again
from foliolm.engine.threads import bound_spinning
from foliolm.text.stream import answer_text
from foliolm.weights.store import pull

if TYPE_CHECKING:
    from foliolm.weights.checkpoint import LoadFormat

Prompt = str | Sequence[int]


@dataclass(slots=True)
class _Job:
    prompt: str | None
    token_ids: list[int]
    sampling: SamplingParams
    choices: list[Choice]
    requests: list[EngineRequest]


class LLM:
    """A model and an engine in this process. Not thread-safe.

    Until it is closed, Python's cyclic garbage collector passes over the objects that lived when it was made.

    Example::

        with LLM("smollm2-135m") as llm:
            (answer,) = llm.generate("The capital of France is", SamplingParams(max_tokens=8, temperature=0))
            print(answer.outputs[0].text)

    Args:
        model: built-in name, Hugging Face repository id, folder or file; fetched if it is missing.
        settings: any of ``EngineConfig``'s.

    Raises:
        ConfigError, ModelError: as the engine's start.
    """

    def __init__(self, model: str = "smollm2-135m", **settings: Any) -> None:
        self.config = EngineConfig(model=model, **settings)
        bound_spinning()
        files = pull(self.config.model, load_format=cast("LoadFormat", self.config.load_format))
        self.engine = build_engine(self.config)
        self.client = InProcessClient([self.engine])
        self.model = replace(ServedModel.of(self.config, files), max_model_len=self.engine.info.max_model_len)
        self._adapters = LoadIds(len(self.config.lora_modules))
        pass_over_what_is()

    def get_default_sampling_params(self) -> SamplingParams:
        """The model's own sampling defaults."""
        return SamplingParams(**self.model.sampling_defaults)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora_request: LoRARequests = None,
    ) -> list[RequestOutput]:
        """Complete prompts, all of them in one continuous batch.

        Args:
            prompts: a text, a list of token ids, or a list of either.
            sampling_params: for all prompts, or one a prompt; None: the model's defaults. ``max_tokens`` None: up to
                the end of the context.
            lora_request: the adapter of all prompts, or one (or None) a prompt; loaded if it is not yet.

        Returns:
            One output a prompt, in their order.

        Raises:
            RequestError: a prompt or parameter is wrong; nothing was generated.
        """
        listed = _listed(prompts)
        pairs = [
            (prompt, self.model.encode(prompt, "prompt")) if isinstance(prompt, str) else (None, list(prompt))
            for prompt in listed
        ]
        return self._run(pairs, sampling_params, "prompt", lora_request)

    def chat(
        self,
        messages: Sequence[Mapping[str, str]] | Sequence[Sequence[Mapping[str, str]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        add_generation_prompt: bool = True,
        *,
        lora_request: LoRARequests = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several; a message has ``role`` and ``content``.

        Raises:
            RequestError: the model has no chat template, or as ``generate``.
        """
        if not messages:
            raise RequestError("messages is empty; it must hold at least one message", "messages")
        conversations = [messages] if isinstance(messages[0], Mapping) else messages
        pairs: list[tuple[str | None, list[int]]] = [
            (None, self.model.encode_chat(conversation, add_generation_prompt=add_generation_prompt))  # type: ignore[arg-type]
            for conversation in conversations
        ]
        return self._run(pairs, sampling_params, "messages", lora_request)

    def beam_search(self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams) -> list[BeamSearchOutput]:
        """The best continuations of each prompt by beam search, best first.

        Raises:
            RequestError: a prompt or parameter is wrong, or the search can never fit; nothing was generated.
        """
        listed = _listed(prompts)
        outputs = self.generate(listed, params.sampling())
        return [searched(output, params) for output in outputs]

    def close(self) -> None:
        """Give the engine's memory back."""
        self.client.close()
        walk_all_again()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _run(
        self,
        pairs: Sequence[tuple[str | None, list[int]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        field: str,
        lora_request: LoRARequests,
    ) -> list[RequestOutput]:
        given = self.get_default_sampling_params() if sampling_params is None else sampling_params
        each = [given] * len(pairs) if isinstance(given, SamplingParams) else list(given)
        if len(each) != len(pairs):
            raise RequestError(
                f"sampling_params has {len(each)} entries for {len(pairs)} prompts; give one, or one a prompt",
                "sampling_params",
            )
        adapters = [self._load_id(one) for one in one_each(lora_request, len(pairs))]
        arrival = time.monotonic_ns()
        jobs = [
            self._job(text, ids, sampling, field, arrival, adapter)
            for (text, ids), sampling, adapter in zip(pairs, each, adapters, strict=True)
        ]
        started: list[int] = []
        try:
            self._step_through(jobs, started)
        finally:
            # After an error or Ctrl-C nothing may go on computing for nobody.
            self.client.abort(started)
        return [_output(job) for job in jobs]

    def _load_id(self, wanted: LoRARequest | None) -> int | None:
        """The load id of an adapter, which is loaded if it is not yet.

        Raises:
            RequestError: its files are wrong, or ``enable_lora`` is not set.
        """
        if wanted is None:
            return None
        load_id = self._adapters.known(wanted)
        if load_id is None:
            load_id = self._adapters.fresh()
            size = self.engine.read_adapter(load_id, wanted.lora_name, wanted.lora_path)
            self.engine.load_adapter(load_id, wanted.lora_path, size)
            before = self._adapters.loaded(wanted, load_id)
            if before is not None:
                self.engine.unload_adapter(before)
        return load_id

    def _job(
        self,
        text: str | None,
        token_ids: list[int],
        sampling: SamplingParams,
        field: str,
        arrival: int,
        adapter: int | None,
    ) -> _Job:
        self.model.check_prompt(token_ids, field)
        self.model.check_sampling(sampling)
        room = self.model.room(len(token_ids), sampling.max_tokens)
        fitted = replace(sampling, max_tokens=room, min_tokens=min(sampling.min_tokens, room))
        job = _Job(text, token_ids, sampling, [], [])
        for child in range(sampling.num_sequences):
            request = EngineRequest(
                request_id=0,
                prompt_token_ids=tuple(token_ids),
                sampling=fitted.child(child),
                eos_token_ids=self.model.eos_token_ids,
                arrival_ns=arrival,
                sibling=child,
                adapter=adapter,
            )
            text_stream = answer_text(self.model.tokenizer, token_ids, request.sampling)
            job.requests.append(request)
            job.choices.append(Choice(child, token_ids, request.sampling, text_stream, _nothing, self._end))
        return job

    def _end(self, request_id: int) -> None:
        self.client.abort([request_id])

    def _step_through(self, jobs: Sequence[_Job], started: list[int]) -> None:
        waiting = deque(jobs)
        while waiting or self.client.has_work:
            while waiting:
                try:
                    started += self.client.add(waiting[0].requests, waiting[0].choices)
                except QueueFullError:
                    if not self.client.has_work:
                        raise  # an empty queue is too short for this prompt's n
                    break
                waiting.popleft()
            self.client.step()


def _listed(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if prompts and isinstance(prompts[0], int):
        return [prompts]  # type: ignore[list-item]
    return prompts  # type: ignore[return-value]


def _output(job: _Job) -> RequestOutput:
    completions = []
    for choice in job.choices:
        whole = choice.take() or Delta()
        if choice.finish_reason is FinishReason.ERROR:
            raise EngineDeadError(whole.error or "the engine ended the request with an error")
        reported = job.sampling.logprobs is not None
        completions.append(
            CompletionOutput(
                index=choice.index,
                text=whole.text,
                token_ids=tuple(whole.token_ids),
                logprobs=tuple(whole.logprobs) if reported else None,
                cumulative_logprob=sum(entry.logprob for entry in whole.logprobs) if reported else None,
                finish_reason=str(choice.finish_reason),
                stop_reason=whole.stop_reason,
                stamps=choice.stamps,
            )
        )
    completions = completions[: job.sampling.n]
    prompt_logprobs = tuple(job.choices[0].prompt_logprobs) if job.sampling.prompt_logprobs is not None else None
    return RequestOutput(job.prompt, tuple(job.token_ids), prompt_logprobs, tuple(completions))


def _nothing() -> None:
    """Nobody waits for news: the caller steps the engine itself."""
