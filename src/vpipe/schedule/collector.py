"""A pause for the garbage collector.

A program is millions of small actions that all stay. While they are made, the collector would look at them again and
again, and take half of the time.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Nothing is collected inside; a collector that was off stays off."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
