"""What surrounds a step and is not its own: torch's switches, the modes of the user's modules, random numbers.

**Switches.** Torch keeps many per thread: autocast, grad and inference mode, the default device, saved-tensor hooks,
modes that watch operations, how many threads one operation uses. Ranks of one process and workers of one rank are
threads, so without this ``with torch.autocast(...): pipe.train_step(...)`` would mean one thing with one rank and
another with two.

    caller   modes = Modes()          remembers
    thread   with modes.here(): …     the same switches, undone at the end

What torch keeps per process (default dtype, deterministic algorithms, anomaly detection) follows by itself, and so does
what a new thread inherits (how denormal numbers are treated).

**Train or eval mode, frozen or not**, is the user's to choose, part by part, as in plain torch. A training step runs
every part in the mode in which the user has left it, so a ``bn.eval()`` stays. An evaluation runs all of them in eval
mode and then gives each its own back. Replicas of one process are copies that the user does not see: they follow the
first.

**Random numbers** do not depend on where or when a layer runs. Dropout in a pipeline must draw the same numbers
whatever the schedule, the partition or the number of processes, and draw them again when an activation is recomputed.
So the generator is seeded before each layer from (seed, unit, layer), where the unit is counted over the whole training
run. A step gives the caller back the random state that it had.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from vpipe.errors import UserError

_C: Any = torch._C


class Modes:
    """The switches of the thread that makes it; entered by others, each in its own thread."""

    def __init__(self) -> None:
        kinds = [kind for kind in _kinds() if torch.is_autocast_enabled(kind)]
        self._autocast = [(kind, torch.get_autocast_dtype(kind)) for kind in kinds]
        self._caches = torch.is_autocast_cache_enabled()
        self._grad, self._inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        self._multithreading = _C._is_multithreading_enabled()
        self._functions = [_C._get_function_stack_at(i) for i in range(_C._len_torch_function_stack())]
        dispatches = [_C._get_dispatch_stack_at(i) for i in range(_C._len_torch_dispatch_stack())]
        # Those with a key are torch's own tracers.
        self._dispatches = [mode for mode in dispatches if getattr(mode, "_mode_key", None) is None]
        self._saving = _C._autograd._top_saved_tensors_default_hooks(True)
        self._num_threads = torch.get_num_threads()

    @contextmanager
    def here(self) -> Iterator[None]:
        """The same switches in the thread that calls; they are undone at the end."""
        with ExitStack() as stack:
            torch.set_num_threads(self._num_threads)  # OpenMP counts per thread
            stack.enter_context(torch.inference_mode(self._inference))
            stack.enter_context(torch.set_grad_enabled(self._grad))
            stack.enter_context(torch.autograd.set_multithreading_enabled(self._multithreading))
            for kind, dtype in self._autocast:
                stack.enter_context(torch.autocast(kind, dtype, cache_enabled=self._caches))
            if self._saving is not None:
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*self._saving))
            for mode in self._functions:
                _C._push_on_torch_function_stack(mode)
                stack.callback(_C._pop_torch_function_stack)
            for mode in self._dispatches:
                _C._push_on_torch_dispatch_stack(mode)
                stack.callback(_C._pop_torch_dispatch_stack, None)
            yield


def forget_casts() -> None:
    """Autocast keeps casts of weights until its outermost context ends: after an update they are those of old
    weights."""
    if _C._is_any_autocast_enabled():
        torch.clear_autocast_cache()


def _kinds() -> list[str]:
    return list(_C._autocast_supported_devices()) if _C._is_any_autocast_enabled() else []


@contextmanager
def evaluating(modules: Iterable[nn.Module]) -> Iterator[None]:
    """All in eval mode; afterwards as the user had left them."""
    tops = list(modules)
    parts = {part: part.training for module in tops for part in module.modules()}
    before = [(module, module.training) for module in tops]
    for module in tops:
        module.eval()
    try:
        yield
    finally:
        for module, training in before:
            module.train(training)  # some modules do more than set the flag
        for part, training in parts.items():
            part.training = training


def follow(first: nn.Module, copied: nn.Module) -> None:
    """Let a copy of a module train as the first does."""
    for leader, part in zip(first.modules(), copied.modules(), strict=True):
        part.training = leader.training
    with torch.no_grad():
        for weight, parameter in zip(first.parameters(), copied.parameters(), strict=True):
            vars(parameter).update(vars(weight))
            parameter.requires_grad_(weight.requires_grad)
            parameter._backward_hooks = weight._backward_hooks
            parameter._post_accumulate_grad_hooks = weight._post_accumulate_grad_hooks
            if not weight.is_cpu or not torch.equal(parameter, weight):  # devices are not asked: hosts would wait
                parameter.copy_(weight)


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


class OneThread:
    """What one thread does at a time, and another is refused."""

    def __init__(self) -> None:
        self._free = threading.Lock()

    @contextmanager
    def undisturbed(self, devices: Sequence[torch.device]) -> Iterator[None]:
        """The same as the function, for one thread."""
        if not self._free.acquire(blocking=False):
            raise UserError(
                "this pipeline is in the middle of a step of another thread; use it from one thread at a time, or make "
                "a Pipeline for each"
            )
        try:
            with undisturbed(devices):
                yield
        finally:
            self._free.release()


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
