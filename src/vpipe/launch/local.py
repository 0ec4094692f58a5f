"""Ranks on this machine: start them, show one output, end them all.

``run`` is one event loop without threads. Around it three things can end early, and none may leave the others behind:

    launcher ──socket──▶ zygote ──fork──▶ ranks, store
       │  killed: the socket closes, the zygote kills its group
       └─ zygote killed: the kernel kills the ranks (prctl), the launcher kills the group

Everything listens on the loopback interface only. The port is bound here and passed on as a descriptor, so no other
program can take it in between.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil

from vpipe.errors import UserError
from vpipe.launch.early import PRELOAD, settings
from vpipe.launch.elastic import Elastic, ElasticLaunch
from vpipe.launch.loop import Grace, Launch
from vpipe.launch.output import Output, Stream
from vpipe.rundir.journal import Ending

COMPILER = "torch._dynamo"
"""A user's own optimizer imports it in its first step: a second of processor time, here once for all ranks. Ours do
without (``runtime.updates.optimizing``)."""
STOP_GRACE = 10.0
"""Seconds from the first Ctrl-C to the end of patience."""


def run(
    target: Sequence[str] | str,
    num_ranks: int,
    *,
    arguments: Mapping[str, Any] | None = None,
    log_dir: Path | str | None = None,
    quiet: bool = False,
    environment: Mapping[str, str] | None = None,
    preload: Sequence[str] = (*PRELOAD, COMPILER),
    grace: float | Grace = STOP_GRACE,
    threads: int = 0,
    port: int = 0,
    stdout: Stream | None = None,
    stderr: Stream | None = None,
    concluded: Callable[[Ending], str] | None = None,
    check: Mapping[str, Any] | None = None,
    elastic: Elastic | None = None,
) -> int:
    """Run ``target`` as ranks 0..num_ranks-1 and wait for all of them; the exit code.

    ``target`` is an argv list (``["script.py", "--steps", "10"]`` or ``["-m", "package.module"]``) or a function
    ``"package.module:function"``, called with ``arguments`` (anything JSON can hold) in every rank; if it returns an
    int, that is the rank's exit code. ``preload`` names the modules that are imported once, before the ranks are
    forked. ``threads`` are those of each rank inside one operation; 0 shares the cores. The ranks meet at ``port`` of
    the loopback interface; 0 takes a free one. ``quiet`` shows failures only; the log files have everything.
    ``grace`` are the seconds from a request to stop to the end of patience. ``concluded`` is told an ending that the
    ranks could not tell themselves, and returns what else to say. ``check`` is asked before any rank starts:
    ``{"function": "package.module:function", "arguments": {...}}``, which raises a ``UserError`` against the run.
    ``elastic``: ranks may be lost and replaced.
    """
    if num_ranks < 1:
        raise UserError(f"{num_ranks} ranks cannot run anything; give at least 1")
    if not isinstance(target, str):
        target = list(target)
        if not target:
            raise UserError("there is no script to run; name one, as in 'vpipe run --nproc 4 script.py'")
        if target[0] != "-m" and not Path(target[0]).is_file():
            raise UserError(f"there is no file {target[0]!r} to run")
    output = Output(
        stdout or sys.stdout.buffer,
        stderr or sys.stderr.buffer,
        num_ranks if elastic is None else elastic.most,
        Path(log_dir) if log_dir is not None else None,
        quiet,
    )
    with ExitStack() as stack:
        stack.callback(output.close)
        patience = grace if isinstance(grace, Grace) else Grace(lambda: grace)
        launch = ElasticLaunch(num_ranks, output, patience, elastic) if elastic else Launch(num_ranks, output, patience)
        stack.callback(launch.close)
        launch.start(
            {
                "target": target,
                "arguments": dict(arguments or {}),
                "preload": list(preload),
                "check": dict(check) if check else None,
                "rescue": elastic.rescue if elastic else "",
            },
            environment_of(num_ranks, threads, environment or {}),
            port,
        )
        stack.enter_context(launch.catching_signals())
        code = launch.loop()
        if launch.ending is not None and concluded is not None:
            said = concluded(launch.ending)
            if said:
                output.say(f"vpipe: {said}")
        return code


def environment_of(num_ranks: int, threads: int, given: Mapping[str, str]) -> dict[str, str]:
    """What the zygote needs before it imports torch; the user's own settings win."""
    return {"GLOO_SOCKET_IFNAME": _loopback()} | settings(num_ranks, threads) | dict(given)


def _loopback() -> str:
    """The name of the loopback interface."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == "127.0.0.1" for address in addresses):
            return name
    return "lo"
