"""One clock for all ranks.

Records carry ``perf_counter_ns`` of the process that wrote them. On Linux that is ``CLOCK_MONOTONIC``, which all
processes of one machine share, so ranks of one host need nothing. Between hosts the clocks start at different moments;
``offset`` estimates the difference by asking the other side for its time, as NTP does: of several round trips the
shortest bounds the error best, because the answer was read somewhere inside it.

    here    before ────────────┬──────────── after
    there                   answer                       offset = answer - (before + after) / 2,  error ≤ half the trip

Clocks of two machines also drift apart by some 10 µs a second, so a long run asks again from time to time
(``train.reporting.clocks``) and sets ``Recorder.offset_ns``.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from pathlib import Path
from time import perf_counter_ns
from typing import NamedTuple


class Offset(NamedTuple):
    """What to add to this process's clock to get the reference's, and how wrong that may be."""

    nanoseconds: int
    error: int


def offset(ask: Callable[[], int], rounds: int = 16, clock: Callable[[], int] = perf_counter_ns) -> Offset:
    """The offset to the process that ``ask`` asks for its ``perf_counter_ns``."""
    best: Offset | None = None
    for _ in range(max(1, rounds)):
        before = clock()
        answer = ask()
        after = clock()
        error = (after - before + 1) // 2
        if best is None or error < best.error:
            best = Offset(answer - (before + after) // 2, error)
    assert best is not None
    return best


def identity() -> str:
    """A name of the clock that this process reads: equal on two ranks whose clocks need no alignment.

    A container may have a clock of its own: a time namespace.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/time')}"
    except OSError:
        return platform.node()
