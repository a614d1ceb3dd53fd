"""From settings to a server that answers: the model's files, the engine's process, and the service around both."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from foliolm.api.adapters import Adapters
from foliolm.api.app import build_app
from foliolm.api.options import ServerOptions
from foliolm.api.request_log import RequestLog
from foliolm.api.served_model import ServedModel
from foliolm.api.server import serve
from foliolm.api.service import Service, ServiceLimits
from foliolm.api.tracing import Tracer
from foliolm.core.config import EngineConfig
from foliolm.engine.client import ProcessClient
from foliolm.engine.engine import EngineInfo
from foliolm.engine.process import EngineSpec
from foliolm.engine.supervisor import Supervision
from foliolm.ledger.journal import Journal
from foliolm.ledger.metrics import Metrics
from foliolm.weights.checkpoint import ModelFiles

ENGINE_FACTORY = "foliolm.assemble:build_engine"


@dataclass(frozen=True)
class Started:
    """An engine in a process of its own, ready for requests, and the text side of its model."""

    client: ProcessClient
    model: ServedModel
    info: EngineInfo


def start_engine(
    config: EngineConfig,
    files: ModelFiles,
    report: Callable[[str], None],
    metrics: Metrics | None = None,
    supervision: Supervision | None = None,
    factory: str = ENGINE_FACTORY,
) -> Started:
    """Start an engine in a process of its own and wait until it is ready. The caller closes the client.

    Args:
        config: the engine's settings.
        files: the opened model.
        report: takes lines about the start-up.
        metrics: are told what the engine does.
        supervision: how patient to be with it.
        factory: builds the engine, in its process; ``module:function`` called with ``config``.

    Raises:
        ConfigError, ModelError, EngineDeadError: the engine did not start; nothing is left behind.
    """
    client = ProcessClient(
        [EngineSpec(factory, (config,))],
        on_step=metrics.observe_outputs if metrics else None,
        on_death=metrics.observe_death if metrics else None,
        on_restart=metrics.observe_restart if metrics else None,
        supervision=supervision,
    )
    client.launch()
    try:
        # The engine loads its weights meanwhile.
        model = ServedModel.of(config, files)
        info = client.wait_ready(report)
    except BaseException:
        client.close()
        raise
    return Started(client, replace(model, max_model_len=info.max_model_len), info)


def limits_of(options: ServerOptions) -> ServiceLimits:
    """What the options say of a single request."""
    return ServiceLimits(
        max_body_bytes=options.max_body_bytes,
        request_timeout_s=options.request_timeout,
        queue_timeout_s=options.queue_timeout,
        heartbeat_s=options.sse_heartbeat,
    )


def run_server(
    config: EngineConfig,
    files: ModelFiles,
    listener: socket.socket,
    options: ServerOptions,
    report: Callable[[str], None],
    on_ready: Callable[[ServedModel, EngineInfo], None],
    factory: str = ENGINE_FACTORY,
) -> None:
    """Start the engine, serve until a signal, and stop the engine.

    Args:
        config: the engine's settings.
        files: the opened model.
        listener: bound to the address.
        options: of the HTTP side.
        report: takes lines about the start-up.
        on_ready: called once connections are accepted.
        factory: builds the engine, in its process; ``module:function`` called with ``config``.

    Raises:
        ConfigError, ModelError, EngineDeadError: the engine did not start.
    """
    names = config.served_model_name or (config.model,)
    metrics = Metrics(names[0])
    supervision = Supervision(max_restarts=options.engine_restarts, stuck_after_s=options.engine_stuck_timeout)
    log = None if options.request_log is None else RequestLog(options.request_log)
    journal = None if config.ledger is None else Journal(Path(config.ledger), "http")
    endpoint = options.otlp_traces_endpoint
    tracer = None if endpoint is None else Tracer(endpoint, names[0])
    try:
        started = start_engine(config, files, report, metrics, supervision, factory)
        if started.info.limits is not None:
            metrics.observe_limits(0, started.info.limits)
        adapters = Adapters(started.client, config.lora_paths, config.enable_lora, started.model.names)

        def restarted(engine: int) -> None:
            metrics.observe_restart(engine)
            adapters.restarted(engine)

        started.client.on_restart = restarted
        service = Service(
            started.model,
            started.client,
            metrics,
            config.scheduling_policy,
            limits_of(options),
            journal,
            tracer,
            config.fairness,
            adapters,
        )
        app = build_app(service, options, log)
        serve(app, service, listener, options, lambda: on_ready(started.model, started.info))
    finally:
        listener.close()
        if log is not None:
            log.close()
        if journal is not None:
            journal.close()
        if tracer is not None:
            tracer.close()
