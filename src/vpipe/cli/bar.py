"""A bar for work that takes a while: on a terminal only, on standard error, gone when the work is done."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from vpipe.process import obeys

PROGRESS = "progress.json"
"""What a measuring rank 0 writes into its directory: done, total, name."""


@contextmanager
def bar(title: str, hidden: bool = False) -> Iterator[Callable[..., None]]:
    """Yields a function that takes how much is done, of how much, and what is done now."""
    if hidden or not obeys(sys.stderr):
        yield lambda done, total, now="": None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    ends = (TextColumn("{task.description}"), TextColumn("{task.fields[now]}"))
    columns = (ends[0], BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), ends[1])
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task(title, total=None, now="")
        yield lambda done, total, now="": shown.update(task, completed=done, total=total, now=now)


@contextmanager
def following(directory: Path, title: str, hidden: bool = False) -> Iterator[None]:
    """A bar that is moved by what rank 0 of other processes writes about its progress into a directory."""
    done = threading.Event()
    with bar(title, hidden) as move:

        def follow() -> None:
            while not done.wait(0.2):
                try:
                    seen = json.loads((directory / PROGRESS).read_text())
                except (OSError, ValueError):
                    continue
                move(seen["done"], seen["total"], seen["name"])

        follower = threading.Thread(target=follow, name="vpipe-progress", daemon=True)
        follower.start()
        try:
            yield
        finally:
            done.set()
            follower.join()
