"""What the benchmarks share: ranks as processes, medians with spread, and one way to print."""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO


def options(
    description: str,
    rank: Callable[[dict[str, Any]], None] | None = None,
    transports: bool = False,
    more: Callable[[argparse.ArgumentParser], None] | None = None,
) -> argparse.Namespace:
    """The options of every benchmark, and ``more`` of one's own. A process that ``launch`` has started runs ``rank``
    with its task and ends."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="fewer repeats: to see that it runs, not to quote")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rank-task", help=argparse.SUPPRESS)
    if transports:
        parser.add_argument("--gloo", action="store_true", help="vpipe over gloo too, as torch, not by shared memory")
    if more is not None:
        more(parser)
    arguments = parser.parse_args()
    if rank is not None and arguments.rank_task:
        rank(json.loads(arguments.rank_task))
        raise SystemExit
    return arguments


def launch(
    script: str,
    num_ranks: int,
    task: dict[str, Any],
    timeout: float = 900.0,
    around: Mapping[int, Sequence[str]] | None = None,
    errors: Mapping[int, TextIO] | None = None,
    answers: bool = True,
) -> list[Any]:
    """Run ``script`` as ``num_ranks`` processes with a task each; what every rank answered, if ``answers``. ``around``
    puts a command in front of a rank's, ``errors`` takes what it says."""
    with socket.socket() as probe, tempfile.TemporaryDirectory() as directory:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        processes = []
        for rank in range(num_ranks):
            environment = os.environ | {
                "RANK": str(rank),
                "WORLD_SIZE": str(num_ranks),
                "LOCAL_RANK": str(rank),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "GLOO_SOCKET_IFNAME": "lo",
                "OMP_NUM_THREADS": "1",
                "TORCH_CPP_LOG_LEVEL": "ERROR",
            }
            words = json.dumps(task | {"answer": f"{directory}/rank{rank}.json"})
            command = [*(around or {}).get(rank, ()), sys.executable, script, "--rank-task", words]
            processes.append(subprocess.Popen(command, env=environment, stderr=(errors or {}).get(rank)))
        codes = [process.wait(timeout=timeout) for process in processes]
        if any(codes):
            raise SystemExit(f"a rank of {task} failed: exit codes {codes}")
        ranks = range(num_ranks if answers else 0)
        return [json.loads(Path(f"{directory}/rank{rank}.json").read_text()) for rank in ranks]


def answer(task: dict[str, Any], value: Any) -> None:
    """What a rank reports back."""
    Path(task["answer"]).write_text(json.dumps(value))


def summary(values: Sequence[float]) -> dict[str, float]:
    """Median, and the quartiles as spread."""
    ordered = sorted(values)
    quarter = len(ordered) // 4
    return {
        "median": statistics.median(ordered),
        "low": ordered[quarter],
        "high": ordered[-1 - quarter],
        "n": len(ordered),
    }


def machine() -> dict[str, Any]:
    import torch

    return {
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__.split("+")[0],
        "load": os.getloadavg()[0],
    }


def finish(arguments: argparse.Namespace, result: dict[str, Any], table: Callable[[dict[str, Any]], str]) -> None:
    """Print the result as JSON or as a table."""
    result["machine"] = machine()
    print(json.dumps(result) if arguments.json else table(result))
