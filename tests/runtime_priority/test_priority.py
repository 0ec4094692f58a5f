"""Policies order actions, and the CPU backends enforce the order on real threads."""

from __future__ import annotations

import threading
from time import perf_counter, sleep

import pytest
import torch

from vpipe.compat.priorities.order import Turnstile, fifo, policy
from vpipe.errors import UserError
from vpipe.models.emulated import SleepLayer
from vpipe.schedule.action import Action, Kind, parse

READY = "0F3 0W0 0B2 0F0 0I1 0W1"


@pytest.mark.parametrize(
    ("name", "order"),
    [
        ("none", "0F3 0W0 0B2 0F0 0I1 0W1"),
        ("first-hp", "0W0 0F0 0F3 0B2 0I1 0W1"),
        ("fifo", "0W0 0F0 0I1 0W1 0B2 0F3"),
        ("critical-path", "0I1 0B2 0F0 0F3 0W0 0W1"),
    ],
)
def test_the_turnstile_follows_the_policy(name: str, order: str) -> None:
    assert served(name, READY) == order


def test_an_unknown_policy_is_named() -> None:
    with pytest.raises(UserError, match=r"did you mean 'critical-path'\?"):
        policy("critical_path")


def served(name: str, arrivals: str) -> str:
    """The order in which a turnstile serves threads that arrive while it is held."""
    turnstile, order = Turnstile(policy(name)), []

    def visit(action: Action) -> None:
        with turnstile.turn(action):
            order.append(str(action))

    threads = [threading.Thread(target=visit, args=(parse(text),)) for text in arrivals.split()]
    with turnstile.turn(parse("0F9")):
        for number, thread in enumerate(threads, 1):
            thread.start()
            while len(turnstile._waiting) < number:
                sleep(1e-4)
    for thread in threads:
        thread.join(200)
    return " ".join(order)


def test_a_turn_that_fails_lets_the_next_one_in() -> None:
    turnstile = Turnstile(fifo)
    with pytest.raises(ValueError, match="boom"), turnstile.turn(parse("0F0")):
        raise ValueError("boom")
    with turnstile.turn(parse("0F1")):
        assert not turnstile._waiting


def threaded(name: str, num_stages: int, num_microbatches: int, seconds: float, num_layers: int) -> tuple[float, float]:
    """(time in units of one stage's forward, sum of the outputs) of a forward pass by real threads.

    A thread carries a microbatch through emulated stages of ``num_layers`` sleeping layers, a turnstile is the device
    of a stage, and takes the device anew for every layer.
    """
    devices = [Turnstile(policy(name)) for _ in range(num_stages)]
    layer = SleepLayer(seconds / num_layers, 0, 0)
    start = threading.Barrier(num_microbatches + 1)
    outputs = dict.fromkeys(range(num_microbatches), torch.zeros(1))

    def walk(microbatch: int) -> None:
        x = torch.full((1,), float(microbatch))
        start.wait()
        for stage, device in enumerate(devices):
            action = Action(stage, Kind.F, microbatch)
            for _ in range(num_layers):
                with device.turn(action), torch.no_grad():
                    x = layer(x)
        outputs[microbatch] = x

    threads = [threading.Thread(target=walk, args=(microbatch,)) for microbatch in range(num_microbatches)]
    for thread in threads:
        thread.start()
    start.wait()
    begin = perf_counter()
    for thread in threads:
        thread.join(60)
    return (perf_counter() - begin) / seconds, float(sum(outputs.values()))


def test_strict_order_beats_fair_sharing_on_emulated_devices() -> None:
    """p=4, m=8, t = 4 layers of 15 ms: in turns the stages hardly overlap, in strict order they do."""
    found = {name: threaded(name, 4, 8, 0.06, 4) for name in ("none", "first-hp", "fifo")}
    print({name: f"{time:.1f} t" for name, (time, _) in found.items()})
    assert found["fifo"][0] < 0.75 * found["none"][0]
    assert len({output for _, output in found.values()}) == 1
