"""Start and stop the live page: for ``vpipe dashboard``, and inside ``vpipe train`` while a run lasts."""

from __future__ import annotations

import secrets
import socket
import threading
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from vpipe.errors import UserError

LOOPBACK = "127.0.0.1"


class Dashboard:
    """A server in a thread. ``url`` is what the user opens; it carries the token."""

    def __init__(self, run_directory: str | Path, port: int = 0, token: str | None = None) -> None:
        try:
            import uvicorn

            from vpipe.observe.server import app
        except ImportError as error:
            raise UserError(
                f"the live page needs {error.name}; install it with: pip install 'vpipe[dashboard]'"
            ) from None
        self.token = token or secrets.token_urlsafe(16)
        self._stopping = threading.Event()
        self._socket = listen(port)
        self.port: int = self._socket.getsockname()[1]
        settings = uvicorn.Config(
            app(run_directory, self.token, self._stopping),
            log_level="critical",
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=2,
        )
        self._server: Any = uvicorn.Server(settings)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._socket]}, name="vpipe-dashboard", daemon=True
        )

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.port}/?token={self.token}"

    def start(self) -> Dashboard:
        """Serve in the background; returns when the page can be opened."""
        self._thread.start()
        until = monotonic() + 10
        while not self._server.started and self._thread.is_alive() and monotonic() < until:
            sleep(0.01)
        return self

    def wait(self) -> None:
        """Serve until the thread ends or somebody interrupts."""
        while self._thread.is_alive():
            self._thread.join(0.5)

    def stop(self) -> None:
        self._stopping.set()
        self._server.should_exit = True
        self._thread.join(5)
        self._socket.close()

    def __enter__(self) -> Dashboard:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


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
