"""The trials of ``vpipe doctor --gpu`` with a fault in the product (or in the device), which the trial must find."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def changed(owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
    """``owner.name``, wrapped."""
    setattr(owner, name, wrap(getattr(owner, name)))


def lost_way() -> None:
    """What goes from device 0 to device 1 does not come there."""

    def wrap(to: Any) -> Any:
        def found(self: Tensor, *args: Any, **more: Any) -> Tensor:
            there = to(self, *args, **more)
            return there * 0 if (str(self.device), str(there.device)) == ("emu:0", "emu:1") else there  # type: ignore[no-any-return]

        return found

    changed(Tensor, "to", wrap)


def receives_before_work() -> None:
    """Receives are posted as early as can be."""
    from vpipe.runtime.programs import Programs

    def wrap(init: Any) -> Any:
        def made(self: Any, *args: Any, receives_block: bool = False) -> None:
            init(self, *args[:4])

        return made

    changed(Programs, "__init__", wrap)


def waits_at_once() -> None:
    """Products stand behind a receive that is posted."""

    def wrap(irecv: Any) -> Any:
        def received(block: Tensor, *args: Any, **more: Any) -> Any:
            work = irecv(block, *args, **more)
            if block.numel() > 1:
                work.wait()
            return work

        return received

    changed(dist, "irecv", wrap)


def no_wait_for_messages() -> None:
    """The compute stream does not wait for what it takes."""
    import emulated_device

    from vpipe.runtime.transport.device import DeviceTransport

    emulated_device.settings(link_latency_us=20_000)

    def wrap(receive: Any) -> Any:
        return lambda self, *args: receive(self, *args)._replace(works=[])

    changed(DeviceTransport, "_receive", wrap)


def turned_messages() -> None:
    """Messages of several tensors come in the wrong order."""
    from vpipe.runtime.transport import device

    def wrap(unflatten: Any) -> Any:
        return lambda structure, tensors: unflatten(structure, tensors[::-1])

    changed(device, "unflatten", wrap)


def leaks() -> None:
    """A device's memory is not given back."""
    from vpipe.runtime.transport.device import DeviceTransport

    kept: list[Any] = []

    def wrap(begin: Any) -> Any:
        def began(self: Any, step: int) -> None:
            if step > 0:
                kept.append(torch.empty(2**23, dtype=torch.uint8, device=self._device))
            begin(self, step)

        return began

    changed(DeviceTransport, "begin_step", wrap)


def forgets_what_moves() -> None:
    """A layer that has moved begins anew."""
    from vpipe.runtime.moves import layer_state

    def wrap(put: Any) -> Any:
        def given(state: Any, module: nn.Module, *args: Any) -> None:
            put(state, module, *args)
            with torch.no_grad():
                next(module.parameters()).zero_()

        return given

    changed(layer_state, "put", wrap)


def nothing_dies() -> None:
    """Signals do not come."""
    os.kill = lambda pid, number: None  # type: ignore[assignment]


def no_limit() -> None:
    """A device's memory never ends."""
    import emulated_device

    emulated_device.settings(capacity=2.0**40)
    torch.accelerator.get_memory_info = lambda device=None: (2**10, 2**28)  # type: ignore[assignment]


def wrong_rules() -> None:
    """The planner takes memory for a tenth of what it is."""
    from vpipe.train.proof import trials

    def wrap(predict: Any) -> Any:
        def told(*args: Any) -> Any:
            found = predict(*args)
            object.__setattr__(found, "rank_memory", tuple(each // 10 for each in found.rank_memory))
            return found

        return told

    changed(trials, "predict", wrap)


def host_changes() -> None:
    """What goes through main memory loses its last bits."""
    from vpipe.runtime.transport import device

    def wrap(to_host: Any) -> Any:
        def given(leaf: Any) -> Any:
            found = to_host(leaf)
            return found.bfloat16().float() if isinstance(found, Tensor) and found.dtype is torch.float32 else found

        return given

    changed(device, "_to_host", wrap)


def ties_drift() -> None:
    """Weights that are one are updated each by its own gradients."""
    from vpipe.runtime.updates import update

    made = update.TiedGradients
    update.TiedGradients = lambda transport, layout, tied: made(transport, layout, ())  # type: ignore[assignment, misc, attr-defined]


def other_precision() -> None:
    """Layers compute in full precision whatever is asked."""
    from contextlib import nullcontext

    from vpipe.runtime import pipeline

    def wrap(of: Any) -> Any:
        return lambda schedule, seed, plain: of(schedule, seed, plain | {"autocast": nullcontext})

    changed(pipeline.PipelineOptions, "of", wrap)


def draws_anew() -> None:
    """A layer that is computed again draws other random numbers."""
    from vpipe.runtime import region

    drawn = iter(range(10**6))
    region.seed_layer = lambda *args: torch.manual_seed(next(drawn))


def swaps_early() -> None:
    """What comes back from main memory is read before it is there."""
    import emulated_device

    from vpipe.runtime.memory import swap_device

    emulated_device.settings(copy_bytes_per_us=2)
    swap_device.DevicePassage.wait = lambda self: None  # type: ignore[method-assign]


FAULTS: dict[str, Callable[[], None]] = {
    name: value
    for name, value in list(globals().items())
    if callable(value) and getattr(value, "__module__", "") == __name__ and name != "changed"
}

if __name__ == "__main__":
    FAULTS[os.environ["PLANTED"]]()
    from vpipe.train.proof import trials

    trials.main(Path(sys.argv[1]))
