"""Ranks on this machine: start them, show one output, end them all.

Everything listens on the loopback interface only. The port is bound here and passed on as a descriptor, so no other
program can take it in between.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vpipe.door import SECRET
from vpipe.errors import UserError
from vpipe.launch.epochs import Elastic
from vpipe.launch.launcher import Launcher
from vpipe.launch.lead import lead
from vpipe.launch.local_place import LocalPlace, make_shelves
from vpipe.launch.output import Output
from vpipe.launch.process import allow_files
from vpipe.launch.zygote_start import LATE, PRELOAD, settings
from vpipe.network import GLOO, LOOPBACK, interface_of
from vpipe.store import STORE

COMPILER = "torch._dynamo"
"""A user's own optimizer imports it in its first step: a second of processor time, here once for all ranks. Ours do
without (``runtime.updates.optimizing``)."""
RESCUE = "vpipe.train.rescue:save"


def run(
    target: Sequence[str] | str,
    num_ranks: int,
    *,
    environment: Mapping[str, str] | None = None,
    preload: Sequence[str] = (*PRELOAD, COMPILER),
    threads: int = 0,
    port: int = 0,
    elastic: Elastic | None = None,
    **options: Any,
) -> int:
    """``lead`` (which has the other ``options``) on this machine. ``threads`` are those of each rank inside one
    operation; 0 shares the cores. The ranks meet at ``port`` of the loopback interface; 0 takes a free one."""
    if num_ranks < 1:
        raise UserError(f"{num_ranks} ranks cannot run anything; give at least 1")
    if not isinstance(target, str):
        target = list(target)
        if not target:
            raise UserError("there is no script to run; name one, as in 'vpipe run --nproc 4 script.py'")
        if target[0] != "-m" and not Path(target[0]).is_file():
            raise UserError(f"there is no file {target[0]!r} to run")
    allow_files(num_ranks)
    own = environment_of(num_ranks, threads, environment or {})
    listeners = [_listener(wanted, num_ranks) for wanted in (0, port)]

    def here(launcher: Launcher, output: Output) -> LocalPlace:
        return LocalPlace(
            launcher.events,
            launcher,
            own,
            leads=elastic is not None,
            shelves=make_shelves(elastic.most) if elastic is not None else (),
            saver=RESCUE,
            outlives=elastic is not None and elastic.saves,
            listeners=listeners,
            terminals=[sink.is_terminal for sink in output.sinks],
        )

    variables = {
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(listeners[1].getsockname()[1]),
        STORE: f"127.0.0.1:{listeners[0].getsockname()[1]}",
        SECRET: secrets.token_hex(32),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        **{name: own[name] for name in LATE if name in own},
    }
    return lead(target, num_ranks, here, environment=variables, preload=preload, elastic=elastic, **options)


def _listener(port: int, num_ranks: int) -> socket.socket:
    """The socket at which the ranks will meet."""
    try:
        return socket.create_server(("127.0.0.1", port), backlog=max(128, num_ranks * 4))
    except OSError as error:
        raise UserError(f"the ranks cannot meet at port {port}: {error.strerror}; choose another, or 0") from None


def environment_of(num_ranks: int, threads: int, given: Mapping[str, str]) -> dict[str, str]:
    """What the zygote needs before it imports torch; the user's own settings win."""
    return {GLOO: interface_of("127.0.0.1") or LOOPBACK} | settings(num_ranks, threads) | dict(given)
