"""A whole server whose model is the fake executor and whose tokens are bytes: ``python -m fake_server SETTINGS``."""

import argparse
import json
from pathlib import Path

from foliolm.api.app import build_app
from foliolm.api.launch import limits_of
from foliolm.api.listener import bind
from foliolm.api.options import ServerOptions
from foliolm.api.request_log import RequestLog
from foliolm.api.served_model import ServedModel
from foliolm.api.server import serve
from foliolm.api.service import Service
from foliolm.api.tracing import Tracer
from foliolm.engine.client import ProcessClient
from foliolm.engine.process import EngineSpec
from foliolm.engine.supervisor import Supervision
from foliolm.ledger.journal import Journal
from foliolm.ledger.metrics import Metrics
from foliolm.text.byte_alphabet import BYTE_OF
from foliolm.text.tokenizer import Tokenizer

VOCAB = 256


def byte_tokenizer():
    """Token ids are bytes, and no text has a control token."""
    spec = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "model": {"type": "BPE", "vocab": dict(BYTE_OF), "merges": []},
    }
    return Tokenizer(spec, VOCAB)


def served_model(max_model_len):
    return ServedModel(
        names=("fake", "alias"),
        tokenizer=byte_tokenizer(),
        chat_template=None,
        sampling_defaults={},
        eos_token_ids=(),
        max_model_len=max_model_len,
        vocab_size=VOCAB,
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("settings", type=json.loads)
    parser.add_argument("--options", type=json.loads, default={}, help="ServerOptions")
    parser.add_argument("--ledger", help="a folder for what the HTTP side saw")
    arguments = parser.parse_args()
    lists = {name: tuple(value) for name, value in arguments.options.items() if isinstance(value, list)}
    options = ServerOptions(**{**arguments.options, **lists})
    listener = bind("127.0.0.1", 0)
    metrics = Metrics("fake")
    client = ProcessClient(
        [EngineSpec("fake_engine:build_from", (arguments.settings,))],
        on_step=metrics.observe_outputs,
        on_death=metrics.observe_death,
        on_restart=metrics.observe_restart,
        supervision=Supervision(max_restarts=options.engine_restarts, stuck_after_s=options.engine_stuck_timeout),
    )
    client.launch()
    info = client.wait_ready(print)
    policy = arguments.settings.get("scheduling_policy", "fcfs")
    journal = Journal(Path(arguments.ledger), "http") if arguments.ledger else None
    tracer = None if options.otlp_traces_endpoint is None else Tracer(options.otlp_traces_endpoint, "fake")
    service = Service(served_model(info.max_model_len), client, metrics, policy, limits_of(options), journal, tracer)
    url = f"{options.scheme}://127.0.0.1:{listener.getsockname()[1]}"
    log = None if options.request_log is None else RequestLog(options.request_log)
    serve(
        build_app(service, options, log),
        service,
        listener,
        options,
        lambda: print(f"ready: fake on {url}", flush=True),
    )
    if log is not None:
        log.close()
    if tracer is not None:
        tracer.close()


if __name__ == "__main__":
    main()
