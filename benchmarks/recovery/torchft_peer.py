"""The same question to torchft: from the death of a replica to the next step, and to the step in which it is back.

torchft keeps replicas of a whole model alive and knows no pipeline, so each of its ranks holds all of the layers that
vpipe's ranks hold together. A killed replica is started anew at once by this script (torchft has no launcher of its
own): a fresh process, as torchrun's agent would make.

Gradients are averaged by ``Manager.allreduce``, as one piece. torchft 0.2.0's DistributedDataParallel ends the
*survivors* where a replica dies within an allreduce of gloo: their work raises before its future is set, and
``assert fut._fut`` in its ``ddp.py`` fails.

    pip install torchft
    python benchmarks/recovery/run.py
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

HIDDEN, LAYERS = 16, 6
PATIENCE = 150
"""Seconds for a step; a busy machine takes a minute to import torch three times."""


def replica(number: str, folder: str) -> None:
    """One replica: steps until it is killed, and tells each that was committed."""
    import torch
    from torch import nn
    from torchft import Manager, Optimizer, ProcessGroupGloo

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(HIDDEN, HIDDEN) for _ in range(LAYERS)))
    plain = torch.optim.Adam(model.parameters())

    def save() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": plain.state_dict()}

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        plain.load_state_dict(state["optimizer"])

    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        load_state_dict=load,
        state_dict=save,
        min_replica_size=1,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        replica_id=f"replica_{number}_",
        hostname="127.0.0.1",
    )
    optimizer = Optimizer(manager, plain)
    with Path(folder, f"{number}.jsonl").open("a") as told:
        while True:
            optimizer.zero_grad()
            model(torch.randn(8, HIDDEN)).square().mean().backward()
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            averaged = torch.cat([gradient.flatten() for gradient in gradients])
            manager.allreduce(averaged).wait()
            for gradient, part in zip(gradients, averaged.split([g.numel() for g in gradients]), strict=True):
                gradient.copy_(part.view_as(gradient))
            before = manager.current_step()
            optimizer.step()
            if manager.current_step() > before:
                facts = {"time": time.time(), "step": manager.current_step(), "replicas": manager.num_participants()}
                told.write(json.dumps(facts) + "\n")
                told.flush()


def measure(folder: Path, num_replicas: int, count: int) -> dict[str, Any]:
    """Seconds from each kill to the survivors' first step without the victim, and to the first step of all replicas."""
    from torchft._torchft import LighthouseServer

    folder.mkdir()
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=100, heartbeat_timeout_ms=1000)
    address = lighthouse.address()
    address = "http://127.0.0.1:" + address.rsplit(":", 1)[1]

    def start(number: int) -> subprocess.Popen[bytes]:
        words = [sys.executable, __file__, str(number), str(folder)]
        environment = os.environ | {"TORCHFT_LIGHTHOUSE": address, "GLOO_SOCKET_IFNAME": "lo"}
        return subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    replicas = {number: start(number) for number in range(num_replicas)}
    survivors, whole = [], []
    try:
        for blow in range(count):
            _wait(folder, lambda told: told["replicas"] == num_replicas, 0.0, 0)
            time.sleep(1.0)
            victim, struck = 1 + blow % (num_replicas - 1), time.time()
            os.kill(replicas[victim].pid, signal.SIGKILL)
            replicas[victim].wait()
            replicas[victim] = start(victim)
            survivors.append(_wait(folder, lambda told: told["replicas"] < num_replicas, struck, 0) - struck)
            whole.append(_wait(folder, lambda told: told["replicas"] == num_replicas, struck, victim) - struck)
    finally:
        for each in replicas.values():
            each.kill()
        lighthouse.shutdown()
    return {"survivors": survivors, "whole": whole}


def _wait(folder: Path, holds: Any, since: float, number: int) -> float:
    """When a replica first told a step after ``since`` for which ``holds`` is true."""
    path, end = folder / f"{number}.jsonl", time.time() + PATIENCE
    while time.time() < end:
        text = path.read_text() if path.exists() else ""
        for line in text.splitlines(keepends=True):
            if line.endswith("\n") and (told := json.loads(line))["time"] > since and holds(told):
                return float(told["time"])
        time.sleep(0.01)
    raise TimeoutError(f"replica {number} made no such step within {PATIENCE} s")


if __name__ == "__main__":
    replica(*sys.argv[1:])
