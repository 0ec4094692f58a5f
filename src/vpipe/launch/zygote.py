"""One process imports torch, then becomes many.

Importing torch costs seconds of processor time in every process; a fork of a process that has imported it costs
milliseconds. The zygote imports, forks one child a rank and one that keeps the store at which they meet, then only
reaps and passes signals on. It starts no thread and runs no tensor operation before the fork, so the children inherit
no half-initialised pool. What it has imported is frozen: no child looks for garbage in it, which would copy its pages
and make the end of every rank a second longer.

It speaks with the launcher over a socket, one JSON object a line:

    launcher → zygote   the spec, with the descriptors of the sockets at which ranks meet; when it
                        is ready {"fork": slot} with the descriptors of a rank; {"signal": 15} for all living ranks,
                        or that of a "slot"; {"rescue": function}: what is called when the stream ends. The end of the
                        stream means: kill everything
    zygote → launcher   {"ready": true}, {"forked": slot, "pid": pid}, {"ended": slot, "status": code}; instead
                        {"failed": sentence} where it cannot start them, {"refused": sentence} where the user must mend
                        something first

Before any rank is forked a child may be asked whether the run makes sense (``check`` of the spec): what it loads and
prints is gone with it, and what it imports was imported already.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from importlib import import_module
from typing import Any, NoReturn

from vpipe.door import SECRET
from vpipe.errors import UserError
from vpipe.launch.events import JsonLines
from vpipe.launch.process import MOST_DESCRIPTORS, kill_own_group
from vpipe.launch.rank import DEPARTURE, become_rank
from vpipe.process import die_with_parent
from vpipe.store import Store


class Zygote:
    """The parent of the ranks."""

    def __init__(self, control: socket.socket, spec: dict[str, Any], listeners: Sequence[int]) -> None:
        self._control = control
        self._spec = spec
        self._listeners = listeners
        """Where the stores listen: ours, and on one machine torch's."""
        self._orders = JsonLines()
        self._given: list[int] = []
        """Descriptors that came for ranks that are not forked yet."""
        self._ranks: dict[int, int] = {}
        self._keeper = 0

    def preload(self) -> str | None:
        """Import what every rank will need; a sentence where that fails."""
        for name in self._spec["preload"]:
            try:
                import_module(name)
            except Exception as error:
                return f"{name} cannot be imported: {type(error).__name__}: {error}"
        if threading.active_count() > 1:
            return f"importing {', '.join(self._spec['preload'])} starts threads, which do not survive a fork"
        return None

    def refused(self) -> str:
        """Why the spec's check is against the run; empty where it is not, or could not say."""
        zygote = os.getpid()
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            die_with_parent(zygote)
            os.close(reader)
            answer(self._spec["check"], writer)
        os.close(writer)
        said = b""
        while True:
            ready = _readable(reader, self._control.fileno())
            if self._control.fileno() in ready:  # the launcher says nothing before we are ready: it has gone
                kill_own_group()
            data = os.read(reader, 65536)
            if not data:
                break
            said += data
        os.close(reader)
        os.waitpid(pid, 0)
        return said.decode(errors="replace")

    def _fork_keeper(self, others: Iterable[int]) -> None:
        """A process that keeps the store; ``others`` are descriptors that it must not hold. The port stays this
        process's: who connects while there is no keeper waits for the next one."""
        zygote = os.getpid()
        self._keeper = os.fork()
        if self._keeper == 0:
            _be_child(zygote)
            self._control.close()
            _close(others)
            keep_store(self._listeners, self._spec["environment"])

    def serve(self) -> tuple[dict[str, Any], list[int]]:
        """Fork, reap and pass signals on, until the launcher goes. Returns in a rank, with the order that it was forked
        for and its descriptors."""
        gc.freeze()
        gc.enable()
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        os.set_blocking(reader, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._fork_keeper([reader, writer])
        self.tell({"ready": True})
        while True:
            self._reap()
            if not self._keeper:
                self._fork_keeper([reader, writer, *self._given])
            ready = _readable(self._control.fileno(), reader, patience=1.0)
            if reader in ready:
                os.read(reader, 4096)
            if self._control.fileno() in ready:
                data, given = self._receive()
                if not data:
                    self._abandoned()
                self._given += given
                rank = self._obey(data)
                if rank is not None:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    _close([reader, writer])
                    return rank

    def _receive(self) -> tuple[bytes, list[int]]:
        """What the launcher says; nothing where it is gone, also with words of ours unread."""
        try:
            data, given, _, _ = socket.recv_fds(self._control, 4096, MOST_DESCRIPTORS)
        except ConnectionResetError:
            return b"", []
        return data, given

    def _reap(self) -> None:
        """Tell of ranks that have ended; the keeper of the store is woken where it was stopped, and replaced where it
        was killed: ranks of an elastic run meet at the store again after each loss."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if os.WIFSTOPPED(status):
                if pid == self._keeper:
                    os.kill(pid, signal.SIGCONT)
            elif pid == self._keeper and os.WIFSIGNALED(status):  # one that fails by itself would fail again
                self._keeper = 0
            elif pid in self._ranks:
                self.tell({"ended": self._ranks.pop(pid), "status": os.waitstatus_to_exitcode(status)})

    def _obey(self, data: bytes) -> tuple[dict[str, Any], list[int]] | None:
        """Do what the launcher says; in the child that was forked for a rank: its order and descriptors."""
        for order in self._orders.feed(data):
            if "rescue" in order:
                self._spec["rescue"] = order["rescue"]
            elif "fork" in order:
                given, self._given = self._given[: order["fds"]], self._given[order["fds"] :]
                if self._is_rank(int(order["fork"]), given):
                    return order, given
            else:
                self._signal(int(order["signal"]), order.get("slot"))
        return None

    def _signal(self, signum: int, slot: int | None) -> None:
        for pid, its_slot in self._ranks.items():
            if slot in (None, its_slot):
                os.kill(pid, signum)
                if signum != signal.SIGKILL:
                    os.kill(pid, signal.SIGCONT)  # a stopped rank could not obey

    def _is_rank(self, slot: int, given: Sequence[int]) -> bool:
        """Fork the process of a slot; whether this is it."""
        zygote = os.getpid()
        pid = os.fork()
        if pid == 0:
            _be_child(zygote)
            self._control.close()
            _close([*self._listeners, *self._given])
            return True
        _close(given)
        self._ranks[pid] = slot
        self.tell({"forked": slot, "pid": pid})
        return False

    def tell(self, event: dict[str, Any]) -> None:
        try:
            self._control.sendall(json.dumps(event).encode() + b"\n")
        except OSError:
            self._abandoned()

    def _abandoned(self) -> NoReturn:
        """The launcher is gone, so the ranks go too; what the memory of an elastic run holds is saved by a child."""
        rescue, self._spec["rescue"] = self._spec.get("rescue"), None
        if rescue:
            for pid in self._ranks:
                os.kill(pid, signal.SIGKILL)
            for pid in self._ranks:
                os.waitpid(pid, 0)
            pid = os.fork()
            if pid == 0:
                try:
                    signal.set_wakeup_fd(-1)
                    os.environ.update(self._spec["environment"])
                    module, _, name = rescue.partition(":")
                    getattr(import_module(module), name)(**self._spec["arguments"])
                except BaseException as error:
                    sys.stderr.write(f"vpipe: what the copies hold could not be saved: {error}\n")
                finally:
                    os._exit(0)
            os.waitpid(pid, 0)
        kill_own_group()


def answer(check: dict[str, Any], writer: int) -> NoReturn:
    """Call the check, a function that raises, and write the sentence of a ``UserError`` that it raises."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nowhere, number)
    module, _, name = str(check["function"]).partition(":")
    try:
        getattr(import_module(module), name)(**check["arguments"])
    except UserError as error:
        data = error.sentence.encode(errors="replace")
        while data:
            data = data[os.write(writer, data) :]
    except BaseException:
        os._exit(1)  # the ranks will say it, with a traceback
    os._exit(0)


def _be_child(zygote: int) -> None:
    die_with_parent(zygote)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _readable(*fds: int, patience: float | None = None) -> set[int]:
    """Those of some descriptors that have something to read. (``select`` knows none above 1,023.)"""
    events = select.poll()
    for fd in fds:
        events.register(fd, select.POLLIN)
    return {fd for fd, _ in events.poll(None if patience is None else 1000 * patience)}


def _close(fds: Any) -> None:
    for fd in set(fds):
        os.close(fd)


def keep_store(listeners: Sequence[int], environment: Mapping[str, str]) -> None:
    """Keep the store at which the ranks meet. It outlives every rank, so that a rank's last words can be read. On one
    machine torch's is beside it, for scripts that make process groups of their own."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    meeting, *others = listeners
    make, port = import_module("torch.distributed").TCPStore, int(environment.get("MASTER_PORT", 0))
    torchs = [
        make("127.0.0.1", port, None, True, timedelta(seconds=60), wait_for_workers=False, master_listen_fd=listener)
        for listener in others
    ]
    Store(socket.socket(fileno=meeting), environment[SECRET]).serve()
    del torchs


def receive(control: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """The spec, and the sockets at which the ranks meet; None: the launcher has gone. Orders come when we are ready."""
    received, given = b"", []
    while b"\n" not in received:
        data, fds, _, _ = socket.recv_fds(control, 65536, MOST_DESCRIPTORS)
        if not data:
            return None
        given += fds
        received = (received + data).lstrip(b"\n")
    return json.loads(received), given


def main() -> None:
    """``python -m vpipe.launch.zygote FD LAUNCHER [MODULE…]``: in a rank, returns when the rank's work is done. The
    modules are imported while the spec is not there yet."""
    control = socket.socket(fileno=int(sys.argv[1]))
    launcher = int(sys.argv[2])
    die_with_parent(launcher)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    atexit.register(DEPARTURE)  # first, so that it comes after the exit functions of whatever is imported
    gc.disable()
    for name in sys.argv[3:]:
        with suppress(Exception):  # asked for again, and told, by the spec
            import_module(name)
    received = receive(control)
    if received is None:
        return
    spec, listeners = received
    zygote = Zygote(control, spec, listeners)
    problem = zygote.preload()
    if problem:
        zygote.tell({"failed": problem})
        return
    refused = zygote.refused() if spec["check"] else ""
    if refused:
        zygote.tell({"refused": refused})
        return
    die_with_parent(launcher, 0)  # from here on the end of the stream tells, and the whole group goes
    order, given = zygote.serve()
    become_rank(spec, order, given)


if __name__ == "__main__":
    main()
