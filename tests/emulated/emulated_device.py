"""Device type ``emu``: an accelerator whose streams are threads, registered with torch as a vendor's would be.

Importing this module registers it. In the process of the test suite it is *visible* to ``torch.accelerator`` only while
``visible`` says so, because other tests must find a machine without one; in a process of its own it always is.
"""

from __future__ import annotations

import atexit
import importlib
import importlib.machinery
import importlib.util
import json
import os
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from emulated_build import library

MOST_DEVICES = 8
MODES: dict[str, dict[str, float]] = {
    "as-is": {},
    "lazy": {"lazy": 1},
    "delays": {"jitter_us": 300, "seed": 7},
    "harsh": {"first_use": 1, "memory_waits": 1, "one_pool": 1, "queues": 8},
}
"""No mode shows every forgotten wait; the first three together do. The last shows orders that hang: whole devices wait
where a kernel is loaded or memory is got, and streams share what real ones share."""
VENDORS: dict[str, Callable[[str], dict[str, float]]] = {
    "CUDA_LAUNCH_BLOCKING": lambda value: {"async": value != "1"},
    "CUDA_DEVICE_MAX_CONNECTIONS": lambda value: {"queues": int(value)},
    "CUDA_MODULE_LOADING": lambda value: {"first_use": value != "EAGER"},
}
"""Variables of CUDA → what they mean here, where the device is a vendor's package."""
_RESET: dict[str, float] = {
    "lazy": 0, "jitter_us": 0, "seed": 1, "poison": 1, "sync_mode": 0, "capacity": 2.0**34, "queue_limit": 1024,
    "op_us": 0, "flops_per_us": 0, "bytes_per_us": 0, "copy_bytes_per_us": 0, "link_bytes_per_us": 0, "link_latency_us": 0,
    "p2p_pair_comm": 1, "eager_bytes": 0, "async": 1, "serial": 0, "skip_compute": 0, "lost_hangs": 0,
    "first_use": 0, "memory_waits": 0, "one_pool": 0, "touches": 0, "queues": 0,
}  # fmt: skip
_count = int(os.environ.get("EMULATED_DEVICES", MOST_DEVICES))


def _load() -> Any:
    path = str(library())
    loader = importlib.machinery.ExtensionFileLoader("emulated", path)
    spec = importlib.util.spec_from_file_location("emulated", path, loader=loader)
    assert spec is not None
    native = importlib.util.module_from_spec(spec)
    loader.exec_module(native)
    return native


native = _load()
native.start(MOST_DEVICES)


def index_of(device: Any = None) -> int:
    if isinstance(device, int):
        return device
    found = None if device is None else torch.device(device).index
    return native.current_device() if found is None else found


class DeviceModule(types.ModuleType):
    """``torch.emu``: what torch asks of a vendor's module."""

    Stream, Event = torch.Stream, torch.Event

    def is_available(self) -> bool:
        return _count > 0

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        native.touch()
        return _count

    def current_device(self) -> int:
        return native.current_device()  # type: ignore[no-any-return]

    def _is_in_bad_fork(self) -> bool:
        return native.in_bad_fork()  # type: ignore[no-any-return]

    def manual_seed_all(self, seed: int) -> None:
        for device in range(MOST_DEVICES):
            native.set_rng(device, int(seed) % 2**64, 0)

    def manual_seed(self, seed: int) -> None:
        native.set_rng(native.current_device(), int(seed) % 2**64, 0)

    def initial_seed(self) -> int:
        return native.rng(native.current_device())[0]  # type: ignore[no-any-return]

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        numbers = [x - 2**64 if x >= 2**63 else x for x in native.rng(index_of(device))]
        return torch.tensor(numbers, dtype=torch.int64).view(torch.uint8)

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        native.set_rng(index_of(device), *[x % 2**64 for x in state.view(torch.int64).tolist()])

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def synchronize(self, device: Any = None) -> None:
        torch.accelerator.synchronize(index_of(device))

    def set_device(self, device: Any) -> None:
        torch.accelerator.set_device_index(index_of(device))

    def current_stream(self, device: Any = None) -> torch.Stream:
        return torch.accelerator.current_stream(index_of(device))

    def get_device_name(self, device: Any = None) -> str:
        return "emulated accelerator"

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        with torch.accelerator.device_index(index_of(device)):
            yield


def autoload() -> None:
    """What torch calls where this is installed as a vendor's package is (entry point ``torch.backends``)."""
    settings(**json.loads(os.environ.get("EMULATED_SETTINGS", "{}")))
    for name, meaning in VENDORS.items():
        if name in os.environ:
            settings(**meaning(os.environ[name]))
    importlib.import_module("torch._dynamo")  # some operators' shapes need it: once, before ranks are forked


def settings(**values: float) -> None:
    """Change how the device behaves: see ``Config`` in ``native/emulated.h``."""
    for name, value in values.items():
        native.set(name, value)


def reset() -> None:
    """As it was at the beginning, with nothing in flight."""
    settings(**_RESET)
    native.quiesce()
    native.reset_counts()


def syncs() -> dict[str, int]:
    """What made the host wait for the device, and how often, since the last ``reset``."""
    return dict(native.syncs())


def hide() -> None:
    """Other tests of this process find a machine without an accelerator."""
    global _count
    _count = 0


@contextmanager
def visible(devices: int = MOST_DEVICES) -> Iterator[None]:
    """``torch.accelerator`` offers that many devices."""
    global _count
    before, _count = _count, devices
    try:
        yield
    finally:
        _count = before


def _register() -> None:
    torch.utils.rename_privateuse1_backend("emu")
    torch._register_device_module("emu", DeviceModule("torch.emu"))
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    atexit.register(native.quiesce)
    if torch.distributed.is_available():
        torch.distributed.Backend.register_backend("fakenccl", native.make_nccl, devices=["emu"])


_register()
