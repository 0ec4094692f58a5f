"""What a forked rank does before and after the user's code.

It takes its place (environment, streams), then runs the script or function as ``python script.py`` would. An exception
that is not caught goes to the launcher as a report, not to the screen: with all reports in hand, the launcher can show
the first cause and fold the rest.

A rank of ours that has done its work leaves at once (``Departure``): an interpreter that has loaded torch takes two
seconds of processor time to take itself apart, and on a busy machine a run that was asked to stop has no time for that.
What its code has written to files that it left open is flushed. A user's script ends as Python ends it.
"""

from __future__ import annotations

import atexit
import gc
import io
import json
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any

from vpipe.errors import UserError
from vpipe.process import AS_MODULE

_OUR_FRAMES = (str(Path(__file__).parent), "<frozen runpy>")
_GLOO = ("third_party/gloo", "gloo/transport")


WRITERS = {io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom}


class Departure:
    """The last of all exit functions: it ends the process, once the target has said with which code."""

    def __init__(self) -> None:
        self.code: int | None = None

    def __call__(self) -> None:
        if self.code is None:
            return
        gc.unfreeze()  # what is frozen is not listed
        for found in gc.get_objects():
            if type(found) in WRITERS:
                with suppress(Exception):
                    found.flush()
        os._exit(self.code)


DEPARTURE = Departure()


def become_rank(spec: dict[str, Any], order: dict[str, Any], given: Sequence[int]) -> None:
    """Run the target as the rank that was ordered; returns, or raises what the target raises."""
    rank = int(order["fork"])
    stdout, stderr, report, *control = given
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    os.close(stdout)
    os.close(stderr)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "VPIPE_REPORT_FD": str(report)}
    os.environ.update(spec["environment"] | own | order["variables"])
    if control:  # of an elastic run: rank is a slot, and the launcher will say which rank it is
        os.environ.update({"VPIPE_CONTROL_FD": str(control[0]), "VPIPE_SLOT": str(rank)})
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # as in processes that were started one by one
    sys.excepthook = Reporter(rank, report)
    atexit.register(gc.unfreeze)  # what the zygote froze would never be freed, and libraries that count tell of leaks
    call_target(spec)


def call_target(spec: dict[str, Any]) -> None:
    """Run a script, a module (``-m name``) or a function (``package.module:function``)."""
    target = spec["target"]
    if isinstance(target, str):
        module, _, name = target.partition(":")
        sys.argv = [target]
        code = getattr(import_module(module), name)(**spec["arguments"])
        DEPARTURE.code = code if isinstance(code, int) else 0
        signal.signal(signal.SIGINT, lambda *_: DEPARTURE())  # the end was told: Ctrl-C only ends the wait for it
        sys.exit(DEPARTURE.code)
    elif target[0] in ("-m", AS_MODULE):
        sys.argv = list(target[1:])
        if target[0] == "-m":
            _put_first(os.getcwd())
        runpy.run_module(target[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(target)
        _put_first(str(Path(target[0]).resolve().parent))
        runpy.run_path(target[0], run_name="__main__")


def _put_first(folder: str) -> None:
    """Import from this folder first, as Python does for a script; the zygote may have the current one there."""
    sys.path[: not sys.flags.safe_path] = [folder]


class Reporter:
    """The ``sys.excepthook`` of a rank: tells the launcher."""

    def __init__(self, rank: int, fd: int) -> None:
        self._rank = rank
        self._fd = fd

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        report = describe(self._rank, error, trace)
        try:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            data = json.dumps(report).encode() + b"\n"
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError:
            traceback.print_exception(kind, error, trace)


def describe(rank: int, error: BaseException, trace: TracebackType | None) -> dict[str, Any]:
    """A failure as the launcher reads it. ``kind``: user, interrupt, lost (only saw another rank's end) or error."""
    sentence = "".join(traceback.format_exception_only(error)).splitlines()[0]
    cause = getattr(error, "cause", None)
    if isinstance(error, UserError):
        kind, sentence = "user", str(error)
    elif isinstance(error, KeyboardInterrupt):
        kind = "interrupt"
    elif hasattr(error, "peer") or (isinstance(error, RuntimeError) and any(word in str(error) for word in _GLOO)):
        kind = "lost"
    else:
        kind = "error"
    lines = traceback.format_exception(type(error), error, _without_ours(trace))
    return {
        "rank": rank,
        "kind": kind,
        "sentence": sentence,
        "traceback": "".join(lines),
        "cause": cause if isinstance(cause, dict) else None,
    }


def _without_ours(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the user's first frame on."""
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename.startswith(_OUR_FRAMES):
        trace = trace.tb_next
    return trace
