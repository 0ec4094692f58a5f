"""A plugin that gives the ranks of a run a disk that fails once in each save.

``plan[n]`` is what happens in the n-th save of a process: (rank, number of the call in its saving thread, errno).
"""

from __future__ import annotations

import io
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

CALLS = ((os, "open write fsync rename replace mkdir unlink rmdir scandir stat"), (io, "open"))
FAULTS = "FAULTS"
"""Names a file with the plan."""

Plan = list[tuple[int, int, int]]


class FaultyDisk:
    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._saving: threading.Thread | None = None
        self._counts: list[int] = []
        """Calls of each save."""

    def _before(self, call: str, target: object) -> None:
        """Raise if this is the call that is to fail."""
        thread = threading.current_thread()
        if thread.name != "vpipe-save":
            return
        if thread is not self._saving:
            self._saving = thread
            self._counts.append(0)
        number, place = len(self._counts) - 1, (int(os.environ.get("RANK", 0)), self._counts[-1])
        self._counts[-1] += 1
        if number < len(self._plan) and self._plan[number][:2] == place:
            error = self._plan[number][2]
            raise OSError(error, os.strerror(error), f"{call} {target}")

    def install(self) -> None:
        """Stand before the calls."""
        for place, names in CALLS:
            for name in names.split():
                setattr(place, name, self._around(name, getattr(place, name)))

    def _around(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **more: Any) -> Any:
            self._before(name, arguments[0] if arguments else "")
            return original(*arguments, **more)

        return call


if FAULTS in os.environ:
    FaultyDisk(
        [(rank, call, error) for rank, call, error in json.loads(Path(os.environ[FAULTS]).read_text())]
    ).install()
