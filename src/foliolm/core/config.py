"""The engine's settings as a user gives them, and the checks that need no model."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from foliolm.core.errors import ConfigError

BATCHING = ("continuous", "static")
PREFILL_POLICIES = ("decodes-first", "first")
SCHEDULING_POLICIES = ("fcfs", "priority", "prefix")
FAIRNESS = ("off", "user", "api-key")
PREEMPTION_MODES = ("auto", "swap", "recompute")
PREEMPTION_VICTIMS = ("auto", "last", "least-computed")
KV_OFFLOADING = ("auto", "always", "off")
QUANTIZATIONS = ("auto", "none", "int8")
KV_CACHE_DTYPES = ("auto", "float32", "bfloat16", "float16", "int8")
KERNELS = ("auto", "torch", "native", "portable", "avx2", "avx512-vnni")
DTYPES = ("auto", "float32", "bfloat16", "float16")
TOOL_CALL_PARSERS = ("auto", "hermes", "json")
LORA_GROUPINGS = ("arrival", "cost")
LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What a user may set. None means: resolved later, from the model and the machine, with the reason logged.

    Attributes:
        model: built-in name, Hugging Face repository id, folder or file.
        served_model_name: names under which the API offers it; empty: ``model``.
        load_format: ``auto``, ``safetensors``, ``gguf``, or ``dummy`` (random weights from the shape alone).
        dtype: of weights and activations; ``auto``: the fastest that the device computes natively.
        device: ``cpu``, ``cuda``, or ``auto``.
        quantization: ``int8``, ``none``, or ``auto``: on native kernels as the weights are stored (GGUF's 4 and 8 bits,
            bfloat16, else float32), unless dtype says otherwise.
        kv_cache_dtype: of keys and values: ``float32``, ``bfloat16``, ``float16``, ``int8``, or ``auto``: int8 beside
            quantised weights, else as dtype.
        kernels: on a CPU ``native`` (the best that it has), ``avx512-vnni``, ``avx2`` or ``portable``; ``torch``; or
            ``auto``: native where there is a C++ compiler.
        deterministic: a request's tokens do not depend on what runs beside it, on chunks or on preemption; prompts and
            decodes of long contexts take somewhat longer (docs/serving.md). Native kernels only.
        max_model_len: longest prompt plus output, in tokens; None: the model's.
        block_size: tokens a KV block.
        kv_cache_memory_bytes: bytes of the KV pool; None: derived from the memory that is there.
        gpu_memory_utilization: share of a CUDA device's memory that the engine may use.
        num_gpu_blocks_override: KV blocks, whatever the memory says.
        enable_prefix_caching: prompts share the KV of what they have in common.
        enable_chunked_prefill: a prompt may be computed over several steps.
        batching: ``continuous``, or ``static``: a batch is kept until its slowest ends.
        prefill_policy: ``decodes-first``, or ``first``: a step holds whole prompts or decodes, never both.
        max_num_batched_tokens: new tokens a step; None: from the device's prefill rate.
        max_num_seqs: most requests in a step.
        long_prefill_token_threshold: a prompt with more uncached tokens than this is long; None: half the budget.
        short_prompt_share: share of a step's prefill budget that long prompts leave to short ones that wait.
        scheduling_policy: ``fcfs``, ``priority`` (lower runs earlier), or ``prefix`` (who finds the largest share of
            its prompt in the prefix cache runs earlier).
        preemption_mode: what happens to the KV of a request that must give way: ``swap`` moves it to the host and back,
            ``recompute`` gives it up, ``auto`` takes what is predicted to cost less.
        preemption_victim: who gives way: the ``last`` in order, the one with the ``least-computed`` tokens, or
            ``auto``, the one whose treatment is predicted to cost least for each block that it frees.
        max_preemptions: a request that gave way so often is spared while another can.
        swap_space: GiB of host memory for KV that gives way; None: 4, on a CPU at most an eighth of the memory
            available.
        kv_offloading: whether prefix blocks that are evicted live on in what requests that gave way leave of it:
            ``auto`` where moving them is predicted to cost less than computing them again, ``always``, or ``off``.
        age_bound: seconds after which a waiting request comes before all others, whatever the policy or its tenant.
        fairness: whose turn it is counts the tokens that each was served: ``off``, by ``user`` (the request's field),
            or by ``api-key``.
        ttft_target_ms: a request whose first token is predicted to take longer is refused when it arrives; a request
            may state its own. None: nobody is.
        watermark: share of the blocks that an admission must leave free while something runs.
        max_queued_requests: most requests waiting; more are turned away with 429.
        itl_target_ms: while streams run, prompts get the largest chunk whose predicted step stays within so many
            milliseconds; None: the token budget alone decides.
        pipeline_depth: steps in flight while the next is planned.
        num_threads: compute threads; None: the cores that this process may use.
        seed: makes runs repeatable; None: fresh entropy a request.
        generation_config: ``auto``: the model's sampling defaults; ``none``: neutral ones.
        ledger: a folder that takes every step and request as JSON lines; None: the books are kept in memory only.
        step_cost: a file that foliolm calibrate wrote: predictions use it as it is; None: a short measurement at the
            start, then what the running server's own steps say.
        self_calibration: predictions follow the running server's own steps; not used with step_cost.
        chat_template: a file or a template's text in place of the model's own.
        tool_call_parser: how the model writes tool calls: ``hermes`` (between <tool_call> and </tool_call>), ``json``
            (a bare JSON object), or ``auto``: what its chat template teaches.
        enable_lora: requests may choose LoRA adapters.
        lora_modules: adapters to load at the start, ``NAME=FOLDER`` each, as PEFT writes them.
        max_loras: adapters that a step may use; the device has so many slots for them.
        max_lora_rank: largest rank of an adapter.
        max_cpu_loras: adapters kept in host memory, those least recently used first out; None: 8 for each slot.
        lora_grouping: who comes first of those who wait: ``arrival``, or ``cost``: requests whose adapter runs already,
            then those whose adapter is predicted to add least to a step; age-bound holds.

    Raises:
        ConfigError: a value is out of range or contradicts another; the message names the flag, value and limit.
    """

    model: str = "smollm2-135m"
    served_model_name: tuple[str, ...] = ()
    load_format: str = "auto"
    dtype: str = "auto"
    device: str = "auto"
    quantization: str = "auto"
    kv_cache_dtype: str = "auto"
    kernels: str = "auto"
    deterministic: bool = False
    max_model_len: int | None = None
    block_size: int = 16
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    num_gpu_blocks_override: int | None = None
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    batching: str = "continuous"
    prefill_policy: str = "decodes-first"
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    long_prefill_token_threshold: int | None = None
    short_prompt_share: float = 0.25
    scheduling_policy: str = "fcfs"
    age_bound: float = 60.0
    fairness: str = "off"
    ttft_target_ms: float | None = None
    preemption_mode: str = "auto"
    preemption_victim: str = "auto"
    max_preemptions: int = 3
    swap_space: float | None = None
    kv_offloading: str = "auto"
    watermark: float = 0.01
    max_queued_requests: int = 1024
    itl_target_ms: float | None = None
    pipeline_depth: int = 0
    num_threads: int | None = None
    seed: int | None = None
    generation_config: str = "auto"
    ledger: str | None = None
    step_cost: str | None = None
    self_calibration: bool = True
    chat_template: str | None = None
    tool_call_parser: str = "auto"
    enable_lora: bool = False
    lora_modules: tuple[str, ...] = ()
    max_loras: int = 8
    max_lora_rank: int = 16
    max_cpu_loras: int | None = None
    lora_grouping: str = "arrival"

    def __post_init__(self) -> None:
        for name, choices in (
            ("load_format", LOAD_FORMATS),
            ("dtype", DTYPES),
            ("quantization", QUANTIZATIONS),
            ("kv_cache_dtype", KV_CACHE_DTYPES),
            ("kernels", KERNELS),
            ("batching", BATCHING),
            ("prefill_policy", PREFILL_POLICIES),
            ("scheduling_policy", SCHEDULING_POLICIES),
            ("fairness", FAIRNESS),
            ("preemption_mode", PREEMPTION_MODES),
            ("preemption_victim", PREEMPTION_VICTIMS),
            ("kv_offloading", KV_OFFLOADING),
            ("generation_config", ("auto", "none")),
            ("lora_grouping", LORA_GROUPINGS),
            ("tool_call_parser", TOOL_CALL_PARSERS),
        ):
            if getattr(self, name) not in choices:
                raise ConfigError(f"{_flag(name)} is {getattr(self, name)!r}; it must be one of {', '.join(choices)}")
        for name, low in (
            ("max_model_len", 2),
            ("block_size", 1),
            ("kv_cache_memory_bytes", 1),
            ("num_gpu_blocks_override", 1),
            ("max_num_batched_tokens", 1),
            ("max_num_seqs", 1),
            ("long_prefill_token_threshold", 1),
            ("max_queued_requests", 1),
            ("max_preemptions", 1),
            ("num_threads", 1),
            ("max_loras", 1),
            ("max_lora_rank", 1),
            ("max_cpu_loras", 1),
        ):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < low):
                raise ConfigError(f"{_flag(name)} is {value!r}; it must be an integer of at least {low}")
        for name, low_share, high_share in (
            ("gpu_memory_utilization", 0.01, 1.0),
            ("short_prompt_share", 0.0, 0.9),
            ("watermark", 0.0, 0.5),
        ):
            share = getattr(self, name)
            if not isinstance(share, int | float) or not math.isfinite(share) or not low_share <= share <= high_share:
                raise ConfigError(f"{_flag(name)} is {share!r}; it must be from {low_share} to {high_share}")
        space = self.swap_space
        if space is not None and not (isinstance(space, int | float) and math.isfinite(space) and space >= 0):
            raise ConfigError(f"--swap-space is {space!r}; it must be a finite number of GiB, at least 0")
        if self.preemption_mode == "swap" and space == 0:
            raise ConfigError("--preemption-mode is swap, but --swap-space is 0: there is nowhere to swap to")
        if self.kv_offloading == "always":
            if space == 0:
                raise ConfigError("--kv-offloading is always, but --swap-space is 0: there is nowhere to keep prefixes")
            if not self.enable_prefix_caching:
                raise ConfigError("--kv-offloading is always, but --no-enable-prefix-caching leaves no prefix to keep")
        for name in ("age_bound", "ttft_target_ms"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int | float) and math.isfinite(value) and value > 0):
                raise ConfigError(f"{_flag(name)} is {value!r}; it must be a finite number above 0")
        target = self.itl_target_ms
        if target is not None and not (isinstance(target, int | float) and math.isfinite(target) and target > 0):
            raise ConfigError(f"--itl-target-ms is {target!r}; it must be a finite number above 0")
        if target is not None and self.mode != "chunked":
            raise ConfigError(f"--itl-target-ms cuts prompts into chunks; {self.mode} batching computes them whole")
        if self.pipeline_depth not in (0, 1, 2):
            raise ConfigError(f"--pipeline-depth is {self.pipeline_depth!r}; it must be 0, 1 or 2")
        self._check_lora()
        if not self.model:
            raise ConfigError("the model's name is empty; give a built-in name, a repository id or a path")

    def _check_lora(self) -> None:
        if self.lora_modules and not self.enable_lora:
            raise ConfigError("--lora-modules is given; it needs --enable-lora")
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            raise ConfigError(
                f"--max-cpu-loras is {self.max_cpu_loras}, below --max-loras {self.max_loras}: a slot is filled from "
                "host memory"
            )
        names = [name for name, _ in self.lora_paths]
        for name in names:
            if names.count(name) > 1 or name in (self.served_model_name or (self.model,)):
                raise ConfigError(f"--lora-modules names {name!r}, which is another model's or adapter's name")

    @property
    def lora_paths(self) -> tuple[tuple[str, str], ...]:
        """(name, folder) of the adapters to load at the start.

        Raises:
            ConfigError: an entry has no name or no folder.
        """
        pairs = []
        for entry in self.lora_modules:
            name, equals, path = entry.partition("=")
            if not (name.strip() and equals and path.strip()):
                raise ConfigError(f"--lora-modules is {entry!r:.300}; it must be NAME=FOLDER")
            pairs.append((name.strip(), path.strip()))
        return tuple(pairs)

    @property
    def wants_host_pool(self) -> bool:
        """Whether anything could be kept in host memory."""
        return self.preemption_mode != "recompute" or (self.enable_prefix_caching and self.kv_offloading != "off")

    @property
    def mode(self) -> str:
        """The way of batching: ``static``, ``prefill-first``, ``mixed`` (whole prompts beside decodes), ``chunked``."""
        if self.batching == "static":
            return "static"
        if self.prefill_policy == "first":
            return "prefill-first"
        return "chunked" if self.enable_chunked_prefill else "mixed"


def config_fields() -> dict[str, object]:
    """Every setting's name and default: the command line and config files are made from it."""
    return {f.name: f.default for f in fields(EngineConfig)}


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
