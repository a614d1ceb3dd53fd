"""A server in a process of its own, for tests."""

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import psutil

PATIENCE_S = 120
HERE = Path(__file__).parent


class ServerProcess:
    """Starts a command that prints ``ready: NAME on URL``; keeps all its lines."""

    def __init__(self, *command, verify=True, **variables):
        environment = {
            **os.environ,
            **variables,
            # What the caller set stays in force behind it: the package under test may lie there.
            "PYTHONPATH": os.pathsep.join(
                [str(HERE), str(HERE.parent / "engine"), *filter(None, [os.environ.get("PYTHONPATH")])]
            ),
        }
        self.lines = []
        self._queue = queue.SimpleQueue()
        self.process = subprocess.Popen(
            [sys.executable, *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            process_group=0,
        )
        threading.Thread(target=self._read, daemon=True).start()
        self.url = self._wait_ready()
        # One client: each new one builds a TLS context, which takes longer than most tests here.
        self.http = httpx.Client(
            base_url=self.url, timeout=60, verify=verify, limits=httpx.Limits(max_connections=None)
        )

    def _read(self):
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            self._queue.put(line)
        self._queue.put(None)

    def _wait_ready(self):
        while True:
            line = self._queue.get(timeout=PATIENCE_S)
            if line is None:
                raise AssertionError("the server did not start:\n" + "\n".join(self.lines))
            if line.startswith("ready: "):
                return line.split(" on ")[-1].strip()

    def gauge(self, name):
        """The value of a metric, summed over its series."""
        text = self.http.get("/metrics").text
        values = [float(line.split()[-1]) for line in text.splitlines() if line.split("{")[0] == f"foliolm:{name}"]
        assert values, f"no metric {name}"
        return sum(values)

    def until(self, name, value):
        """Wait until a metric has a value."""
        deadline = time.monotonic() + PATIENCE_S
        while self.gauge(name) != value:
            assert time.monotonic() < deadline, f"{name} never was {value}: it is {self.gauge(name)}"
            time.sleep(0.02)

    def assert_all_free(self):
        """Nothing runs, waits or holds KV."""
        self.until("num_requests_running", 0)
        self.until("num_requests_waiting", 0)
        self.until("kv_cache_usage_perc", 0)

    def engine_pid(self):
        """The engine process: the server's only child."""
        (child,) = psutil.Process(self.process.pid).children()
        return child.pid

    def memory_bytes(self):
        """Anonymous memory of the server's process and its engine's, what is swapped out included."""
        pids = [self.process.pid, *(child.pid for child in psutil.Process(self.process.pid).children())]
        total = 0
        for pid in pids:
            for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                if line.startswith(("RssAnon:", "VmSwap:")):
                    total += int(line.split()[1]) * 1024
        return total

    def stop(self, sig=signal.SIGTERM):
        """End it; returns its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(sig)
            try:
                self.process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                raise
        self.process.stdout.close()
        return self.process.returncode
