"""What the other end of a stream can do: whoever would colour a line or draw over it asks here first."""

from __future__ import annotations

import os
import shutil
from typing import Any


def obeys(stream: Any) -> bool:
    """Whether ``stream`` is a terminal that understands escape codes; ``TERM=dumb`` (Emacs, some CI) does not."""
    return is_terminal(stream) and os.environ.get("TERM") != "dumb"


def columns(stream: Any) -> int | None:
    """The width of the terminal at ``stream``; ``None`` for a file or a pipe, whose lines may be long."""
    return shutil.get_terminal_size().columns if is_terminal(stream) else None


def is_terminal(stream: Any) -> bool:
    try:
        return os.isatty(stream.fileno())
    except (AttributeError, OSError, ValueError):
        return False
