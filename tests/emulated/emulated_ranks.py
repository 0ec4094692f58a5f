"""Ranks as processes, each with an emulated device: forked from a server that has torch loaded and no device yet."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from time import monotonic
from typing import Any

import forked_python


def vendor_package(folder: Path) -> Path:
    """A folder for the path of processes: torch finds the emulated device there as it finds a vendor's."""
    package = folder / "installed" / "vpipe_emulated-0.dist-info"
    package.mkdir(parents=True, exist_ok=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: vpipe-emulated\nVersion: 0\n")
    (package / "entry_points.txt").write_text("[torch.backends]\nemu = emulated_device:autoload\n")
    return package.parent


def vendor_environment(folder: Path, devices: int, **settings: float) -> dict[str, str]:
    """The variables of a command whose processes find so many devices, which behave as the settings say."""
    paths = [str(vendor_package(folder)), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "EMULATED_DEVICES": str(devices),
        "EMULATED_SETTINGS": json.dumps(settings),
    }


@contextmanager
def vendor_python(folder: Path, devices: int, **settings: float) -> Iterator[tuple[Path, dict[str, str]]]:
    """A ``python`` of such processes, all forked from one that has loaded the device, and their variables."""
    environment = vendor_environment(folder, devices, **settings)
    server = forked_python.start(folder / "socket", environment=environment)
    forked_python.write(folder / "python", folder / "socket")
    try:
        yield folder / "python", environment
    finally:
        server.terminate()
        server.wait(30)


@contextmanager
def vendor_commands(folder: Path, devices: int, **settings: float) -> Iterator[Callable[..., str]]:
    """``vpipe WORDS`` there: what it says."""
    with vendor_python(folder, devices, **settings) as (python, environment):

        def vpipe(where: Path, *words: str) -> str:
            command = [python, "-m", "vpipe", *words]
            done = subprocess.run(command, env=environment, cwd=where, capture_output=True, text=True, timeout=200)
            assert done.returncode == 0, done.stdout + done.stderr
            return done.stdout

        yield vpipe


def on_ranks(
    work: Callable[..., Any], num_ranks: int, *args: Any, timeout: float = 120, wait: float = 240
) -> list[Any]:
    """``work(rank, *args)`` on every rank, in a group over gloo and the emulated backend; the results by rank.

    A rank that raises gives its error as text. ``timeout`` is the group's; what has not ended after ``wait`` is killed.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["torch._dynamo", "vpipe.train.optimizers", "vpipe.runtime.assembly", "vpipe.runtime.transport.device"]
    )
    with tempfile.TemporaryDirectory() as scratch:
        pipes, processes = [], []
        for rank in range(num_ranks):
            mine, theirs = context.Pipe(duplex=False)
            given = (rank, num_ranks, str(Path(scratch, "store")), timeout, theirs, work, args)
            process = context.Process(target=_rank, args=given)
            process.start()
            theirs.close()
            pipes.append(mine)
            processes.append(process)
        try:
            end = monotonic() + wait
            return [pipe.recv() if pipe.poll(max(0.0, end - monotonic())) else "no answer" for pipe in pipes]
        except EOFError:
            return ["a rank has died"] * num_ranks
        finally:
            for process in processes:
                process.join(5)
                process.kill()


def _rank(
    rank: int, num_ranks: int, store: str, timeout: float, answer: Connection, work: Callable[..., Any], args: Any
) -> None:
    import emulated_device  # noqa: F401 - registers the device
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.accelerator.set_device_index(rank)
    limit = timedelta(seconds=timeout)
    dist.init_process_group(
        "cpu:gloo,emu:fakenccl", store=dist.FileStore(store, num_ranks), rank=rank, world_size=num_ranks, timeout=limit
    )
    try:
        found = work(rank, *args)
    except Exception as error:
        answer.send("".join(traceback.format_exception_only(error)))
        os._exit(0)  # the others may hang in a transfer
    answer.send(found)
    dist.destroy_process_group()
