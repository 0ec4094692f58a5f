"""The transports' shared suite on the transport between devices, and orders that would hang NCCL."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from emulated_ranks import on_ranks
from torch import Tensor
from torch.utils._pytree import tree_map

from vpipe.runtime.transport.wire import Envelope
from vpipe.schedule.program import Program
from vpipe.schedule.text import from_csv
from vpipe.schedule.verify import verify

sys.path.append(str(Path(__file__).parents[1] / "runtime"))

import runtime_transports as scenarios


class OnDevices:
    """The device transport for scenarios that know the host only: every tensor goes to the device and back again."""

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
        self._inner.send(envelope, target, tree_map(lambda leaf: _moved(leaf, self._device), value))

    def take(self, envelope: Envelope) -> Any:
        return tree_map(lambda leaf: _moved(leaf, torch.device("cpu")), self._inner.take(envelope))

    def all_gather(self, value: Tensor, ranks: Sequence[int], sizes: Sequence[int] | None = None) -> list[Tensor]:
        return [block.cpu() for block in self._inner.all_gather(value.to(self._device), ranks, sizes)]

    def all_reduce(self, value: Tensor, ranks: Sequence[int]) -> None:
        there = value.to(self._device)
        self._inner.all_reduce(there, ranks)
        value.copy_(there)


def _moved(leaf: Any, device: torch.device) -> Any:
    from vpipe.runtime.transport.strides import copied

    if not isinstance(leaf, Tensor):
        return leaf
    moved = copied(leaf, device)
    torch.accelerator.current_stream().synchronize()
    return moved


def between_devices(rank: int, timeout: float = 10.0) -> tuple[Any, torch.device]:
    from vpipe.runtime.transport.choice import between_processes
    from vpipe.runtime.transport.device import DeviceTransport
    from vpipe.runtime.transport.routes import Route, route_of

    device = torch.device("emu", rank)
    skips = {route_of(Envelope(0, source, target, 0, 0), 0, 1) for source, target in product((0, 2, 4), (1, 3))}
    routes = {Route(0, 1), Route(1, 0)} | skips
    host = between_processes("auto", blocking=False, timeout=timeout)
    transport = DeviceTransport(host, device, direct=True)
    transport.prepare_routes(sorted(routes))
    transport.prepare_groups([[0, 1]])
    return transport, device


Scenario = tuple[Callable[..., Any], tuple[Any, ...], int]
WRONG = [Envelope(0, 0, 1, 4, 0), Envelope(7, 0, 1, 3, 0)]
SUITE: list[Scenario] = [
    (scenarios.order, (), 1),
    (scenarios.many_channels, (), 1),
    (scenarios.sizes, (), 1),
    (scenarios.kinds, (), 1),
    (scenarios.changed_afterwards, (), 1),
    (scenarios.collectives, (), 1),
    (scenarios.order, (), 3),
    (scenarios.many_channels, (), 3),
    (scenarios.changed_afterwards, (), 3),
    *[(scenarios.wrong_message, (sent, Envelope(0, 0, 1, 3, 0)), 1) for sent in WRONG],
]
"""(scenario, its arguments, how often): those that are repeated have messages of one form, told the first time only."""


def suite(rank: int, mode: str) -> list[Any]:
    import emulated_device as emulated

    emulated.settings(**emulated.MODES[mode])
    found = []
    inner, device = between_devices(rank)
    for number, (scenario, arguments, times) in enumerate(SUITE):
        transport: Any = OnDevices(inner, device, f"{'repeated' if times > 1 else 'single'} {number}")
        with scenarios.forbidden_pickle():
            found.append([scenario(transport, *arguments) for _ in range(times)][-1])
        inner.barrier()
    inner.close()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["as-is", "lazy", "delays"])
def test_the_shared_suite_of_transports(mode: str) -> None:
    ranks = on_ranks(suite, 2, mode, timeout=20)
    assert not any(isinstance(found, str) for found in ranks), ranks
    order, channels, sizes, _, changed, _, order_again, channels_again, changed_again, *wrong = ranks[1]
    assert order == order_again == list(range(50))
    assert channels == channels_again
    assert len(channels) == 48
    assert all(values == [float(s * 10 + t)] * (k + 1) for (s, t, k, _), values in channels)
    assert sizes == [length + k for length in (10, 300_000, 5, 1_000_000, 0, 70_000) for k in (2, 0, 1)]
    assert changed == changed_again == [0.0, 1000.0, 2000.0, 3000.0]
    everything = [[[0.0, 1.0], [0.0, 1.0, 2.0]]] * 2 + [[[3.0, 3.0], [3.0, 3.0]]]
    assert [found[5] for found in ranks] == [everything, everything]
    for sent, said in zip(WRONG, wrong, strict=True):
        assert f"expected {Envelope(0, 0, 1, 3, 0)}, but received {sent}" in said


HANGS = """0F0,0RECV_B0,0B0,0SEND_F0
1RECV_F0,1F0,1B0,1SEND_B0
"""
"""Each rank waits for the other's message before it sends its own."""


def test_the_verifier_refuses_an_order_that_hangs() -> None:
    bad = from_csv(HANGS)
    assert any("wait" in str(violation) for violation in verify(bad)), verify(bad)


def waits_for_each_other(rank: int) -> list[float]:
    """The order of ``HANGS``, with messages whose forms both ends know."""
    transport, device = between_devices(rank, timeout=4.0)
    forward, backward = Envelope(0, 0, 1, 0, 0), Envelope(0, 1, 0, 0, 1)
    mine, theirs = (forward, backward) if rank == 0 else (backward, forward)
    found = []
    for step in range(2):
        transport.begin_program("a program", lambda: "data of one form")
        transport.begin_step(step)
        value = torch.full((8,), rank + 1.0, device=device)
        transport.post(theirs._replace(step=step), 1 - rank)
        if step == 0:
            transport.send(mine._replace(step=step), 1 - rank, value)
        got = transport.take(theirs._replace(step=step))
        if step == 1:
            transport.send(mine._replace(step=step), 1 - rank, got * 2)
        found.append(float(got.sum()))
    return found


@pytest.mark.slow
def test_the_emulation_hangs_in_that_order_and_says_where() -> None:
    said = on_ranks(waits_for_each_other, 2, timeout=10, wait=60)
    assert all(isinstance(each, str) for each in said), said
    assert any("timed out" in each and "p2p" in each for each in said), said


def test_every_queue_of_a_program_is_a_communicator() -> None:
    """Stage 0 sends to stage 1 and past it to stage 3, both on rank 1: one order each."""
    from vpipe.runtime.transport.routes import CHAIN, routes
    from vpipe.schedule import catalog

    made = catalog.get("interleaved").build(2, 4, 2)
    program: Program = Program(made.rows, made.placement, made.num_microbatches, skips=frozenset({(0, 3)}))
    found = routes(program)
    assert {route.skip for route in found if route.source == 0} == {CHAIN, (0, 3)}
    assert {route.skip for route in found if route.source == 1} == {CHAIN, (3, 0)}
