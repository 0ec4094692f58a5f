"""Messages between launchers, nodes, zygotes and ranks: one JSON object a line, whatever pieces they arrive in."""

from __future__ import annotations

import json
from typing import Any


class JsonLines:
    """Bytes in, whole messages out; the beginning of the next one waits."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.split(data)]

    def split(self, data: bytes) -> list[bytes]:
        """The same before anybody has looked whether they are messages."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        return lines
