"""What the C library does with memory that tensors in main memory have freed.

A step frees nearly everything that it took, and the next one takes it again. By default glibc gives most of it back to
the system in between, and every page must then be found and zeroed once more: a GPT stage under gpipe took 8,000 page
faults a step, 2 to 6 % of its time. So freed memory is kept, except where a pipeline swaps: what has gone out must not
stay with the process.

Both are choices for the whole process, made by ``mallopt``. Other C libraries have no such options, and need none or
cannot be asked; a device's memory is torch's own affair.
"""

from __future__ import annotations

import ctypes

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""The names of the options for ``mallopt``: how much may lie free at the end of the heap, and from which size on a
block is a mapping of its own, which is given back when it is freed. glibc adapts both until one of them is set."""
MOST = 32 * 2**20
"""The largest size that glibc accepts for a block of the heap."""
LARGE = 2**20
"""Blocks from this size on are given back where a pipeline swaps. A GPT stage with tensors of 1 to 4 MiB took a quarter
more processor time at 128 KiB, and half more memory at 2 MiB."""


def keep_freed_memory() -> None:
    """What is freed stays with the process, for the next step."""
    _set(MMAP_THRESHOLD, MOST)
    _set(TRIM_THRESHOLD, 2**30)


def return_freed_memory() -> None:
    """Large blocks go back to the system when they are freed."""
    _set(MMAP_THRESHOLD, LARGE)
    _set(TRIM_THRESHOLD, LARGE)


def _set(option: int, value: int) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(option, value)
