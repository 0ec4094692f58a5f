"""Bytes and seconds as people write them.

A memory limit comes from a person (``4GiB``) and goes back to a person (``short by 1.25 GiB``); both directions live
here so that every message and table writes them alike.
"""

from __future__ import annotations

import re

from vpipe.errors import UserError

_UNITS = {"": 1, "b": 1} | {
    prefix + ending: (1024 if "i" in ending else 1000) ** power
    for power, prefix in enumerate("kmgt", start=1)
    for ending in ("b", "ib")
}
_MOST = 2**53
_NUMBER = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*)\s*")


def parse_bytes(text: str | int | float) -> int:
    """``"4GiB"``, ``"512 MB"``, ``"1.5e9"`` is not accepted, a plain number is bytes."""
    if isinstance(text, bool):
        raise UserError(f"memory is {text!r}; write a size such as 4GiB or 512MB")
    if isinstance(text, int | float):
        if not 0 < text <= _MOST:
            raise UserError(f"memory is {str(text)[:24]}; it must be a positive number of bytes, for example 4GiB")
        return int(text)
    match = _NUMBER.fullmatch(text)
    unit = match and _UNITS.get(match[2].lower())
    if match is None or unit is None:
        raise UserError(
            f"memory is {text!r}, which is no size; write a number and a unit, for example 4GiB, 512MB or 1000000"
        )
    if float(match[1]) * unit > _MOST:
        raise UserError(f"memory is {text[:20]}…, more than {_MOST:.0e} bytes; write a size such as 4GiB")
    size = int(float(match[1]) * unit)
    if size <= 0:
        raise UserError(f"memory is {text!r}; it must be more than zero bytes, for example 4GiB")
    return size


def format_bytes(size: float) -> str:
    """``1536`` → ``1.5 KiB``: three digits that matter."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024 or unit == "TiB":
            return f"{value:.0f} B" if unit == "B" else f"{value:.{_digits(value)}f} {unit}"
        value /= 1024
    raise AssertionError("unreachable")


def format_seconds(seconds: float) -> str:
    """``0.00123`` → ``1.23 ms``."""
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        value = seconds * scale
        if abs(value) >= 1 or unit == "µs":
            return f"{value:.{_digits(value)}f} {unit}"
    raise AssertionError("unreachable")


def _digits(value: float) -> int:
    return 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
