"""Priorities by CUDA streams: what the hardware offers without any library.

A GPU knows few priorities (usually two or three) and does not interrupt a running kernel; so ``fifo`` over many
microbatches is coarse here, ``first-hp`` and ``critical-path`` fit well. Nothing of this was run on a GPU by us: no
effect is claimed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from vpipe.compat.priorities.order import Policy
from vpipe.schedule.action import Action, Kind

_KINDS = (Kind.I, Kind.F, Kind.W)


def levels(policy: Policy, num_microbatches: int, lowest: int, highest: int) -> dict[tuple[int, ...], int]:
    """Key → stream priority, from ``highest`` (a small number, as CUDA counts) for the smallest key to ``lowest``."""
    keys = sorted({policy(Action(0, kind, microbatch)) for kind in _KINDS for microbatch in range(num_microbatches)})
    return {key: min(highest + place, lowest) for place, key in enumerate(keys)}


class StreamPriorities:
    """One stream per microbatch and priority; the work of a turn is queued on its stream.

    A microbatch's turns follow each other also where they change streams; turns of different microbatches do not wait
    for one another, and what belongs to a whole stage (REDUCE, STEP) waits for all.
    """

    def __init__(self, policy: Policy, num_microbatches: int, device: torch.device) -> None:
        lowest, highest = torch.cuda.Stream.priority_range()  # type: ignore[call-arg]
        self._policy = policy
        self._device = device
        self._levels = levels(policy, num_microbatches, lowest, highest)
        self._lowest = lowest
        self._streams: dict[tuple[int, int], torch.cuda.Stream] = {}
        self._latest: dict[int, torch.cuda.Stream] = {}

    @contextmanager
    def turn(self, action: Action) -> Iterator[None]:
        """Queue the body's kernels on the action's stream."""
        stream = self._stream(action)
        for earlier in self._awaited(action):
            if earlier is not stream:
                stream.wait_stream(earlier)
        with torch.cuda.stream(stream):
            yield
        self._latest[action.microbatch] = stream

    def close(self) -> None:
        """Wait for all streams."""
        for stream in self._streams.values():
            stream.synchronize()

    def _awaited(self, action: Action) -> list[torch.cuda.Stream]:
        if action.microbatch < 0:
            return list(self._latest.values())
        return [self._latest.get(action.microbatch) or torch.cuda.current_stream(self._device)]

    def _stream(self, action: Action) -> torch.cuda.Stream:
        priority = self._levels.get(self._policy(action), self._lowest)
        key = (priority, action.microbatch)
        if key not in self._streams:
            self._streams[key] = torch.cuda.Stream(self._device, priority=priority)  # type: ignore[no-untyped-call]
        return self._streams[key]
