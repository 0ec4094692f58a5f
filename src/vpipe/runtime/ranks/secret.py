"""What strangers on the machine or the network can neither read, forge nor use to reach the terminal.

The store at which ranks meet asks nobody who he is. So a launcher gives every run a secret, which goes to its ranks
and to nobody else, and from it follow the names of all keys (whoever cannot guess one cannot read or change it) and a
seal on every value (whoever could write one cannot make it believed). Text that came over the wire is printed without
control characters.
"""

from __future__ import annotations

import hmac
from typing import Any

SECRET = "VPIPE_SECRET"
"""The variable in which a launcher tells its ranks the secret of their run."""
SEAL = 32


def prefix(secret: str, generation: str) -> str:
    """Where this run's keys lie in a store."""
    hidden = hmac.digest(secret.encode(), b"keys " + generation.encode(), "sha256").hex() if secret else "open"
    return f"vpipe/{generation}/{hidden}"


class Sealed:
    """The values of a store, each sealed for its key. A value with a broken seal is one that is not there."""

    def __init__(self, store: Any, secret: str) -> None:
        self._store = store
        self._secret = secret.encode()

    def set(self, key: str, text: str) -> None:
        self._store.set(key, self._sealed(key, text))

    def get(self, key: str) -> str | None:
        """The text of a key that exists; ``None`` where somebody else has written it."""
        return self._opened(key, bytes(self._store.get(key)))

    def get_if_there(self, key: str) -> str | None:
        return self.get(key) if self._store.check([key]) else None

    def set_once(self, key: str, text: str) -> str:
        """Write, unless one of ours has written before; what is there now."""
        mine = self._sealed(key, text)
        found = self._opened(key, bytes(self._store.compare_set(key, "", mine)))
        if found is None:
            self._store.set(key, mine)
        return text if found is None else found

    def check(self, keys: list[str]) -> bool:
        return bool(self._store.check(keys))

    def add(self, key: str, number: int) -> int:
        """A counter, which the store itself keeps: only its name protects it."""
        return int(self._store.add(key, number))

    def _seal(self, key: str, data: bytes) -> bytes:
        return hmac.digest(self._secret, key.encode() + b"\0" + data, "sha256")[:SEAL].hex().encode()

    def _sealed(self, key: str, text: str) -> str:
        data = text.encode()
        return (self._seal(key, data) + data).decode()

    def _opened(self, key: str, value: bytes) -> str | None:
        seal, data = value[: 2 * SEAL], value[2 * SEAL :]
        if not hmac.compare_digest(seal, self._seal(key, data)):
            return None
        return data.decode(errors="replace")
