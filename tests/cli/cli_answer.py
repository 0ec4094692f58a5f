"""What a call of the command line came to."""

from __future__ import annotations

import json
from typing import Any


class Answer:
    """What a call printed and how it ended."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    def json(self) -> Any:
        return json.loads(self.out)
