"""Running a target as the ranks of one run: on this machine (``local``) or others (``machines``)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vpipe.launch.epochs import Elastic
from vpipe.launch.launcher import Launcher
from vpipe.launch.output import Output, Stream
from vpipe.launch.place import RankPlace
from vpipe.launch.stopping import Grace
from vpipe.launch.zygote_start import PRELOAD
from vpipe.rundir.journal import Ending

STOP_GRACE = 10.0
"""Seconds from the first Ctrl-C to the end of patience."""


def lead(
    target: Sequence[str] | str,
    num_ranks: int,
    place_of: Callable[[Launcher, Output], RankPlace],
    *,
    arguments: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
    preload: Sequence[str] = PRELOAD,
    log_dir: Path | str | None = None,
    quiet: bool = False,
    grace: Grace | float = STOP_GRACE,
    stdout: Stream | None = None,
    stderr: Stream | None = None,
    concluded: Callable[[Ending], str] | None = None,
    check: Mapping[str, Any] | None = None,
    elastic: Elastic | None = None,
) -> int:
    """Run ``target`` as ranks 0..num_ranks-1 at a place and wait for all of them; the exit code.

    ``target`` is an argv list (``["script.py", "--steps", "10"]`` or ``["-m", "package.module"]``) or a function
    ``"package.module:function"``, called with ``arguments`` (anything JSON can hold) in every rank; if it returns an
    int, that is the rank's exit code. ``preload`` names the modules that are imported once, before the ranks are
    forked. ``quiet`` shows failures only; the log files have everything. ``grace`` are the seconds from a request to
    stop to the end of patience. ``concluded`` is told an ending that the ranks could not tell themselves, and returns
    what else to say. ``check`` is asked before any rank starts: ``{"function": "package.module:function", "arguments":
    {...}}``, which raises a ``UserError`` against the run. ``elastic``: ranks may be lost and replaced.
    """
    most = elastic.most if elastic is not None else num_ranks
    output = Output(stdout or sys.stdout.buffer, stderr or sys.stderr.buffer, most, log_dir, quiet)
    try:
        launcher = Launcher(num_ranks, output, grace, elastic)
        launcher.place = place_of(launcher, output)
        spec = {
            "target": target,
            "arguments": dict(arguments or {}),
            "preload": list(preload),
            "check": dict(check) if check else None,
            "environment": dict(environment or {}),
        }
        return launcher.run(spec, concluded)
    finally:
        output.close()
