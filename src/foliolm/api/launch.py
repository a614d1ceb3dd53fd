"""From settings to a server that answers: the model's files, the engine's process, and the service around both."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass, replace

from foliolm.api.app import build_app
from foliolm.api.served_model import ServedModel
from foliolm.api.server import serve
from foliolm.api.service import Service
from foliolm.core.config import EngineConfig
from foliolm.engine.client import ProcessClient
from foliolm.engine.engine import EngineInfo
from foliolm.engine.process import EngineSpec
from foliolm.ledger.metrics import Metrics
from foliolm.weights.checkpoint import ModelFiles

ENGINE_FACTORY = "foliolm.assemble:build_engine"


@dataclass(frozen=True)
class ServerOptions:
    """What concerns the HTTP side alone.

    Attributes:
        shutdown_timeout_s: seconds that open requests may take to end after a first SIGTERM or Ctrl-C.
        max_body_bytes: longest request body.
    """

    shutdown_timeout_s: float = 30.0
    max_body_bytes: int = 32 << 20


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
    client = ProcessClient(
        [EngineSpec(factory, (config,))],
        on_step=metrics.observe_outputs,
    )
    client.launch()
    try:
        # The engine loads its weights meanwhile.
        model = ServedModel.of(config, files)
        info = client.wait_ready(report)
        model = replace(model, max_model_len=info.max_model_len)
        service = Service(model, client, metrics, config.scheduling_policy, options.max_body_bytes)
        app = build_app(service)
        serve(app, service, listener, options.shutdown_timeout_s, lambda: on_ready(model, info))
    finally:
        client.close()
        listener.close()
