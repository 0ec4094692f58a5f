"""A ``python`` that has imported torch already: processes are forks of one, and sixteen imports are one.

``serve`` is that process. The program that ``write`` leaves is called in the place of Python and hands its words,
variables, folder and open files over a socket, so that everything that vpipe does is done for real, in as many processes.
Signals reach the fork, its code comes back, and with the program the fork ends. Where vpipe itself starts a zygote,
which is Python once more, the fork forks it (``fork_zygotes``).

With xdist one such process serves a whole run: its workers are forks of it too, and use it (``share``).
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from vpipe.process import die_with_parent, num_cores

CLIENT = """#!{python} -SE
import json, os, signal, socket, sys
fds = [fd for fd in range(256) if os.path.exists(f"/proc/self/fd/{{fd}}") and os.get_inheritable(fd)]
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
told = json.dumps({{"words": sys.argv[1:], "folder": os.getcwd(), "program": os.path.dirname(__file__) + "/python", "fds": fds, "variables": dict(os.environ)}}).encode()
socket.send_fds(server, [len(told).to_bytes(8, "big")], fds)
server.sendall(told)
said = server.makefile()
fork = int(said.readline())
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
    signal.signal(number, lambda number, _: os.kill(fork, number))
sys.exit(int(said.readline() or 1))
"""

IMPORTED = (
    *("torch.distributed.launcher.api", "vpipe.cli.main", "vpipe.train.worker", "vpipe.train.elastic"),
    *("torch._dynamo", "torch.distributed.fsdp"),  # what checks a model without its weights imports them: a second
)
SHARED = "VPIPE_TEST_FORKS"
"""The folder of the ``python`` that a run's workers share."""
WORKER = "--worker"
MARK = "MARK"
"""A variable by which who starts a fork knows it and all that come of it: they have its beginning for a name."""


@cache
def program() -> str:
    """A ``python`` of this process's own, which is there until it ends; a worker of xdist has that of its run."""
    if SHARED in os.environ:
        return os.environ[SHARED] + "/python"
    folder = Path(tempfile.mkdtemp(prefix="vpipe-forks-"))
    server = start(folder / "socket")

    def end() -> None:
        server.terminate()
        server.wait(30)
        shutil.rmtree(folder)

    atexit.register(end)
    write(folder / "python", folder / "socket")
    return str(folder / "python")


def share() -> str:
    """The ``python`` of the workers that this process starts. They are as another would be, but for what is imported; the
    processes that they start are forks where they ask for ``program``, and else not."""
    folder = Path(program()).parent
    os.environ[SHARED] = str(folder)
    write(folder / "worker", folder / "socket", WORKER)
    return str(folder / "worker")


def write(program: Path, address: Path, *words: str) -> None:
    """The program, with the words that come first of all; ``python`` beside it has none."""
    text = CLIENT.format(python=sys.executable, address=str(address))
    program.write_text(text.replace("sys.argv[1:]", f"{list(words)!r} + sys.argv[1:]"))
    program.chmod(0o755)


def start(address: Path, *preload: str, environment: Mapping[str, str] = os.environ) -> subprocess.Popen[str]:
    """The process that forks, once it has imported; who asks before waits. ``preload``: what else it imports."""
    variables = {**environment, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}  # read when torch is imported
    words = [sys.executable, __file__, str(address), *preload]
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(address))
        listener.listen(64)
        return subprocess.Popen(words, env=variables, stdin=listener, text=True)


def serve(_address: str, *preload: str) -> None:
    """Fork for everyone who connects to the socket that standard input is."""
    die_with_parent(os.getppid())
    listener = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for name in (*IMPORTED, *preload):
        import_module(name)
    gc.freeze()  # forks look for garbage among what is theirs, and share the pages of the rest
    signal.signal(signal.SIGCHLD, _reap)
    while True:
        client, _ = listener.accept()
        if os.fork():
            client.close()
            continue
        listener.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        size, streams, _, _ = socket.recv_fds(client, 8, 250)
        told = json.loads(client.makefile("rb").read(int.from_bytes(size, "big")))
        rank = os.fork()
        if not rank:
            client.close()
            _become(told, streams)
        for stream in streams:
            os.close(stream)
        _watch(client, rank)


def _reap(*_: object) -> None:
    """Nobody asks how a fork ended; but who measures sees what it took."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _watch(client: socket.socket, rank: int) -> NoReturn:
    """Tell how the fork ends; it ends with whoever asked for it."""
    client.sendall(f"{rank}\n".encode())
    ended = os.pidfd_open(rank)
    if ended not in select.select([client, ended], [], [])[0]:
        os.kill(rank, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1])
    try:
        client.sendall(f"{code if code >= 0 else 128 - code}\n".encode())
    finally:
        os._exit(0)


def _become(told: dict[str, object], streams: list[int]) -> NoReturn:
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell started all this in its background
    numbers, variables, words = told["fds"], told["variables"], told["words"]
    assert isinstance(numbers, list)
    assert isinstance(variables, dict)
    assert isinstance(words, list)
    apart = [fcntl.fcntl(given, fcntl.F_DUPFD_CLOEXEC, 512) for given in streams]  # where no number is wanted
    for given in streams:
        os.close(given)
    for number, given in zip(numbers, apart, strict=True):
        os.dup2(given, number)
        os.close(given)
    os.chdir(str(told["folder"]))
    if MARK in variables:
        Path("/proc/self/comm").write_text(variables[MARK][:15])  # the kernel shows the server's variables
    _variables(variables)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    if words[:1] == [WORKER]:
        _leave_after(lambda: _work(words[-1]))
    sys.executable = str(told["program"])  # what it starts as Python is forked too
    fork_zygotes()
    _leave_after(lambda: _run([word for index, word in enumerate(words) if index or word != "-u"]))


def _run(words: list[str]) -> None:
    """What Python does with its words: a module, a program in a word, or a file."""
    safe = words[0] == "-P"
    if words[safe] == "-c":
        words = words[safe:]
        sys.argv = ["-c", *words[2:]]
        sys.path[:1] = [] if safe else [os.getcwd()]
        exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})  # noqa: S102
    elif words[0] in ("-m", "-Pm") and words[1] == "vpipe":
        import vpipe.cli.main

        sys.argv = words[1:]
        del sys.path[0]
        vpipe.cli.main.main()
    elif words[0] in ("-m", "-Pm"):
        sys.argv = words[1:]
        sys.path[:1] = [os.getcwd()] if words[0] == "-m" else []
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path[0] = str(Path(words[0]).resolve().parent)
        runpy.run_path(words[0], run_name="__main__")


def _work(program: str) -> None:
    """Be what the words of xdist make of a Python."""
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", num_cores())))
    main = sys.modules["__main__"] = types.ModuleType("__main__")  # not this file: processes of its own would import it
    sys.argv = ["-c"]
    sys.path[0] = ""
    exec(program, vars(main))  # noqa: S102


def _variables(given: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(given)


def _leave_after(main: Callable[[], object]) -> NoReturn:
    """End as an interpreter ends after its program."""
    code = 0
    try:
        main()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    _leave(code)


def _leave(code: int) -> NoReturn:
    """End as an interpreter does, but for the second that it looks for garbage."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


# ── zygotes ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class Forked(subprocess.Popen[bytes]):
    """A fork, for who expects a process that was started."""

    def __init__(self, pid: int) -> None:
        self.pid, self.args = pid, ["zygote"]
        self.returncode = None  # type: ignore[assignment]
        self.stdin = self.stdout = self.stderr = None
        self._waitpid_lock = threading.Lock()
        self._child_created = True
        self._sigint_wait_secs = 0.25


def fork_zygotes() -> None:
    """From now on this process and its forks fork the zygotes that they start."""
    from vpipe.launch import zygote_start

    def spawn(
        environment: Mapping[str, str], shared: Sequence[int] = (), preload: Sequence[str] = ()
    ) -> zygote_start.Started:
        ours, theirs = socket.socketpair()
        launcher = os.getpid()
        pid = os.fork()
        if not pid:
            _become_zygote(theirs.detach(), launcher, environment, shared, preload)
        theirs.close()
        return zygote_start.Started(Forked(pid), ours, dict(environment))

    zygote_start.spawn = spawn


def _become_zygote(
    control: int, launcher: int, environment: Mapping[str, str], shared: Sequence[int], preload: Sequence[str]
) -> NoReturn:
    from vpipe.launch import zygote

    os.setsid()
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGCHLD):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    kept = {0, 1, 2, control, *shared}
    for fd in (int(name) for name in os.listdir("/proc/self/fd")):
        if fd not in kept:
            with suppress(OSError):  # the list's own
                os.close(fd)
    _variables(environment)
    atexit._clear()
    sys.argv = ["zygote", str(control), str(launcher), *preload]
    _leave_after(zygote.main)


if __name__ == "__main__":
    serve(*sys.argv[1:])
