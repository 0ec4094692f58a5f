"""The transports' shared suite on the transport between devices, and orders that would hang NCCL."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import runtime_transports as scenarios
import torch
import transport_suite
from emulated_ranks import on_ranks

from vpipe.runtime.ranks import device_groups
from vpipe.runtime.transport.inprocess import Hub
from vpipe.runtime.transport.ondevice import transports
from vpipe.runtime.transport.wire import Envelope
from vpipe.schedule.program import Program, from_csv
from vpipe.schedule.verify import verify


def suite(rank: int, mode: str) -> list[str]:
    import emulated_device as emulated

    emulated.settings(**emulated.MODES[mode])
    transport = transport_suite.between_devices(torch.device("emu", rank))
    with scenarios.forbidden_pickle():
        found = transport_suite.broken(transport, torch.device("emu", rank))
    device_groups.current().abort()  # as after every failure: the last messages were refused, and stay unmatched
    transport.close()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["as-is", "lazy", "delays"])
def test_the_shared_suite_of_transports(mode: str) -> None:
    assert on_ranks(suite, 2, mode, timeout=120) == [[], []]


def in_threads(kind: str) -> list[str]:
    """The promises that are not kept between two devices of this process."""
    devices = [torch.device(kind, 0), torch.device(kind, 1)]
    found: dict[int, list[str]] = {}

    def run(end: Any) -> None:
        try:
            found[end.rank] = transport_suite.broken(end, devices[end.rank])
        except Exception as error:
            end.fail(error)
            found[end.rank] = [str(error).splitlines()[0]]

    ranks = [threading.Thread(target=run, args=(end,), daemon=True) for end in transports(Hub(2), devices)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(300.0)
    return [name for rank in (0, 1) for name in found.get(rank, ["no answer"])]


def test_the_shared_suite_between_threads(mode: str) -> None:
    assert in_threads("emu") == []


def test_a_message_without_its_snapshot_is_told(monkeypatch: pytest.MonkeyPatch, emulated: Any) -> None:
    monkeypatch.setattr("vpipe.runtime.transport.handover._snapshot", lambda leaf: leaf)
    emulated.settings(lazy=1)
    assert "changed afterwards" in in_threads("emu")


def test_a_promise_that_is_broken_is_told(monkeypatch: pytest.MonkeyPatch, emulated: Any) -> None:
    monkeypatch.setattr("vpipe.runtime.transport.handover._snapshot", lambda leaf: leaf)
    monkeypatch.setattr("vpipe.runtime.transport.ondevice.taken", lambda carried, target: carried.value)
    emulated.settings(lazy=1)
    assert in_threads("emu")


HANGS = """0F0,0RECV_B0,0B0,0SEND_F0
1RECV_F0,1F0,1B0,1SEND_B0
"""
"""Each rank waits for the other's message before it sends its own."""


def test_the_verifier_refuses_an_order_that_hangs() -> None:
    bad = from_csv(HANGS)
    assert any("wait" in str(violation) for violation in verify(bad)), verify(bad)


def waits_for_each_other(rank: int) -> list[float]:
    """The order of ``HANGS``, with messages whose forms both ends know."""
    device = torch.device("emu", rank)
    transport = transport_suite.between_devices(device, timeout=6.0)
    forward, backward = Envelope(0, 0, 1, 0, 0), Envelope(0, 1, 0, 0, 1)
    mine, theirs = (forward, backward) if rank == 0 else (backward, forward)
    found = []
    for step in range(2):
        transport.begin_program("a program", lambda: "data of one form")
        transport.begin_step(step)
        value = torch.full((8,), rank + 1.0, device=device)
        if step == 0:
            transport.send(mine._replace(step=step), 1 - rank, value)
        transport.post(theirs._replace(step=step), 1 - rank)
        got = transport.take(theirs._replace(step=step))
        if step == 1:
            transport.send(mine._replace(step=step), 1 - rank, got * 2)
        found.append(float(got.sum()))
    return found


@pytest.mark.slow
def test_the_emulation_hangs_in_that_order_and_says_where() -> None:
    said = on_ranks(waits_for_each_other, 2)
    assert any(isinstance(each, str) and "timed out" in each and "p2p" in each for each in said), said


def test_every_queue_of_a_program_is_a_communicator() -> None:
    """Stage 0 sends to stage 1 and past it to stage 3, both on rank 1: one order each."""
    from vpipe.runtime.transport.routes import CHAIN, routes
    from vpipe.schedule import catalog
    from vpipe.schedule.placement import Layout

    made = catalog.get("interleaved").build(2, 4, 2)
    program: Program = Program(made.rows, made.placement, made.num_microbatches, skips=frozenset({(0, 3)}))
    found = routes(program, Layout.of([1] * 4, made.placement))
    assert {route.skip for route in found if route.source == 0} == {CHAIN, (0, 3)}
    assert {route.skip for route in found if route.source == 1} == {CHAIN, (3, 0)}
