"""A workload as the command line describes it; the same flags for the virtual engine and for live servers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from foliolm.core.errors import ConfigError
from foliolm.simulate.workload.distribution import distribution
from foliolm.simulate.workload.item import Workload
from foliolm.simulate.workload.synthetic import Arrivals, Dialogue, Independent, Sessions
from foliolm.simulate.workload.traces import Trace

DEFAULT_REQUESTS = 1000


@dataclass(frozen=True, slots=True)
class WorkloadOptions:
    """What a user may say about a workload: a trace, independent requests, or conversations.

    Attributes:
        trace: a recorded workload: a file, or for vllm-run and servegen a folder.
        format: of the trace: azure, bailian, burstgpt, jsonl, mooncake, servegen or vllm-run.
        time_scale: a trace's intervals are multiplied by it; 0.5 is twice the load.
        requests: how many at most; None: all of a trace, else 1,000.
        rate: arrivals a second of an open loop; inf: all at once.
        burstiness: shape of the gamma-distributed intervals; 1: Poisson, below 1: bursts, above 1: regular.
        concurrency: of a closed loop: so many senders, each of which sends again when it was answered.
        input_len: tokens of a prompt, or of a turn's question: N, constant:N, uniform:LOW:HIGH, lognormal:MEAN:CV,
            exponential:MEAN or empirical:FILE.
        output_len: tokens of an answer, in the same forms.
        sessions: so many conversations in place of independent requests.
        turns: of a conversation, in the same forms.
        think_s: seconds from an answer to the next question, in the same forms.
        system_prompt_len: tokens that every conversation begins with.
        system_prompts: how many different beginnings there are.
        branches: how often each turn of a conversation is asked at once; it goes on from the first.
    """

    trace: Path | None = None
    format: str | None = None
    time_scale: float | None = None
    requests: int | None = None
    rate: float | None = None
    burstiness: float | None = None
    concurrency: int | None = None
    input_len: str | None = None
    output_len: str | None = None
    sessions: int | None = None
    turns: str | None = None
    think_s: str | None = None
    system_prompt_len: int | None = None
    system_prompts: int | None = None
    branches: int | None = None

    def build(self, seed: int, most_tokens: int) -> Workload:
        """The workload, afresh.

        Args:
            seed: says everything that is drawn.
            most_tokens: that a request may have, prompt and answer; conversations end before they pass it.

        Raises:
            ConfigError: values are missing, out of range, or contradict each other.
        """
        if self.trace is not None:
            return self._trace(self.trace, seed)
        self._refuse("a workload that is drawn", "format", "time_scale")
        arrivals = Arrivals(self.rate, 1.0 if self.burstiness is None else self.burstiness, self.concurrency)
        if self.input_len is None or self.output_len is None:
            raise ConfigError("give --input-len and --output-len (or a --trace with its --format)")
        lengths = distribution("--input-len", self.input_len), distribution("--output-len", self.output_len)
        if self.sessions is None:
            self._refuse("independent requests", "turns", "think_s", "system_prompt_len", "system_prompts", "branches")
            count = DEFAULT_REQUESTS if self.requests is None else self.requests
            return Independent(count, arrivals, *lengths, seed)
        self._refuse("conversations", "requests")
        dialogue = Dialogue(
            distribution("--turns", self.turns or "1"),
            distribution("--think-s", self.think_s or "0"),
            self.system_prompt_len or 0,
            1 if self.system_prompts is None else self.system_prompts,
            1 if self.branches is None else self.branches,
        )
        return Sessions(self.sessions, arrivals, *lengths, dialogue, most_tokens, seed)

    def _trace(self, path: Path, seed: int) -> Workload:
        if self.format is None:
            raise ConfigError("give the --format of the --trace")
        self._refuse(
            "a trace",
            *("rate", "burstiness", "concurrency", "input_len", "output_len", "sessions", "turns", "think_s"),
            *("system_prompt_len", "system_prompts", "branches"),
        )
        return Trace(path, self.format, 1.0 if self.time_scale is None else self.time_scale, self.requests, seed)

    def _refuse(self, what: str, *names: str) -> None:
        for name in names:
            if getattr(self, name) is not None:
                raise ConfigError(f"--{name.replace('_', '-')} says nothing about {what}; leave it out")
