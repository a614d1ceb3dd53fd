"""``foliolm bench``: a workload against a live server, measured from outside."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foliolm.cli.flags import with_flags
from foliolm.cli.planning.options import KVCacheDtype, MaybeDevice, MaybeModel, Quantization, TensorParallel
from foliolm.cli.simulating.setup import ENGINE_FLAGS, WORKLOAD_FLAGS
from foliolm.core.errors import ConfigError, FolioError

if TYPE_CHECKING:
    from foliolm.bench.dialect import Dialect
    from foliolm.bench.play import Played
    from foliolm.simulate.workload.options import WorkloadOptions

MOST_TOKENS = 1 << 20
"""Of a conversation with a server that does not say how much it takes."""


def _bench(
    workload: dict[str, Any],
    settings: dict[str, Any],
    url: Annotated[str, typer.Argument(help="A server that speaks OpenAI's API, like http://127.0.0.1:8000.")],
    endpoint: Annotated[str, typer.Option(help="completions (/v1/completions) or chat (/v1/chat/completions).")] = (
        "completions"
    ),
    prompts: Annotated[
        str | None, typer.Option(help="token_ids or text; default: token ids where the server takes them.")
    ] = None,
    token_ids: Annotated[str, typer.Option(help="LOW:HIGH of the token ids that prompts are made of.")] = "1000:30000",
    served_model_name: Annotated[
        str | None, typer.Option("--served-model-name", help="Name in the requests; default: the server's first.")
    ] = None,
    api_key: Annotated[str | None, typer.Option(help="The server's key; else FOLIOLM_API_KEY.")] = None,
    timeout: Annotated[
        float, typer.Option(help="Seconds from when a request was due after which it is given up.", min=0.001)
    ] = 3600.0,
    record: Annotated[
        Path | None, typer.Option(help="Write what was sent as a trace, for simulate --format jsonl.")
    ] = None,
    predict: Annotated[
        bool, typer.Option("--predict", help="Also simulate the workload; the engine's flags below are for that.")
    ] = False,
    model: MaybeModel = None,
    device: MaybeDevice = None,
    quantization: Quantization = None,
    kv_cache_dtype: KVCacheDtype = "auto",
    tensor_parallel_size: TensorParallel = 1,
    cost: Annotated[Path | None, typer.Option(help="A step cost that foliolm calibrate wrote.")] = None,
    kernels: Annotated[
        Path | None, typer.Option(help="Folder of measured kernel times: DEVICE/MODEL/VARIANT/tpN/*.csv.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Says everything that is drawn, prompts included.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="One line of JSON on stdout.")] = False,
) -> None:
    """Play a workload, as foliolm simulate takes it, against a live server, and measure from outside.

    Requests go out when they are due, whatever the server does; times are seconds from then. With --concurrency, so
    many senders each wait for their answer. Exit code 1: requests failed, or answers were wrong. Ctrl-C ends the run
    and prints what is done. Example: foliolm bench http://127.0.0.1:8000 --rate 2 --requests 100 --input-len
    lognormal:200:1 --output-len 64
    """
    import asyncio

    from foliolm.bench.connection import Address
    from foliolm.bench.dialect import ENDPOINTS
    from foliolm.bench.prompts import token_range
    from foliolm.bench.record import check_writable, write_record
    from foliolm.bench.report import difference, report
    from foliolm.simulate.workload.options import WorkloadOptions

    if endpoint not in ENDPOINTS:
        raise ConfigError(f"--endpoint is {endpoint!r}; it must be completions or chat")
    if prompts not in (None, "token_ids", "text") or (prompts == "token_ids" and endpoint == "chat"):
        raise ConfigError(f"--prompts is {prompts!r}; it must be token_ids or text, and a chat takes text only")
    given = {"model": model, "device": device, "cost": cost, "kernels": kernels, **settings}
    unused = [name for name, value in given.items() if value is not None]
    if unused and not predict:
        raise ConfigError(f"--{unused[0].replace('_', '-')} describes the simulated engine; it needs --predict")
    address = Address(url, api_key or os.environ.get("FOLIOLM_API_KEY", "").split(",")[0] or None)
    options, identities = WorkloadOptions(**workload), token_range(token_ids)
    options.build(seed, MOST_TOKENS)  # what is wrong with it is said before anybody is asked
    if record is not None:
        check_writable(record)
    plan = _Plan(address, endpoint, prompts, served_model_name, identities, seed, timeout, record is not None)
    forecast = None
    if predict:
        described = (model, device, quantization, kv_cache_dtype, tensor_parallel_size, cost, kernels)
        forecast = _Forecast(described, settings)
    dialect, played = asyncio.run(plan.run(options, None if forecast is None else forecast.prepare))
    numbers = {"url": address.url, "endpoint": endpoint, "model": dialect.model, **report(played, dialect)}
    # From here on there are numbers: whatever else fails, they are printed.
    lost = False
    try:
        if record is not None:
            _say(f"{write_record(record, played.answers, played.start_ns)} requests written to {record}")
    except ConfigError as error:
        lost = True
        _say(str(error))
    if forecast is not None:
        predicted = None
        try:
            predicted = None if played.interrupted else forecast.run(options, seed)
        except FolioError as error:
            lost = True
            _say(f"the prediction failed: {error}")
        whole = predicted is not None and not predicted["interrupted"]
        numbers["predicted"] = predicted
        numbers["difference"] = difference(numbers, predicted) if predicted is not None and whole else None
    from foliolm.cli.benching.text import print_bench, warnings_of

    for line in warnings_of(numbers):
        _say(line)
    if as_json:
        print(json.dumps(numbers, allow_nan=False), flush=True)
    else:
        print_bench(numbers)
    if played.interrupted:
        raise typer.Exit(130)
    if numbers["failed"] or numbers["checks"] or numbers["broken_off"] or lost:
        raise typer.Exit(1)


bench = with_flags(_bench, (WORKLOAD_FLAGS, ENGINE_FLAGS))
bench.__name__ = "bench"


class _Plan:
    """From the options to a run."""

    def __init__(
        self,
        address: Any,
        endpoint: str,
        form: str | None,
        name: str | None,
        identities: tuple[int, int],
        seed: int,
        timeout_s: float,
        with_blocks: bool,
    ) -> None:
        self.address, self.endpoint, self.form, self.name = address, endpoint, form, name
        self.identities, self.seed, self.timeout_s, self.with_blocks = identities, seed, timeout_s, with_blocks

    async def run(self, options: WorkloadOptions, prepare: Any) -> tuple[Dialect, Played]:
        """Find out what the server takes, then play.

        Args:
            options: of the workload.
            prepare: is told what the server said of itself, before anything is sent; None: nobody asks.
        """
        from foliolm.bench.connection import Pool
        from foliolm.bench.dialect import find_dialect
        from foliolm.bench.play import play
        from foliolm.bench.prompts import Contents, Prompts

        contents = Contents(self.seed, *self.identities)
        pool = Pool(self.address)
        try:
            dialect = await find_dialect(
                pool, self.endpoint, self.form, self.name, contents, min(self.timeout_s, 600.0), _say
            )
            if prepare is not None:
                prepare(dialect, self.address.is_local)
            workload = options.build(self.seed, dialect.max_model_len or MOST_TOKENS)
            with _progress(workload.total) as show:
                played = await play(
                    pool, dialect, workload, Prompts(contents, dialect.form), self.timeout_s, show, self.with_blocks
                )
        finally:
            pool.close()
        return dialect, played


class _Forecast:
    """The same workload in virtual time."""

    def __init__(self, described: tuple[Any, ...], settings: dict[str, Any]) -> None:
        self._described, self._settings = described, dict(settings)
        self._machine: Any = None

    def prepare(self, dialect: Dialect, is_local: bool) -> None:
        """Build the machine, so that what is wrong with it is said before the run.

        What was not given is taken from the server: the model's name, its longest request, and this machine as the
        device where the server is here.

        Raises:
            ConfigError: it cannot be built.
        """
        from foliolm.cli.simulating.setup import describe

        model, device, quantization, kv_cache_dtype, tensor_parallel_size, cost, kernels = self._described
        if device is None and is_local:
            device = "this-machine"
            _probe_once()
        if device is None:
            raise ConfigError("--predict needs --device: the server is on another machine")
        if dialect.max_model_len is not None:
            self._settings.setdefault("max_model_len", dialect.max_model_len)
        described = describe(
            model or dialect.model,
            device,
            quantization,
            kv_cache_dtype,
            tensor_parallel_size,
            None,
            cost,
            kernels,
            None,
        )
        self._machine, reasons = described.machine(self._settings)
        for line in reasons:
            _say(line)

    def run(self, options: WorkloadOptions, seed: int) -> dict[str, Any]:
        """Play it; the numbers as `foliolm simulate` has them."""
        from foliolm.cli.simulate import run_one

        outcome, wall_s = run_one(self._machine, options, seed)
        return outcome.to_json(wall_s)


def _progress(total: int | None) -> Any:
    from foliolm.cli.benching.progress import progress

    return progress(total)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _probe_once() -> None:
    """Measure this machine, if nobody has yet: in a process of its own, which leaves nothing behind in the client.

    Raises:
        ConfigError: it cannot be measured; what it said is on stderr.
    """
    import subprocess

    from foliolm.shape.probed import probe_path

    if probe_path().is_file():
        return
    _say("this machine is not measured yet: measuring it (foliolm probe)")
    done = subprocess.run([sys.executable, "-m", "foliolm", "probe"], stdout=subprocess.DEVNULL, check=False)
    if done.returncode:
        raise ConfigError("--predict needs a device, and this machine could not be measured; give --device")
