"""A public load generator against the server: GuideLLM, unchanged.

    pip install guidellm                     # in an environment of its own: it brings several gigabytes
    python benchmarks/load_generator.py --guidellm PATH/TO/guidellm [--streams 4] [--requests 12] [--json]

Starts ``foliolm serve`` with the embedded model, writes its tokenizer where GuideLLM can read it, and lets GuideLLM run
over both endpoints. Fails if any request did.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from serve import server

from foliolm.text.gguf_tokenizer import tokenizer_from_gguf
from foliolm.weights.store import pull


def write_tokenizer(folder: Path) -> None:
    """The embedded model's tokenizer as transformers keeps it."""
    files = pull("smollm2-135m")
    assert files.gguf is not None
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_from_gguf(files.gguf.metadata, str(files.source))))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "bos_token": "<|im_start|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def run(guidellm: str, url: str, endpoint: str, tokenizer: Path, report: Path, streams: int, requests: int) -> dict:
    command = [guidellm, "run", "--disable-progress"]
    command += ["--backend", f"kind=openai_http,target={url},request_format={endpoint}"]
    command += ["--profile", f"kind=concurrent,streams={streams}"]
    command += ["--constraint", f"kind=max_requests,count={requests}"]
    command += ["--tokenizer", f"kind=huggingface_auto,model={tokenizer}"]
    command += ["--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=16"]
    command += ["--output", f"kind=json,path={report}"]
    subprocess.run(command, check=True, stdout=sys.stderr, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    # GuideLLM leaves out of its counts what it takes for its warm-up.
    assert totals["successful"], totals
    assert not totals["errored"] + totals["incomplete"], totals
    return {"endpoint": endpoint, "streams": streams, **totals}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--guidellm", default="guidellm", help="its command")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--requests", type=int, default=12)
    parser.add_argument("--json", action="store_true", help="JSON lines on stdout")
    args = parser.parse_args()
    flags = ["--max-num-seqs=16", "--max-model-len=1024", "--num-gpu-blocks-override=512"]
    with tempfile.TemporaryDirectory() as name, server(flags) as (host, port, _):
        write_tokenizer(Path(name))
        for endpoint in ("/v1/chat/completions", "/v1/completions"):
            report = Path(name) / "report.json"
            url = f"http://{host}:{port}"
            line = run(args.guidellm, url, endpoint, Path(name), report, args.streams, args.requests)
            print(json.dumps(line) if args.json else line, flush=True)


if __name__ == "__main__":
    main()
