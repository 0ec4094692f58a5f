"""What does a stranger who floods the page and the store of a run cost its steps?

    python benchmarks/flood/run.py [--rounds 3] [--seconds 4] [--rate 300] [--json]

Two ranks train with a live page. In turn nobody disturbs them, a port of the flooder's own is flooded (what the flood
itself costs on this machine), then the page, then the store at which the ranks met: half-sent requests that stay open,
garbage, headers without end. The run must go on, exit in order, and answer a whole request. Medians of step times.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter, deque
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import yaml

WHERE = ("nobody", "own port", "page", "store")
HELD = 2000
"""Connections that stay open at once."""


def config(folder: Path) -> dict[str, Any]:
    return {
        "model": {"name": "gpt", "hidden_size": 64, "num_layers": 2, "num_heads": 2, "sequence_length": 32},
        "dataset": {"name": "synthetic", "batch_size": 8, "extra": {"vocab_size": 64, "num_examples": 64}},
        "training": {"num_microbatches": 4, "epochs": 1_000_000, "evaluation_interval": -1},
        "parallel": {"model_parallel_size": 2, "scheduler": "1f1b"},
        "checkpoint": {"interval": -1},
        "observe": {"dashboard": True, "log_interval": 0, "directory": str(folder / "runs")},
        "launch": {"threads": 1},
    }


class Run:
    """A run with a page."""

    def __init__(self, folder: Path) -> None:
        file = folder / "job.yaml"
        file.write_text(yaml.safe_dump(config(folder)))
        self.directory, self._said = folder / "run", (folder / "said.txt").open("w+")
        words = [sys.executable, "-m", "vpipe", "train", str(file), "--output-dir", str(self.directory)]
        self.process = subprocess.Popen(words, stdout=self._said, stderr=subprocess.STDOUT)
        while not self.steps():
            if self.process.poll() is not None:
                raise AssertionError(self.said())
            time.sleep(0.05)
        self.url = (self.directory / "page.url").read_text().strip()

    def said(self) -> str:
        return Path(self._said.name).read_text()

    def steps(self) -> list[float]:
        file = self.directory / "metrics.jsonl"
        lines = file.read_text().splitlines()[:-1] if file.exists() else []
        return [json.loads(line)["seconds"] for line in lines if '"train"' in line]

    def port(self, where: str) -> int:
        if where == "page":
            return int(re.findall(r":(\d+)/", self.url)[0])
        for child in psutil.Process(self.process.pid).children(recursive=True):
            with suppress(psutil.Error):
                port = child.environ().get("MASTER_PORT") or _listening(child)
                if port:
                    return int(port)
        raise AssertionError("the store has no port")

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


def _listening(process: psutil.Process) -> int | None:
    """The store's keeper listens and never changed its environment."""
    ports = [each.laddr.port for each in process.net_connections() if each.status == psutil.CONN_LISTEN]
    return ports[0] if ports and "zygote" in " ".join(process.cmdline()) else None


def flood(port: int, rate: float, ended: threading.Event, seen: Counter[str]) -> None:
    """Connections at that rate; the newest ``HELD`` stay open, whatever the other side does."""
    kept: deque[socket.socket] = deque()
    texts = {
        "half": b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: ",
        "garbage": secrets.token_bytes(512),
        "header": b"GET / HTTP/1.1\r\nX-Long: " + b"a" * 100_000,
        "nothing": b"",
    }
    while not ended.is_set():
        for text in texts.values():
            try:
                made = socket.create_connection(("127.0.0.1", port), timeout=0.2)
                made.setblocking(False)
                kept.append(made)
                seen["connections"] += 1
                made.send(text)
            except OSError:
                seen["refused or cut"] += 1
            if len(kept) > HELD:
                kept.popleft().close()
            ended.wait(1 / rate)
    for made in kept:
        made.close()


def answers(url: str) -> bool:
    """Whether the page answers a visitor."""
    with suppress(OSError), urllib.request.urlopen(url, timeout=5) as reply:
        return bool(reply.status == 200)
    return False


def sink(server: socket.socket) -> None:
    """Takes connections and reads nothing: the flooder's own port."""
    kept: deque[socket.socket] = deque(maxlen=64)
    with suppress(OSError):
        while True:
            kept.append(server.accept()[0])


def measure(folder: Path, rounds: int, seconds: float, rate: float) -> dict[str, Any]:
    run = Run(folder)
    own = socket.create_server(("127.0.0.1", 0), backlog=256)
    threading.Thread(target=sink, args=(own,), daemon=True).start()
    ports = {"own port": own.getsockname()[1], "page": run.port("page"), "store": run.port("store")}
    times: dict[str, list[float]] = {where: [] for where in WHERE}
    seen: dict[str, Counter[str]] = {where: Counter() for where in WHERE}
    answered = 0
    for _ in range(rounds):
        for where in WHERE:
            ended = threading.Event()
            before = len(run.steps())
            if where in ports:
                stranger = threading.Thread(target=flood, args=(ports[where], rate, ended, seen[where]))
                stranger.start()
            time.sleep(seconds)
            if where == "page":
                answered += answers(run.url)
            times[where] += run.steps()[before:]
            ended.set()
            if where in ports:
                stranger.join()
    own.close()
    alive = run.process.poll() is None
    code = run.end() if alive else run.process.returncode
    middle = {where: median(found) for where, found in times.items()}
    return {
        "step_ms": {where: value * 1e3 for where, value in middle.items()},
        "ratio": {where: value / middle["nobody"] for where, value in middle.items()},
        "seen": {where: dict(count) for where, count in seen.items()},
        "answered": f"{answered} of {rounds}",
        "goes_on": alive,
        "exit_code": code,
        "strange_words": "\x1b" in run.said() or "Traceback" in run.said(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--rate", type=float, default=300.0, help="Connections a second.")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="vpipe-flood-", dir=os.environ.get("TMPDIR")) as folder:
        found = measure(Path(folder), chosen.rounds, chosen.seconds, chosen.rate)
    if chosen.json:
        print(json.dumps(found))
    else:
        for where in WHERE:
            count = found["seen"][where].get("connections", 0)
            print(f"{where:>9}: {found['step_ms'][where]:6.1f} ms a step, {found['ratio'][where]:.2f}x, {count} opened")
        print(f"the page answered {found['answered']}; the run ended with {found['exit_code']}")
    good = found["goes_on"] and found["exit_code"] == 75 and not found["strange_words"]
    return 0 if good and not found["answered"].startswith("0") else 1


if __name__ == "__main__":
    sys.exit(main())
