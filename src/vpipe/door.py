"""Connections between processes of one run, on ports that any process can reach: one way to let in what knows the
run's secret, and to keep all others from costing more than their own connection.

    host  → guest   a number that is used once
    guest → host    another one, who it is, and a proof of the secret for both numbers
    host  → guest   its own proof: a stranger that took the port first is found out

``Door`` never waits for a guest: each answers at its own pace, of those that are silent the oldest is sent away where
there are too many. From both numbers follows the key by which later messages can be sealed.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import select
import socket
import stat
import struct
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep
from typing import Any, NamedTuple

from vpipe.errors import UserError

SECRET = "VPIPE_SECRET"
"""The variable in which a launcher tells its ranks the secret of their run; never in a command line."""
NONCE = SEAL = 32
WITHIN = 10.0
"""Seconds in which a host must answer."""
MOST_SILENT = 256
"""Guests that have not answered yet; beyond that the oldest goes."""
_PLACE = struct.Struct("<II")
_HELLO_BYTES = NONCE + _PLACE.size + SEAL
_SIZE = struct.Struct("<I")


class RefusedError(ConnectionError):
    """The other side does not know the secret."""


def secret_of(environ: Mapping[str, str]) -> str:
    """The secret of this run: its launcher's, else the user's own, which is made once and lies where only that user
    reads it. Machines that share no home need the variable."""
    if environ.get(SECRET):
        return environ[SECRET]
    home = Path(environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser()
    for folder in (home / "vpipe", Path(tempfile.gettempdir(), f"vpipe-{os.getuid()}")):
        with suppress(OSError, RuntimeError):
            return _kept(folder / "secret")
    raise UserError(
        f"{home} cannot be written, where the secret of your runs would be kept; set {SECRET} for all ranks"
    )


def _kept(path: Path) -> str:
    """The secret in a file of this user's; of several processes that come at once the first makes it."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not path.exists():
        handle, made = tempfile.mkstemp(dir=path.parent)
        with open(handle, "w") as file:
            file.write(secrets.token_hex(32))
        with suppress(FileExistsError):
            os.link(made, path)
        os.unlink(made)
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW)) as file:
        facts = os.fstat(file.fileno())
        if facts.st_uid != os.getuid() or not stat.S_ISREG(facts.st_mode) or facts.st_mode & 0o077:
            raise UserError(f"{path} is not yours alone; remove it, or set {SECRET} for all ranks")
        return file.read()


class Guest(NamedTuple):
    """A connection whose other side knows the secret, as it does ours."""

    connection: socket.socket
    place: tuple[int, int]
    """What the guest says about itself: a rank and a lane, or a slot."""
    key: bytes
    """For ``Letters``."""


def knock(connection: socket.socket, secret: str, purpose: str, place: tuple[int, int] = (0, 0)) -> Guest:
    """Come in by a door of the same run and purpose; waits as long as the connection does."""
    key, said = _key(secret, purpose), secrets.token_bytes(NONCE) + _PLACE.pack(*place)
    with suppress(EOFError, ConnectionResetError, BrokenPipeError):
        both = exactly(connection, NONCE) + said
        connection.sendall(said + _proof(key, b"guest", both))
        if hmac.compare_digest(exactly(connection, SEAL), _proof(key, b"host", both)):
            return Guest(connection, place, _proof(key, b"letters", both))
    raise RefusedError(f"who listens there does not know the secret of this run ({SECRET}), or another one")


def dial(address: tuple[str, int], secret: str, purpose: str, patience: float) -> Guest:
    """A connection to a door that may not be there yet; an ``OSError`` where it does not come to be."""
    until, pause, refusals = monotonic() + patience, 0.01, 0
    while True:
        try:
            connection = socket.create_connection(address, max(0.1, min(WITHIN, until - monotonic())))
            try:
                return knock(connection, secret, purpose)
            except OSError:
                connection.close()
                raise
        except OSError as error:
            refusals += isinstance(error, RefusedError)  # once may be by a flood of strangers
            if monotonic() + pause > until or refusals > 3:
                raise
        sleep(pause)
        pause = min(0.5, 1.5 * pause)


class Door:
    """Lets guests in at a listening socket. ``fileno`` can be waited for, beside others."""

    def __init__(self, listener: socket.socket, secret: str, purpose: str) -> None:
        self._listener = listener
        self.is_local = listener.family == socket.AF_UNIX
        self._key = _key(secret, purpose)
        self._silent: dict[int, tuple[socket.socket, bytes, bytearray]] = {}
        """Descriptor → connection, our number, what has come; the oldest first."""
        self._events = select.epoll()
        listener.setblocking(False)
        self._events.register(listener, select.EPOLLIN)

    def fileno(self) -> int:
        return self._events.fileno()

    def next(self, until: float) -> Guest:
        """The next guest; ``TimeoutError``, or ``ConnectionAbortedError`` where the listener was shut."""
        while (left := until - monotonic()) > 0:
            for guest in self.guests(min(left, 3600.0)):
                return guest
        raise TimeoutError

    def guests(self, wait: float = 0.0) -> Iterator[Guest]:
        """Those that have come in, after waiting at most so long for any sign."""
        for descriptor, event in self._events.poll(wait, 1):
            if descriptor != self._listener.fileno():
                guest = self._heard(descriptor)
                if guest is not None:
                    yield guest
            elif event & (select.EPOLLHUP | select.EPOLLERR):
                raise ConnectionAbortedError
            else:
                self._accept()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # it has left again, or there is no descriptor for it: then another one must go
            self._dismiss_oldest()
            return
        if len(self._silent) == MOST_SILENT:
            self._dismiss_oldest()
        nonce = secrets.token_bytes(NONCE)
        connection.setblocking(False)
        self._silent[connection.fileno()] = connection, nonce, bytearray()
        self._events.register(connection, select.EPOLLIN)
        with suppress(OSError):
            connection.send(nonce)

    def _dismiss_oldest(self) -> None:
        if self._silent:
            self._silent.pop(next(iter(self._silent)))[0].close()
        else:
            sleep(0.01)

    def _heard(self, descriptor: int) -> Guest | None:
        connection, nonce, hello = self._silent[descriptor]
        try:
            data = connection.recv(_HELLO_BYTES - len(hello))
        except OSError:
            data = b""
        hello += data
        if data and len(hello) < _HELLO_BYTES:
            return None
        del self._silent[descriptor]
        self._events.unregister(connection)
        said, proof = bytes(hello[:-SEAL]), bytes(hello[-SEAL:])
        if data and hmac.compare_digest(proof, _proof(self._key, b"guest", nonce + said)):
            with suppress(OSError):
                connection.send(_proof(self._key, b"host", nonce + said))
                connection.setblocking(True)
                first, second = _PLACE.unpack(said[NONCE:])
                return Guest(connection, (first, second), _proof(self._key, b"letters", nonce + said))
        connection.close()
        return None

    def close(self) -> None:
        for connection, _, _ in self._silent.values():
            connection.close()
        self._events.close()
        self._listener.close()


class Letters:
    """Messages over a guest's connection, in both directions, each sealed for its number."""

    def __init__(self, guest: Guest, host: bool) -> None:
        self.connection = guest.connection
        sides = (b"host", b"guest") if host else (b"guest", b"host")
        self._keys = [hmac.digest(guest.key, side, "sha256") for side in sides]
        self._counts = [0, 0]
        self._unread = bytearray()

    def send(self, message: Any) -> None:
        data = json.dumps(message).encode()
        self.connection.sendall(_SIZE.pack(len(data)) + self._seal(0, data) + data)

    def receive(self) -> list[Any]:
        """Whole messages of what the connection has; waits if it blocks. ``EOFError`` at the end and for a forged
        one."""
        data = self.connection.recv(1 << 16)
        if not data:
            raise EOFError
        self._unread += data
        messages = []
        head = _SIZE.size + SEAL
        while len(self._unread) >= head and len(self._unread) >= (end := head + _SIZE.unpack_from(self._unread)[0]):
            seal, body = bytes(self._unread[_SIZE.size : head]), bytes(self._unread[head:end])
            if not hmac.compare_digest(seal, self._seal(1, body)):
                raise EOFError
            messages.append(json.loads(body))
            del self._unread[:end]
        return messages

    def _seal(self, way: int, data: bytes) -> bytes:
        self._counts[way] += 1
        return hmac.digest(self._keys[way], self._counts[way].to_bytes(8, "little") + data, "sha256")


def exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = connection.recv(count - len(data))
        if not more:
            raise EOFError
        data += more
    return data


def _key(secret: str, purpose: str) -> bytes:
    return hmac.digest(secret.encode(), purpose.encode(), "sha256")


def _proof(key: bytes, side: bytes, said: bytes) -> bytes:
    return hmac.digest(key, side + said, "sha256")
