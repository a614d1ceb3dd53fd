"""From the command line to a machine that can be simulated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foliolm.assemble import Books, virtual_scheduler
from foliolm.cli.flags import FlagGroup
from foliolm.cli.planning.options import bytes_of_gib, model_shape
from foliolm.core.config import EngineConfig
from foliolm.core.errors import ConfigError
from foliolm.ledger.cost_file import CostFile, load_cost
from foliolm.ledger.plan_cost import PlanCost
from foliolm.plan.setting import MemoryOptions, Setting
from foliolm.shape.load import load_device
from foliolm.simulate.outcome import Machine
from foliolm.simulate.workload.adapters import AdapterOptions
from foliolm.simulate.workload.options import WorkloadOptions

if TYPE_CHECKING:
    from foliolm.core.protocols import CostModel

WORKLOAD_FLAGS = FlagGroup("workload", WorkloadOptions, "Workload")
ADAPTER_FLAGS = FlagGroup("adapters", AdapterOptions, "Workload: LoRA adapters")
ENGINE_FLAGS = FlagGroup(
    "settings",
    EngineConfig,
    "Engine, as for serve",
    # What has no meaning where no weights are read and no text is made, or is said of the described model instead.
    frozenset(
        {"model", "served_model_name", "load_format", "dtype", "device", "num_threads", "generation_config"}
        | {"chat_template", "tool_call_parser", "self_calibration", "step_cost", "seed", "ledger"}
        | {"quantization", "kv_cache_dtype", "kernels", "deterministic"}
        | {"enable_lora", "lora_modules", "max_lora_rank", "max_cpu_loras"}
    ),
)


NO_ADAPTERS = AdapterOptions()


@dataclass(frozen=True, slots=True)
class Described:
    """What is simulated, before any batching is chosen.

    Attributes:
        setting: model and device.
        other_gib: GiB of the device that nothing here accounts for; None: the planner's default.
        cost: a calibrated step cost, or None.
        kernels: folder of measured kernel times, or None.
        ledger: a folder for the books, or None.
        adapters: LoRA adapters of the workload.
    """

    setting: Setting
    other_gib: float | None = None
    cost: Path | None = None
    kernels: Path | None = None
    ledger: Path | None = None
    adapters: AdapterOptions = NO_ADAPTERS

    def machine(self, settings: Mapping[str, Any]) -> tuple[Machine, tuple[str, ...]]:
        """The machine under some engine flags, and a sentence for each value that was derived."""
        adapters = self.adapters.sizes(self.setting.shape)
        config = EngineConfig(model=self.setting.shape.name, enable_lora=bool(adapters), **settings)
        setting = replace(self.setting, block_size=config.block_size)
        cost, source, about = setting.cost, "default", PRESET_ERROR
        held: CostFile | None = None
        times: CostModel | None = None
        if self.cost is not None:
            held = load_cost(self.cost, setting.account)
            cost, source = held.cost, "file"
            times = PlanCost(cost, adapters, held.slowdown)
            about = f"step cost: {self.cost}, fitted to {held.fitted_from}"
        if self.kernels is not None:
            from foliolm.ledger.kernel_cost import HostTimes, KernelCost
            from foliolm.simulate.profiles import find_profile

            profile = find_profile(self.kernels, setting.need_device().id, setting.shape, setting.tensor_parallel_size)
            c = cost.coefficients
            host = HostTimes(c.step_s, c.sequence_s, c.link * (cost.peer_link or 0.0), c.collective_s)
            times = KernelCost(profile, setting.shape, cost, host)
            about = f"step cost: measured kernels of {profile.folder}, and the host's times of the {source} step cost"
        memory = None
        if self.other_gib is not None:
            memory = MemoryOptions(other_bytes=bytes_of_gib("other_gib", self.other_gib))
        scheduler, reasons = virtual_scheduler(config, setting, cost, memory)
        ledger = None if self.ledger is None else str(self.ledger)
        books = Books(cost, source, ledger=ledger, itl_target_ms=config.itl_target_ms, timelines=ledger is not None)
        machine = Machine(scheduler, books, depth=config.pipeline_depth, times=times, adapters=adapters)
        if held is not None:
            machine = replace(machine, host_s=held.host_gap_s, http_s=held.http_s, delivery_s=held.delivery_s)
        return machine, (about, *reasons)


PRESET_ERROR = (
    "step cost: the preset's peaks and default efficiencies, nothing measured: expect step times within about a third "
    "of the truth; calibrate (foliolm calibrate), or give measured kernels, for better"
)


def describe(
    model: str | None,
    device: str | None,
    quantization: str | None,
    kv_cache_dtype: str,
    tensor_parallel_size: int,
    other_gib: float | None,
    cost: Path | None,
    kernels: Path | None,
    ledger: Path | None,
) -> Described:
    """Load what the options name.

    Raises:
        ConfigError: something is missing or unknown.
    """
    if model is None:
        raise ConfigError("give --model (a preset such as qwen3-8b, a config.json, a folder or a GGUF file)")
    if device is None:
        raise ConfigError("give --device (a preset such as h100-sxm, a JSON file, or this-machine)")
    setting = Setting(
        shape=model_shape(model),
        device=load_device(device),
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        tensor_parallel_size=tensor_parallel_size,
    )
    return Described(setting, other_gib, cost, kernels, ledger)
