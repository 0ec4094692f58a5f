"""Figures as people read them: seconds, bytes and counts with a unit."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """``1h 02m``, ``3m 05s``, ``12s``, ``1.20s``."""
    if seconds < 10:
        return f"{seconds:.2f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    return f"{whole // 3600}h {whole % 3600 // 60:02d}m"


def time(seconds: float) -> str:
    """A short time with the unit that suits it: ``1.25 s``, ``12.5 ms``, ``80 µs``."""
    size = abs(seconds)
    if size >= 1:
        return f"{seconds:.2f} s"
    if size >= 1e-3:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds * 1e6:.0f} µs"


def memory(size: float) -> str:
    """Bytes in binary units: ``1.5 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def count(number: float) -> str:
    """``1.2M``, ``340K``, ``12``."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if abs(number) >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:g}"
