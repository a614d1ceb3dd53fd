"""What every handler shares: the model, the engine's client, the metrics, and how a generation begins."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from foliolm.api.adapters import Adapters
from foliolm.api.choice import Choice
from foliolm.api.errors import BodyTooLargeError, ModelNotFoundError, ServerDrainingError
from foliolm.api.generation import ChoiceMaker, Deadlines, Generation
from foliolm.api.protocol import Body, GenerationBody, parse_body
from foliolm.api.sampling import check_options
from foliolm.api.served_model import ServedModel
from foliolm.api.stream import Comments, EventStream, unless_disconnected
from foliolm.api.timings import Before, stamps_of
from foliolm.api.tracing import Tracer, trace_headers
from foliolm.core.errors import NO_ROOM_IN_POOL, FolioError, QueueFullError, RequestError, TtftTargetError
from foliolm.core.request import EngineRequest
from foliolm.core.sampling import SamplingParams
from foliolm.ledger.lines import HttpLine
from foliolm.text.stream import TextStream

if TYPE_CHECKING:
    from foliolm.engine.client import ProcessClient
    from foliolm.ledger.journal import Journal
    from foliolm.ledger.metrics import Metrics

SOON_S = 0.2
"""An engine that takes a request within this many seconds is not worth watching its client for."""
MAX_NAMED = 20
"""Models and adapters that an error names at most."""
MAX_CHOICES = 256
"""Most choices (prompts × n) of one request."""
MAX_TOKENS = 1 << 20
"""Most tokens, of prompts and answers together, of a request with several choices."""


class TooManyTokensError(RequestError):
    """The choices of one request together would have more tokens than one request may."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What stays the same over all parts of one answer.

    Attributes:
        id: the answer's id, also sent as ``x-request-id``.
        created: Unix seconds.
        model: the name that the client asked for, or the model's first.
        names: under which an abort may ask for it: the answer's id, and those that the client gave.
        log: takes what the request's log line is to say.
        began_ns: when its body had been read, monotonic.
        receive: tells when the client leaves; None: it never does.
        trace: headers of the client's trace, where spans are made.
        tenant: whose it is, where tenants are treated fairly.
        degraded: what was cut of the request instead of refusing it, and why.
        adapter: load id of the LoRA adapter that it asked for, or None.
    """

    id: str
    created: int
    model: str
    names: frozenset[str] = frozenset()
    log: dict[str, Any] = field(default_factory=dict)
    began_ns: int = 0
    receive: Receive | None = None
    trace: dict[str, str] = field(default_factory=dict)
    tenant: str = ""
    degraded: list[dict[str, Any]] = field(default_factory=list)
    adapter: int | None = None

    def frame(self, kind: str) -> dict[str, Any]:
        """What every part of the answer begins with."""
        frame = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return {**frame, "degraded": self.degraded} if self.degraded else frame


@dataclass(frozen=True, slots=True)
class ServiceLimits:
    """What one request may take, and how its reader is kept waiting.

    Attributes:
        max_body_bytes: longest request body.
        request_timeout_s: seconds from arrival to the end; a request may ask for less. None: no limit.
        queue_timeout_s: seconds from arrival to the first step. None: no limit.
        heartbeat_s: a stream that has sent nothing for so long sends a comment; 0: never.
    """

    max_body_bytes: int = 32 << 20
    request_timeout_s: float | None = None
    queue_timeout_s: float | None = None
    heartbeat_s: float = 15.0

    def deadlines(self, timeout_s: float | None) -> Deadlines:
        """Of a request that asks for ``timeout_s``."""
        if timeout_s is None or (self.request_timeout_s is not None and self.request_timeout_s < timeout_s):
            return Deadlines(self.request_timeout_s, self.queue_timeout_s, "--request-timeout")
        return Deadlines(timeout_s, self.queue_timeout_s)


class Service:
    """The server's state.

    Args:
        model: what is served.
        client: the engine's client, started.
        metrics: of this server.
        scheduling_policy: ``fcfs`` or ``priority``; a priority is refused where it would do nothing.
        limits: of what one request may take.
        journal: takes what this side saw of each request; None: nobody asked.
        tracer: makes a span of each; None: nobody asked.
        fairness: what tells tenants apart: ``off``, ``user`` or ``api-key``.
        adapters: LoRA adapters that requests may choose; None: there are none.
    """

    def __init__(
        self,
        model: ServedModel,
        client: ProcessClient,
        metrics: Metrics,
        scheduling_policy: str = "fcfs",
        limits: ServiceLimits | None = None,
        journal: Journal | None = None,
        tracer: Tracer | None = None,
        fairness: str = "off",
        adapters: Adapters | None = None,
    ) -> None:
        self.adapters = adapters or Adapters(client, (), False, model.names)
        self.journal = journal
        self.tracer = tracer
        self.model = model
        self.client = client
        self.metrics = metrics
        self.scheduling_policy = scheduling_policy
        self.fairness = fairness
        self.limits = limits or ServiceLimits()
        self.draining = False
        self.open: set[Generation] = set()

    async def read(self, request: Request, kind: type[Body]) -> Body:
        """The request's body, within the limit, as a model.

        Raises:
            RequestError: too large, or not what ``kind`` says.
            ServerDrainingError: the server is shutting down.
        """
        if self.draining:
            raise ServerDrainingError("the server is shutting down; try again later")
        return parse_body(kind, await self.read_raw(request))

    async def read_raw(self, request: Request) -> bytes:
        """The request's body, within the limit.

        Raises:
            BodyTooLargeError: it is longer.
        """
        limit = self.limits.max_body_bytes
        declared = request.headers.get("content-length", "")
        if declared.isdigit() and int(declared) > limit:
            raise BodyTooLargeError(f"the body has {declared[:20]} bytes; the limit is {limit} (--max-body-bytes)")
        parts, size = [], 0
        async for part in request.stream():
            size += len(part)
            if size > limit:
                raise BodyTooLargeError(f"the body has more than {limit} bytes, the limit (--max-body-bytes)")
            parts.append(part)
        return b"".join(parts)

    def answer(self, request: Request, body: GenerationBody, prefix: str) -> Answer:
        """The answer's frame.

        Raises:
            ModelNotFoundError: the body names a model that is not served.
            RequestError: options contradict each other.
        """
        self.check_model(body.model)
        check_options(body)
        if body.priority and self.scheduling_policy != "priority":
            raise RequestError(
                f"priority is {body.priority}; this server schedules by {self.scheduling_policy}, "
                "start it with --scheduling-policy priority",
                "priority",
            )
        given = request.scope.get("request_id")
        identifier = f"{prefix}-{body.request_id or given or secrets.token_hex(12)}"
        aliases = frozenset(name for name in (identifier, body.request_id, given) if name)
        log = request.scope.get("log", {})
        log.update(answer=identifier, model=body.model or self.model.name, stream=bool(body.stream), user=body.user)
        if body.metadata:
            log["metadata"] = body.metadata
        if body.safety_identifier is not None:
            log["safety_identifier"] = body.safety_identifier
        name = body.model or self.model.name
        trace = {} if self.tracer is None else trace_headers(request.headers)
        tenant = self._tenant(request, body)
        began_ns = time.monotonic_ns()
        adapter = self.adapters.get(body.model)
        load_id = None if adapter is None else adapter.load_id
        created = int(time.time())
        return Answer(identifier, created, name, aliases, log, began_ns, request.receive, trace, tenant, [], load_id)

    def _tenant(self, request: Request, body: GenerationBody) -> str:
        """Whose turn a request takes; a key itself never leaves this process."""
        if self.fairness == "user":
            return body.user or ""
        if self.fairness == "api-key":
            key = request.headers.get("authorization", "").partition(" ")[2]
            return hashlib.sha256(key.encode()).hexdigest()[:16]
        return ""

    def check_model(self, name: str | None) -> None:
        """Refuse a name under which no model is served; None stands for the one that is.

        Raises:
            ModelNotFoundError: with the names that are served.
        """
        if name is not None and name not in self.model.names and self.adapters.get(name) is None:
            names = ", ".join([*self.model.names, *(adapter.name for adapter in self.adapters)][:MAX_NAMED])
            raise ModelNotFoundError(
                f"model {name[:200]!r} is not served here; served: {names}", "model", "model_not_found"
            )

    async def generate(
        self,
        body: GenerationBody,
        answer: Answer,
        prompts: Sequence[list[int]],
        sampling: SamplingParams,
        field: str,
        arrival_ns: int,
    ) -> Generation:
        """Begin to generate ``n`` choices a prompt; returns once the engine has taken all of them.

        A request that asks to be degraded gets half as many choices, and half of these, and then answers half as long,
        before it is refused.

        Raises:
            RequestError, QueueFullError, EngineDeadError: nothing was begun.
        """
        asked, reasons = (
            sampling,
            {"max_tokens": f"prompt and answer may have {self.model.max_model_len} tokens together"},
        )
        while True:
            try:
                generation = await self._begin(body, answer, prompts, sampling, field, arrival_ns)
                break
            except (QueueFullError, RequestError) as error:
                less = self._less(sampling, prompts, error) if body.degrade else None
                if less is None:
                    raise
                reasons["n" if less.n < sampling.n else "max_tokens"] = str(error)
                sampling = less
        if body.degrade:
            room = min(self.model.room(len(prompt), sampling.max_tokens) for prompt in prompts)
            longest = max(self.model.room(len(prompt), None) for prompt in prompts)
            for name, wanted, given in (
                ("n", asked.n, sampling.n),
                ("max_tokens", longest if asked.max_tokens is None else asked.max_tokens, room),
            ):
                if given < wanted and (name == "n" or sampling.max_tokens is not None):
                    answer.degraded.append({"field": name, "asked": wanted, "given": given, "reason": reasons[name]})
        return generation

    def _less(self, sampling: SamplingParams, prompts: Sequence[list[int]], error: FolioError) -> SamplingParams | None:
        """What may be tried in place of a request that was refused; None where less of it would be refused too."""
        too_long = isinstance(error, TtftTargetError | TooManyTokensError)
        no_room = isinstance(error, RequestError) and error.code == NO_ROOM_IN_POOL
        if isinstance(error, RequestError) and not (too_long or no_room):
            return None
        if sampling.n > 1 and not no_room:
            return replace(sampling, n=sampling.n // 2)
        tokens = max(self.model.room(len(prompt), sampling.max_tokens) for prompt in prompts)
        fewer = max(1, sampling.min_tokens, tokens // 2)
        return replace(sampling, max_tokens=fewer) if (too_long or no_room) and fewer < tokens else None

    async def _begin(
        self,
        body: GenerationBody,
        answer: Answer,
        prompts: Sequence[list[int]],
        sampling: SamplingParams,
        field: str,
        arrival_ns: int,
    ) -> Generation:
        """One attempt of ``generate``."""
        each = sampling.num_sequences
        if len(prompts) * each > MAX_CHOICES:
            raise RequestError(
                f"{len(prompts)} prompts with n = {each} make {len(prompts) * each} choices; "
                f"the limit is {MAX_CHOICES} a request",
                "n",
            )
        self._check_tokens(prompts, sampling)
        deadlines = self.limits.deadlines(body.timeout)
        generation = Generation(self.client, answer.names, deadlines, self.metrics.observe_timeout)
        generation.trace = answer.trace
        answer.log["generation"] = generation
        sent_ns = time.monotonic_ns()
        generation.before = Before(arrival_ns, sent_ns - answer.began_ns)
        for number, prompt in enumerate(prompts):
            self.model.check_prompt(prompt, field)
            room = self.model.room(len(prompt), sampling.max_tokens)
            fitted = replace(sampling, max_tokens=room, min_tokens=min(sampling.min_tokens, room))
            for child in range(each):
                request = EngineRequest(
                    request_id=0,
                    prompt_token_ids=tuple(prompt),
                    sampling=fitted.child(child),
                    eos_token_ids=self.model.eos_token_ids,
                    arrival_ns=arrival_ns,
                    sent_ns=sent_ns,
                    priority=body.priority or 0,
                    ttft_target_s=None if body.ttft_target_ms is None else body.ttft_target_ms / 1e3,
                    tenant=answer.tenant,
                    label=answer.id if body.user is None else f"{answer.id} user={body.user}",
                    cache_salt=body.cache_salt,
                    adapter=answer.adapter,
                    sibling=child,
                )
                if child < sampling.n:
                    generation.add(request, self._maker(number * sampling.n + child, prompt, request))
                else:
                    generation.add_unread(request)
        self.metrics.observe_params(sampling.n)
        # Open from here on, so that a drain and an abort find it while the engine has not answered yet.
        self.open.add(generation)
        try:
            await self._started(generation, answer)
        except BaseException:
            self.release(generation)
            raise
        return generation

    async def _started(self, generation: Generation, answer: Answer) -> None:
        """Start it; where the engine takes long (a long step, a grammar to compile), see whether the client leaves."""
        start = asyncio.ensure_future(generation.start())
        left = False

        def leave() -> None:
            nonlocal left
            left = True
            start.cancel()

        try:
            await asyncio.wait((start,), timeout=SOON_S)
            if not start.done() and answer.receive is not None:
                await unless_disconnected(answer.receive, start, leave)
            await start
        except asyncio.CancelledError:
            start.cancel()
            task = asyncio.current_task()
            # Who cancels this task (the end of a batch) must not be told that a client left.
            if left and not (task is not None and task.cancelling()):
                raise ClientDisconnect from None
            raise

    def _check_tokens(self, prompts: Sequence[list[int]], sampling: SamplingParams) -> None:
        each = sampling.num_sequences
        tokens = sum(len(prompt) + self.model.room(len(prompt), sampling.max_tokens) for prompt in prompts) * each
        if tokens > MAX_TOKENS and len(prompts) * each > 1:
            raise TooManyTokensError(
                f"{len(prompts) * each} choices of prompt and max_tokens make {tokens} tokens; the limit is "
                f"{MAX_TOKENS} a request: lower n, max_tokens or the number of prompts",
                "n" if sampling.n > 1 else "prompt",
            )

    def stream(
        self, generation: Generation, events: AsyncGenerator[bytes, None], headers: dict[str, str]
    ) -> EventStream:
        """The response that streams a generation's events, and comments while there are none."""
        return EventStream(
            events,
            lambda: self.release(generation),
            headers,
            Comments(lambda: str(generation.state), generation.turn, self.limits.heartbeat_s),
        )

    def abort(self, names: Sequence[str]) -> list[str]:
        """End the open requests that bear these names; their readers get what there is, with finish reason ``abort``.

        Returns:
            The names of which there were any.
        """
        found = []
        for name in names:
            named = [generation for generation in self.open if name in generation.names]
            for generation in named:
                generation.abort()
            if named:
                found.append(name)
        return found

    def _maker(self, index: int, prompt: Sequence[int], request: EngineRequest) -> ChoiceMaker:
        def make(notify: Callable[[], None], end: Callable[[int], None], on_turn: Callable[[], None]) -> Choice:
            text = TextStream(self.model.tokenizer, prompt, request.sampling)
            meter = self.metrics.meter(request.arrival_ns, len(prompt))
            return Choice(index, prompt, request.sampling, text, notify, end, meter, on_turn)

        return make

    def release(self, generation: Generation) -> None:
        """The answer to a generation has been sent, or will never be."""
        if self.journal is not None and generation in self.open:
            self._write_stamps(self.journal, generation)
        generation.abort()
        generation.close()
        if self.tracer is not None and generation in self.open:
            self.tracer.finish(generation)
        self.open.discard(generation)

    def _write_stamps(self, journal: Journal, generation: Generation) -> None:
        now = time.monotonic_ns()
        for choice, label in zip(generation.choices, generation.labels, strict=True):
            if choice.request_id and generation.before is not None:
                journal.write(HttpLine(choice.request_id, label, stamps_of(choice, generation.before, now)))

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests, wait until the open ones have ended, and end those that take longer with an error."""
        self.draining = True
        self.client.restarting_allowed = False
        deadline = time.monotonic() + timeout_s
        while self.open and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        for generation in list(self.open):
            generation.fail(ServerDrainingError("the server shut down before the answer was complete"))


def usage_of(generation: Generation, with_output: bool = True) -> dict[str, Any]:
    """OpenAI's usage object: each prompt is counted once, however many choices it has.

    Args:
        generation: what was generated.
        with_output: False where the answer is left out.
    """
    prompt, output = generation.num_prompt_tokens, generation.num_output_tokens if with_output else 0
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": min(generation.num_cached_tokens, prompt)},
    }
