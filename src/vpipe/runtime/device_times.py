"""When a device did what: events on its streams, read after the step and put on the host's clock.

The host only enqueues, so its own times say when work was handed over. Each action leaves three events on the compute
stream: where it begins, where it has what it needs, where it ends. No host waits for them: the step's one read comes
after all of them, and then they are asked. When a step begins the device is idle (the step before has been read), so
its first event stands where the host's clock stands at that moment: that ties the two clocks together anew each step.

    host     ├ anchor ─ F0 ─ F1 ─ …  enqueued                                 read ┤
    device   ├ anchor ─ begin ─ ready ── end ─ begin ─ ready ── end …          end ┤
"""

from __future__ import annotations

from time import perf_counter_ns

import torch

from vpipe.runtime.device import compute_stream


class DeviceTimes:
    """The events of one rank's step; they are used again in the next."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[torch.Event] = []
        self._used: list[torch.Event] = []
        self._host = 0

    def start(self) -> None:
        """A step begins, on an idle device."""
        self._free += self._used
        self._used = []
        self._host = perf_counter_ns()
        self._anchor = self.mark()

    def mark(self, stream: torch.Stream | None = None) -> torch.Event:
        """An event where a stream is now: the compute stream, if none is given."""
        event = self._free.pop() if self._free else torch.Event(self._device, enable_timing=True)
        event.record(stream or compute_stream(self._device))
        self._used.append(event)
        return event

    def at(self, event: torch.Event) -> int:
        """The host's clock when the device came to an event, in nanoseconds; the device must have."""
        return self._host + round(self._anchor.elapsed_time(event) * 1e6)
