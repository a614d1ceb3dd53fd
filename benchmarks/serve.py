"""What HTTP costs, and what a server bears.

    python benchmarks/serve.py [--streams 32] [--output-tokens 128] [--repeats 3] [--json] [--only NAME] [engine flags]

``http_to_offline``: output tokens/s of 32 streams read over HTTP against the same work done by ``LLM`` in this
process, on the same cores, alternating over --repeats; the ratio of the medians. The reader of the streams takes its
share of the cores too: the CPU seconds of all parts are reported, which tell more than the ratio on a busy machine.

``idle_connections``: 500 connections that were opened and say nothing; ``overload``: 200 requests at once against a
queue of 64, in rounds. Both report the memory of both processes before and after, and that the server answers as
before. The KV pool is small, so that it is touched to its last block before the first figure is taken.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from workloads import Workload

HEAD = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n"
QUEUE = 64


def work_of(streams: int, output_tokens: int, round_: int) -> Workload:
    import random

    rng = random.Random(f"serve:{round_}")
    return [([rng.randrange(100, 40000) for _ in range(64)], output_tokens) for _ in range(streams)]


@contextmanager
def server(flags: list[str]) -> Iterator[tuple[str, int, int]]:
    """``foliolm serve`` on a free port: host, port and process id."""
    command = [sys.executable, "-m", "foliolm", "serve", "--port", "0", "--shutdown-timeout", "5", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, process_group=0)
    assert process.stdout is not None
    try:
        for line in process.stdout:
            print(line, end="", file=sys.stderr)
            if line.startswith("ready: "):
                parts = urlsplit(line.split(" on ")[-1].strip())
                yield str(parts.hostname), int(parts.port or 80), process.pid
                return
        raise SystemExit("the server did not start")
    finally:
        process.terminate()
        process.stdout.close()
        process.wait(30)


async def stream(host: str, port: int, prompt: list[int], tokens: int, on_event=lambda: None) -> tuple[int, int]:
    """Read one stream to its end without parsing more than needed; returns the status and completion tokens."""
    body = json.dumps(
        {
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write((HEAD.format(len(body)) + body).encode())
        status = int((await reader.readuntil(b"\r\n")).split()[1])
        last = b""
        while part := await reader.read(1 << 16):
            on_event()
            last = (last + part)[-4096:]
            if b"data: [DONE]" in last or status != 200:
                break
        found = last.rfind(b'"completion_tokens":')
        return status, int(last[found + 20 :].split(b",")[0].split(b"}")[0]) if found >= 0 else 0
    finally:
        writer.close()


def over_http(host: str, port: int, work: Workload) -> float:
    async def run() -> float:
        began = time.perf_counter()
        ended = await asyncio.gather(*(stream(host, port, prompt, tokens) for prompt, tokens in work))
        seconds = time.perf_counter() - began
        assert ended == [(200, tokens) for _, tokens in work], ended
        return seconds

    return asyncio.run(run())


def offline_runner(flags: dict[str, object]):
    from foliolm import LLM, SamplingParams

    llm = LLM(**flags)

    def run(work: Workload) -> float:
        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for _, n in work]
        began = time.perf_counter()
        outputs = llm.generate([prompt for prompt, _ in work], params)
        seconds = time.perf_counter() - began
        assert [len(output.outputs[0].token_ids) for output in outputs] == [n for _, n in work]
        return seconds

    return run


def http_to_offline(args: argparse.Namespace) -> dict[str, object]:
    flags = {"max_num_seqs": max(args.streams, 1)}
    offline = offline_runner(flags)
    with server([f"--max-num-seqs={args.streams}"]) as (host, port, pid):
        warm = work_of(args.streams, 8, -1)
        offline(warm)
        over_http(host, port, warm)
        times: dict[str, list[float]] = {"http": [], "offline": []}
        cpu = {"offline": 0.0, "client": 0.0, "http": 0.0, "engine": 0.0}
        for repeat in range(args.repeats):
            work = work_of(args.streams, args.output_tokens, repeat)
            began = time.process_time()
            times["offline"].append(offline(work))
            cpu["offline"] += time.process_time() - began
            before = cpu_seconds(pid), time.process_time()
            times["http"].append(over_http(host, port, work))
            cpu["client"] += time.process_time() - before[1]
            for name, seconds in cpu_seconds(pid).items():
                cpu[name] += seconds - before[0][name]
            print(f"offline {times['offline'][-1]:.2f} s, http {times['http'][-1]:.2f} s", file=sys.stderr)
    tokens = args.streams * args.output_tokens
    rates = {name: tokens / statistics.median(seconds) for name, seconds in times.items()}
    return {
        "http_to_offline": round(rates["http"] / rates["offline"], 3),
        "http_tokens_per_s": round(rates["http"], 1),
        "offline_tokens_per_s": round(rates["offline"], 1),
        "streams": args.streams,
        "output_tokens": args.output_tokens,
        "runs": {name: [round(each, 3) for each in seconds] for name, seconds in times.items()},
        "cpu_s": {name: round(seconds, 2) for name, seconds in cpu.items()},
    }


def processes(pid: int) -> dict[str, int]:
    children = [int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in _words(task / "children")]
    return {"http": pid, "engine": children[0]}


def _words(path: Path) -> list[str]:
    return path.read_text().split()


def cpu_seconds(pid: int) -> dict[str, float]:
    tick = os.sysconf("SC_CLK_TCK")
    seconds = {}
    for name, each in processes(pid).items():
        fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
        seconds[name] = (int(fields[11]) + int(fields[12])) / tick
    return seconds


def memory_mib(pid: int) -> dict[str, float]:
    """Anonymous memory, what is swapped out included."""
    found = {}
    for name, each in processes(pid).items():
        lines = Path(f"/proc/{each}/status").read_text().splitlines()
        kib = sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon:", "VmSwap:")))
        found[name] = round(kib / 1024, 1)
    return found


def burden(args: argparse.Namespace) -> dict[str, object]:
    """500 idle connections, and rounds of 200 requests against a queue of 64."""
    pool = ["--max-num-seqs=16", "--max-model-len=512", "--num-gpu-blocks-override=128"]
    with server([f"--max-queued-requests={QUEUE}", *pool]) as (host, port, pid):
        return asyncio.run(_burden(host, port, pid, args.rounds))


async def _burden(host: str, port: int, pid: int, rounds: int) -> dict[str, object]:
    prompt = list(range(200, 232))
    for number in range(80):
        await stream(host, port, [number, *prompt], 1)
    alone = await _timed(stream(host, port, prompt, 8))
    results: dict[str, object] = {}

    before = memory_mib(pid)
    idle = [await asyncio.open_connection(host, port) for _ in range(500)]
    beside = await _timed(stream(host, port, prompt, 8))
    during = memory_mib(pid)
    for _, writer in idle:
        writer.close()
    results["idle_connections"] = {
        "connections": len(idle),
        "memory_mib_before": before,
        "memory_mib_with": during,
        "request_s_before": round(alone, 3),
        "request_s_beside": round(beside, 3),
    }

    counts: dict[int, int] = {}
    memory = []
    began = time.perf_counter()
    for number in range(rounds):
        ended = await asyncio.gather(*(stream(host, port, [300 + number, i, *prompt], 16) for i in range(200)))
        for status, _ in ended:
            counts[status] = counts.get(status, 0) + 1
        memory.append(memory_mib(pid))
    after = await _timed(stream(host, port, prompt, 8))
    results["overload"] = {
        "rounds": rounds,
        "requests": 200 * rounds,
        "queue": QUEUE,
        "answered": counts.get(200, 0),
        "refused": counts.get(429, 0),
        "other": sum(count for status, count in counts.items() if status not in (200, 429)),
        "seconds": round(time.perf_counter() - began, 2),
        "memory_mib_first_round": memory[0],
        "memory_mib_last_round": memory[-1],
        "request_s_after": round(after, 3),
    }
    assert set(counts) <= {200, 429}, counts
    return results


async def _timed(work) -> float:
    began = time.perf_counter()
    status, _ = await work
    assert status == 200
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=4, help="of 200 requests at once")
    parser.add_argument("--only", choices=("http", "burden"))
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    args = parser.parse_args()
    figures: dict[str, object] = {"load_before": round(os.getloadavg()[0], 2), "cores": len(os.sched_getaffinity(0))}
    if args.only != "burden":
        figures |= http_to_offline(args)
    if args.only != "http":
        figures |= burden(args)
    if args.json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name}: {value}")


if __name__ == "__main__":
    main()
