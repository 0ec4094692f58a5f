"""What the caller of a step has switched on, for the threads that run it.

Torch keeps many of its switches per thread: autocast, grad and inference mode, the default device, saved-tensor hooks,
modes that watch operations, how many threads one operation uses. Ranks of one process
and workers of one rank are threads, so without this ``with torch.autocast(...): pipe.train_step(...)`` would mean one
thing with one rank and another with two.

    caller   modes = Modes()          remembers
    thread   with modes.here(): …     the same switches, undone at the end

What torch keeps per process (default dtype, deterministic algorithms, anomaly detection) follows by itself, and so does
what a new thread inherits (how denormal numbers are treated).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

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
