"""Start and stop the live page: for ``vpipe dashboard``, and beside ``vpipe train`` while a run lasts.

A run's page is served by a process of its own: what clients do to it (see ``guard``), and what it costs, is not done to
rank 0. Our launcher starts it, or rank 0 where another launcher has started the ranks. It ends with its run: it
reads from a pipe that only the run holds open.
"""

from __future__ import annotations

import json
import os
import resource
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from vpipe.config import PipelineConfig
from vpipe.errors import UserError
from vpipe.process import AS_MODULE, is_terminal
from vpipe.rundir import writing
from vpipe.rundir.layout import PAGE

LOOPBACK = "127.0.0.1"
NEEDED = ("uvicorn", "starlette")
MAX_FILES = 256
"""Descriptors of the page's own process."""
LAST_LOOK = 2.0
"""Seconds that the page stays after its run, so that browsers see how it ended."""


def require() -> None:
    """Say in one sentence what is not installed."""
    for name in NEEDED:
        if find_spec(name) is None:
            raise UserError(f"the live page needs {name}; install it with: pip install 'vpipe[dashboard]'")


def address(port: int, token: str) -> str:
    return f"http://{LOOPBACK}:{port}/?token={token}"


class Dashboard:
    """A server in a thread. ``url`` is what the user opens; it carries the token."""

    def __init__(
        self,
        directory: str | Path,
        port: int = 0,
        token: str | None = None,
        listening: socket.socket | None = None,
        make: Callable[[str, threading.Event], Any] | None = None,
    ) -> None:
        """``make`` gives another application than a run's page, from the token and the event of its end."""
        require()
        import uvicorn

        from vpipe.observe import guard
        from vpipe.observe.server import app

        self.token = token or secrets.token_urlsafe(16)
        self._stopping = threading.Event()
        self._socket = listening or listen(port)
        self.port: int = self._socket.getsockname()[1]
        settings = uvicorn.Config(
            guard.closing((make or partial(app, directory))(self.token, self._stopping)),
            http=guard.Guarded,
            h11_max_incomplete_event_size=guard.MAX_HEADER_BYTES,
            log_level="critical",
            access_log=False,
            lifespan="off",
            ws="none",
            timeout_graceful_shutdown=2,
        )
        self._server: Any = uvicorn.Server(settings)
        self._ended = threading.Event()
        """That the thread has ended; asked itself, it says so after a Ctrl-C during a join, whether it has or not."""
        self._thread = threading.Thread(target=self._serve, name="vpipe-dashboard", daemon=True)

    @property
    def url(self) -> str:
        return address(self.port, self.token)

    def start(self) -> Dashboard:
        """Serve in the background; returns when the page can be opened."""
        self._thread.start()
        until = monotonic() + 10
        while not self._server.started and not self._ended.is_set() and monotonic() < until:
            sleep(0.01)
        return self

    def _serve(self) -> None:
        try:
            self._server.run(sockets=[self._socket])
        finally:
            self._ended.set()

    def wait(self, lasts: Callable[[], bool] = lambda: True) -> None:
        """Serve until the thread ends, or an interrupt."""
        while not self._ended.is_set() and lasts():
            self._ended.wait(0.5)

    def stop(self) -> None:
        self._stopping.set()
        self._server.should_exit = True
        if self._ended.wait(5):  # a busy machine may take longer, and would tell of a socket that is gone
            self._socket.close()

    def __enter__(self) -> Dashboard:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


class PageProcess:
    """The page of a run, in a process of its own that ends with ours. The token goes through a pipe and into a file of
    the user's own: others read the arguments of a process, and often what is written to a log. ``where`` says where the
    page is."""

    def __init__(self, directory: str | Path) -> None:
        require()
        token = secrets.token_urlsafe(16)
        self._file = Path(directory) / PAGE
        with listen(0) as found:
            url = address(found.getsockname()[1], token)
            writing.put(self._file, f"{url}\n".encode(), mode=0o600)
            self.where = url if is_terminal(sys.stdout) else f"its address is in {self._file}"
            self._process = subprocess.Popen(
                [sys.executable, AS_MODULE, "vpipe.observe.dashboard"],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(found.fileno(),),
                start_new_session=True,
            )
            said = json.dumps({"directory": str(directory), "socket": found.fileno(), "token": token})
        assert self._process.stdin is not None
        self._process.stdin.write(said.encode() + b"\n")
        self._process.stdin.flush()

    @property
    def pid(self) -> int:
        return self._process.pid

    def stop(self) -> None:
        """Let it go: it takes a last look and ends by itself."""
        self._file.unlink(missing_ok=True)
        assert self._process.stdin is not None
        self._process.stdin.close()


@contextmanager
def served(config: PipelineConfig, directory: Path, quiet: bool) -> Iterator[PipelineConfig]:
    """Serve the page of a run, if the config asks for it, from the process that starts its ranks: one address, however
    many of them come and go. Yields the config for the ranks, which serve none."""
    if not config.observe.dashboard:
        yield config
        return
    page = PageProcess(directory)
    if not quiet:
        sys.stdout.write(f"live page: {page.where}\n")
        sys.stdout.flush()
    try:
        yield config.model_copy(update={"observe": config.observe.model_copy(update={"dashboard": False})})
    finally:
        page.stop()


def listen(port: int) -> socket.socket:
    """A socket on the loopback interface; a port in use is said in one sentence."""
    found = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((LOOPBACK, port))
        found.listen(64)
    except OverflowError:
        found.close()
        raise UserError(f"port {port} is none; ports are numbers from 0 to 65535") from None
    except OSError as error:
        found.close()
        raise UserError(
            f"port {port} cannot be used ({error.strerror}); choose another with --port, or --port 0 for a free one"
        ) from None
    return found


def serve() -> None:
    """What the page's process runs: told on its standard input, it serves until that ends."""
    told = json.loads(sys.stdin.readline())
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (MAX_FILES, hard))
    os.nice(5)
    ended = threading.Event()

    def watch() -> None:
        sys.stdin.read()
        ended.set()

    threading.Thread(target=watch, daemon=True).start()
    page = Dashboard(told["directory"], token=told["token"], listening=socket.socket(fileno=told["socket"]))
    with page:
        page.wait(lambda: not ended.is_set())
        sleep(LAST_LOOK)


if __name__ == "__main__":
    serve()
