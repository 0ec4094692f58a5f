"""Random numbers that do not depend on where or when a layer runs.

Dropout in a pipeline must draw the same numbers whatever the schedule, the partition or the number of processes, and
draw them again when an activation is recomputed. So the generator is seeded before each layer from (seed, unit, layer),
where the unit is counted over the whole training run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

_MASK = (1 << 64) - 1
_EVALUATION = 0x6576616C


def key(*numbers: int) -> int:
    """A 64-bit number that differs in all bits when any argument differs (splitmix64 steps)."""
    state = 0x9E3779B97F4A7C15
    for number in numbers:
        state = (state + (number & _MASK) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def evaluation_seed(seed: int) -> int:
    """What an evaluation draws from: random layers give the same numbers wherever they run and however often one asks,
    and none of those of the training."""
    return key(seed, _EVALUATION)


def seed_layer(seed: int, unit: int, layer: int) -> None:
    """Seed the generators that a layer on this device draws from."""
    number = key(seed, unit, layer)
    _seed(number)
    for device_type in _device_types:
        torch.get_device_module(device_type).manual_seed(number)  # of the thread's current device


_seed = torch.default_generator.manual_seed


_device_types: set[str] = set()


def use_generator_of(device: torch.device) -> None:
    """From now on layers draw from this kind of device's generator too."""
    if device.type != "cpu":
        _device_types.add(device.type)


@contextmanager
def undisturbed(devices: Sequence[torch.device] = ()) -> Iterator[None]:
    """Give the caller back the random state that it had, that of ``devices`` too."""
    state = torch.default_generator.get_state()
    others = [(torch.get_device_module(d.type), d) for d in dict.fromkeys(devices) if d.type != "cpu"]
    states = [module.get_rng_state(device) for module, device in others]
    try:
        yield
    finally:
        torch.default_generator.set_state(state)
        for (module, device), before in zip(others, states, strict=True):
            module.set_rng_state(before, device)
