"""One process imports torch, then becomes many.

Importing torch costs seconds of processor time in every process; a fork of a process that has imported it costs
milliseconds. The zygote imports, forks one child a rank and one that keeps the store at which they meet, then only
reaps and passes signals on. It starts no thread and runs no tensor operation before the fork, so the children inherit
no half-initialised pool. What it has imported is frozen: no child looks for garbage in it, which would copy its pages
and make the end of every rank a second longer.

It speaks with the launcher over a socket, one JSON object a line:

    launcher → zygote   descriptors, behind empty lines, and the spec, which numbers them; then {"signal": 15} for all
                        living ranks; the end of the stream means: kill everything
                        in an elastic run also {"kill": rank}, {"fork": rank} with the descriptors of a new one, and
                        {"rescue": function}: what is called when the stream ends; where all went well, nothing
    zygote → launcher   {"started": [pids]}, {"forked": rank, "pid": pid}, {"ended": rank, "status": code}; instead
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
from contextlib import suppress
from datetime import timedelta
from importlib import import_module
from typing import Any, NoReturn

from vpipe.errors import UserError
from vpipe.launch.process import MOST_DESCRIPTORS, die_with_parent, kill_own_group
from vpipe.launch.rank import DEPARTURE, become_rank

SAVE_AND_LEAVE = json.dumps({"signal": int(signal.SIGUSR1)}).encode()


class Zygote:
    """The parent of the ranks."""

    def __init__(self, control: socket.socket, spec: dict[str, Any], rest: bytes) -> None:
        self._control = control
        self._spec = spec
        self._unread = rest
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
        said, heard = b"", [reader, self._control.fileno()]
        while True:
            ready, _, _ = select.select(heard, [], [])
            if self._control.fileno() in ready:
                if SAVE_AND_LEAVE not in self._control.recv(4096, socket.MSG_PEEK):  # nobody wants to know any more
                    kill_own_group()
                heard = [reader]
                continue
            data = os.read(reader, 65536)
            if not data:
                break
            said += data
        os.close(reader)
        os.waitpid(pid, 0)
        return said.decode(errors="replace")

    def fork(self) -> int | None:
        """Start everything. Returns a rank in the child of that rank, None in the zygote."""
        gc.freeze()
        gc.enable()
        zygote = os.getpid()
        fds = self._spec["fds"]
        listener = self._spec["listener"]
        self._keeper = os.fork()
        if self._keeper == 0:
            _be_child(zygote)
            self._control.close()
            _close(fd for three in fds for fd in three)
            keep_store(listener, self._spec["port"])
        pids = []
        for rank in range(self._spec["num_ranks"]):
            pid = os.fork()
            if pid == 0:
                _be_child(zygote)
                self._control.close()
                _close([listener, *(fd for other, three in enumerate(fds) if other != rank for fd in three)])
                return rank
            self._ranks[pid] = rank
            pids.append(pid)
        _close([listener, *(fd for three in fds for fd in three)])
        self.tell({"started": pids})
        return None

    def serve(self) -> int | None:
        """Reap and pass signals on, until the launcher goes. Returns a rank in the child that was forked for it."""
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        os.set_blocking(reader, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        while True:
            self._reap()
            ready, _, _ = select.select([self._control.fileno(), reader], [], [], 1.0)
            if reader in ready:
                os.read(reader, 4096)
            if self._control.fileno() in ready:
                data, given = self._receive()
                if not data:
                    self._abandoned()
                self._unread += data
                self._given += given
                rank = self._obey()
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
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self._ranks:
                self.tell({"ended": self._ranks.pop(pid), "status": os.waitstatus_to_exitcode(status)})

    def _obey(self) -> int | None:
        """Do what the launcher says. Returns a rank in the child that was forked for it."""
        *lines, self._unread = self._unread.split(b"\n")
        for line in lines:
            order = json.loads(line)
            if "rescue" in order:
                self._spec["rescue"] = order["rescue"]
                continue
            if "fork" in order:
                if self._fork_one(int(order["fork"])):
                    return int(order["fork"])
                continue
            chosen = [pid for pid, rank in self._ranks.items() if order.get("kill", rank) == rank]
            signum = int(order.get("signal", signal.SIGKILL))
            for pid in chosen:
                os.kill(pid, signum)
                if signum != signal.SIGKILL:
                    os.kill(pid, signal.SIGCONT)  # a stopped rank could not obey
        return None

    def _fork_one(self, rank: int) -> bool:
        """A new process for a rank, with the streams that came along; whether this is it."""
        count = self._spec["num_fds"]
        given, self._given = self._given[:count], self._given[count:]
        zygote = os.getpid()
        pid = os.fork()
        if pid == 0:
            _be_child(zygote)
            self._control.close()
            _close(self._given)
            self._spec["fds"] = {rank: given}
            return True
        _close(given)
        self._ranks[pid] = rank
        self.tell({"forked": rank, "pid": pid})
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


def _close(fds: Any) -> None:
    for fd in set(fds):
        os.close(fd)


def keep_store(listener: int, port: int) -> None:
    """Keep the store at which the ranks meet. It outlives every rank, so that a rank's last words can be read."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    distributed = import_module("torch.distributed")
    store = distributed.TCPStore(
        "127.0.0.1",
        port,
        None,
        True,
        timedelta(seconds=60),
        wait_for_workers=False,
        master_listen_fd=listener,
        use_libuv=False,  # torch 2.6 refuses a socket of ours otherwise
    )
    while store is not None:
        signal.pause()


def receive(control: socket.socket) -> tuple[dict[str, Any], bytes] | None:
    """The spec with the numbers that its descriptors have here, and what came after it; None: the launcher has gone."""
    received, given = b"", []
    while b"\n" not in received:
        data, fds, _, _ = socket.recv_fds(control, 65536, MOST_DESCRIPTORS)
        if not data:
            return None
        given += fds
        received = (received + data).lstrip(b"\n")
    line, rest = received.split(b"\n", 1)
    spec = json.loads(line)
    spec["fds"] = [[given[number] for number in theirs] for theirs in spec["fds"]]
    spec["listener"] = given[spec["listener"]]
    return spec, rest


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
    found = receive(control)
    if found is None:
        return
    spec, rest = found
    zygote = Zygote(control, spec, rest)
    problem = zygote.preload()
    if problem:
        zygote.tell({"failed": problem})
        return
    refused = zygote.refused() if spec["check"] else ""
    if refused:
        zygote.tell({"refused": refused})
        return
    die_with_parent(launcher, 0)  # from here on the end of the stream tells, and the whole group goes
    rank = zygote.fork()
    if rank is None:
        rank = zygote.serve()
    if rank is not None:
        become_rank(spec, rank)


if __name__ == "__main__":
    main()
