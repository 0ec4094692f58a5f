"""The whole suite of transports on two accelerators: as threads of this process, and as processes that talk by the
devices' own backend. What NCCL does with our messages, nobody could see where vpipe was written."""

from __future__ import annotations

import multiprocessing
import tempfile
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import product
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map

from vpipe.runtime.assembly import between_processes
from vpipe.runtime.crossing import copied
from vpipe.runtime.device import HOST, compute_stream, current
from vpipe.runtime.transport.device import DeviceTransport
from vpipe.runtime.transport.inprocess import Hub
from vpipe.runtime.transport.ondevice import transports
from vpipe.runtime.transport.routes import Route, route_of
from vpipe.runtime.transport.wire import Envelope
from vpipe.train.proof import promises

PATIENCE = 60.0
"""Seconds for a message."""
WITHIN = 300.0
"""Seconds for two processes to start and to answer."""


class Expectation(NamedTuple):
    """A scenario, how often (repeated ones have messages of one form, told the first time only), and what rank 1 must
    answer to it."""

    name: str
    scenario: Callable[..., Any]
    arguments: tuple[Any, ...]
    times: int
    kept: Callable[[Any], bool]


_RIGHT = Envelope(0, 0, 1, 3, 0)
_LENGTHS = (10, 300_000, 5, 1_000_000, 0, 70_000)
_GATHERED = [[[0.0, 1.0], [0.0, 1.0, 2.0]]] * 2 + [[[3.0, 3.0], [3.0, 3.0]]]


def _channels(found: Any) -> bool:
    return len(found) == 48 and all(x == [float(s * 10 + t)] * (k + 1) for (s, t, k, _), x in found)


def _says(sent: Envelope) -> Callable[[Any], bool]:
    return lambda said: f"expected {_RIGHT}, but received {sent}" in said


SUITE = [
    *[Expectation("order", promises.order, (), times, lambda found: found == list(range(50))) for times in (1, 3)],
    *[Expectation("many channels", promises.many_channels, (), times, _channels) for times in (1, 3)],
    Expectation("sizes", promises.sizes, (), 1, lambda found: found == [n + k for n in _LENGTHS for k in (2, 0, 1)]),
    Expectation("kinds of tensors", promises.kinds, (), 1, lambda found: found == []),
    *[
        Expectation(
            "changed afterwards", promises.changed_afterwards, (), n, lambda x: x == [0.0, 1000.0, 2000.0, 3000.0]
        )
        for n in (1, 3)
    ],
    Expectation("collectives", promises.collectives, (), 1, lambda found: found == _GATHERED),
    *[
        Expectation("a wrong message is refused", promises.wrong_message, (sent, _RIGHT), 1, _says(sent))
        for sent in (Envelope(0, 0, 1, 4, 0), Envelope(7, 0, 1, 3, 0))
    ],
]


class OnDevices:
    """A transport between devices for scenarios that know the host only: every tensor goes to the device and back."""

    def __init__(self, inner: Any, device: torch.device, program: str) -> None:
        self._inner, self._device, self._program = inner, device, program
        self.rank, self.num_ranks = inner.rank, inner.num_ranks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def begin_step(self, step: int) -> None:
        repeats = self._program.startswith("repeated")
        self._inner.begin_program(self._program, lambda: "data of one form" if repeats else step)
        self._inner.begin_step(step)

    def send(self, envelope: Envelope, target: int, value: Any) -> None:
        self._inner.send(envelope, target, tree_map(lambda leaf: self._moved(leaf, self._device), value))

    def take(self, envelope: Envelope) -> Any:
        return tree_map(lambda leaf: self._moved(leaf, HOST), self._inner.take(envelope))

    def all_gather(self, value: Tensor, ranks: Sequence[int], sizes: Sequence[int] | None = None) -> list[Tensor]:
        return [block.cpu() for block in self._inner.all_gather(value.to(self._device), ranks, sizes)]

    def all_reduce(self, value: Tensor, ranks: Sequence[int]) -> None:
        there = value.to(self._device)
        self._inner.all_reduce(there, ranks)
        value.copy_(there)

    def _moved(self, leaf: Any, device: torch.device) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        moved = copied(leaf, device)
        compute_stream(self._device).synchronize()
        return moved


def broken(inner: Any, device: torch.device) -> list[str]:
    """The promises that a transport has not kept, by its rank 1; both ranks call this."""
    found = []
    with current(device):
        for number, (name, scenario, arguments, times, kept) in enumerate(SUITE):
            transport = OnDevices(inner, device, f"{'repeated' if times > 1 else 'single'} {number}")
            try:
                answers = [scenario(transport, *arguments) for _ in range(times)]
                if inner.rank == 1 and not all(map(kept, answers)):
                    found.append(name)
            except AssertionError:
                found.append(name)
            inner.barrier()
    return found


def between_devices(device: torch.device, timeout: float = PATIENCE) -> DeviceTransport:
    """The end of this process, in a group of two, with a route for every kind of message of the suite."""
    skips = {route_of(Envelope(0, source, target, 0, 0), 0, 1) for source, target in product((0, 2, 4), (1, 3))}
    host = between_processes("auto", blocking=False, timeout=timeout)
    transport = DeviceTransport(host, device, direct=True)
    transport.prepare_routes(sorted({Route(0, 1), Route(1, 0)} | skips))
    transport.prepare_groups([[0, 1]])
    return transport


def in_threads(kind: str) -> list[str]:
    """The promises that are not kept between two devices of this process."""
    devices = [torch.device(kind, 0), torch.device(kind, 1)]
    found: dict[int, list[str]] = {}

    def run(end: Any) -> None:
        try:
            found[end.rank] = broken(end, devices[end.rank])
        except Exception as error:
            end.fail(error)
            found[end.rank] = [str(error).splitlines()[0]]

    ranks = [threading.Thread(target=run, args=(end,), daemon=True) for end in transports(Hub(2), devices)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(WITHIN)
    return [name for rank in (0, 1) for name in found.get(rank, ["no answer"])]


def in_processes(kind: str) -> list[str]:
    """The promises that are not kept between two processes, by the devices' own backend."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as scratch:
        pipes, ranks = [], []
        for rank in range(2):
            mine, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_process, args=(rank, kind, str(Path(scratch, "store")), theirs))
            process.start()
            theirs.close()
            pipes.append(mine)
            ranks.append(process)
        try:
            return [name for pipe in pipes for name in (pipe.recv() if pipe.poll(WITHIN) else ["no answer"])]
        except EOFError:
            return ["a process has died"]
        finally:
            for process in ranks:
                process.join(5)
                process.kill()


def _process(rank: int, kind: str, store: str, answer: Connection) -> None:
    device = torch.device(kind, rank)
    torch.accelerator.set_device_index(rank)
    backend = f"cpu:gloo,{kind}:{dist.get_default_backend_for_device(device)}"
    limit = timedelta(seconds=PATIENCE)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=2, timeout=limit)
    try:
        transport = between_devices(device)
        answer.send(broken(transport, device))
        transport.close()
    except Exception as error:
        answer.send([str(error).splitlines()[0]])
    dist.destroy_process_group()
