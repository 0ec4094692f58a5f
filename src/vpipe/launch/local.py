"""Ranks on this machine: start them, show one output, end them all.

Everything listens on the loopback interface only. The port is bound here and passed on as a descriptor, so no other
program can take it in between.
"""

from __future__ import annotations

import secrets
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vpipe.door import SECRET
from vpipe.errors import UserError
from vpipe.launch.epochs import Elastic
from vpipe.launch.launcher import Launcher
from vpipe.launch.local_place import LocalPlace, make_shelves
from vpipe.launch.output import Output, Stream
from vpipe.launch.process import allow_files
from vpipe.launch.stopping import Grace
from vpipe.launch.zygote_start import LATE, PRELOAD, settings
from vpipe.network import GLOO, LOOPBACK, interface_of
from vpipe.rundir.journal import Ending
from vpipe.store import STORE

COMPILER = "torch._dynamo"
"""A user's own optimizer imports it in its first step: a second of processor time, here once for all ranks. Ours do
without (``runtime.updates.optimizing``)."""
RESCUE = "vpipe.train.rescue:save"
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
    allow_files(num_ranks)
    output = Output(
        stdout or sys.stdout.buffer,
        stderr or sys.stderr.buffer,
        num_ranks if elastic is None else elastic.most,
        Path(log_dir) if log_dir is not None else None,
        quiet,
    )
    try:
        launcher = Launcher(num_ranks, output, grace, elastic)
        own = environment_of(num_ranks, threads, environment or {})
        listeners = [_listener(wanted, num_ranks) for wanted in (0, port)]
        launcher.place = LocalPlace(
            launcher.events,
            launcher,
            own,
            leads=elastic is not None,
            shelves=make_shelves(elastic.most) if elastic is not None else (),
            saver=RESCUE,
            listeners=listeners,
            terminals=[sink.is_terminal for sink in output.sinks],
        )
        spec = {
            "target": target,
            "arguments": dict(arguments or {}),
            "preload": list(preload),
            "check": dict(check) if check else None,
            "rescue": RESCUE if elastic is not None and elastic.saves else "",
            "environment": {
                "WORLD_SIZE": str(num_ranks),
                "LOCAL_WORLD_SIZE": str(num_ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(listeners[1].getsockname()[1]),
                STORE: f"127.0.0.1:{listeners[0].getsockname()[1]}",
                SECRET: secrets.token_hex(32),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "TORCHELASTIC_RESTART_COUNT": "0",
                **{name: own[name] for name in LATE if name in own},
            },
        }
        return launcher.run(spec, concluded)
    finally:
        output.close()


def _listener(port: int, num_ranks: int) -> socket.socket:
    """The socket at which the ranks will meet."""
    try:
        return socket.create_server(("127.0.0.1", port), backlog=max(128, num_ranks * 4))
    except OSError as error:
        raise UserError(f"the ranks cannot meet at port {port}: {error.strerror}; choose another, or 0") from None


def environment_of(num_ranks: int, threads: int, given: Mapping[str, str]) -> dict[str, str]:
    """What the zygote needs before it imports torch; the user's own settings win."""
    return {GLOO: interface_of("127.0.0.1") or LOOPBACK} | settings(num_ranks, threads) | dict(given)
