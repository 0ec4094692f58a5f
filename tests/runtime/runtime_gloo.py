"""Worlds of real processes over gloo that live for a whole test session.

A world is started once (a fork server has imported torch already) and runs any number of tasks: functions of this folder's modules, called
on every rank with the same arguments. A task that fails ends its world; the next one gets a new world.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch._dynamo", "vpipe.runtime.pipeline", "runtime_support"])


class RankFailed(Exception):
    """A rank's own traceback."""


def _serve(rank: int, num_ranks: int, store: str, pipe: Connection) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks)
    while True:
        task, arguments = pipe.recv()
        try:
            answer: tuple[bool, Any] = (True, task(*arguments))
        except BaseException:
            answer = (False, traceback.format_exc())
        buffer = io.BytesIO()
        torch.save(answer, buffer)
        pipe.send_bytes(buffer.getvalue())


class World:
    """``num_ranks`` processes of one process group."""

    def __init__(self, num_ranks: int) -> None:
        self._store = tempfile.mktemp(prefix="vpipe-gloo-")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(num_ranks):
            here, there = _CONTEXT.Pipe()
            process = _CONTEXT.Process(target=_serve, args=(rank, num_ranks, self._store, there), daemon=True)
            process.start()
            self._pipes.append(here)
            self._processes.append(process)

    def run(self, task: Callable[..., Any], *arguments: Any, timeout: float = 100) -> list[Any]:
        """What the task returns, rank by rank."""
        for pipe in self._pipes:
            pipe.send((task, arguments))
        found, errors = [], []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(1 if errors else timeout):
                errors.append(f"rank {rank} does not answer")
                continue
            good, value = torch.load(io.BytesIO(pipe.recv_bytes()), weights_only=False)
            (found if good else errors).append(value)
        if errors:
            raise RankFailed("\n".join(errors))
        return found

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        if os.path.exists(self._store):
            os.unlink(self._store)


class Worlds:
    """One world per number of ranks."""

    def __init__(self) -> None:
        self._open: dict[int, World] = {}

    def run(self, num_ranks: int, task: Callable[..., Any], *arguments: Any) -> list[Any]:
        if num_ranks not in self._open:
            self._open[num_ranks] = World(num_ranks)
        try:
            return self._open[num_ranks].run(task, *arguments)
        except BaseException:
            self._open.pop(num_ranks).close()
            raise

    def close(self) -> None:
        for world in self._open.values():
            world.close()
