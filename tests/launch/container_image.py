"""A container image for tests: a directory tree that says who it is; programs and Python come by binds."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAME = "vpipe-test-image"


def build(root: Path, *places: Path) -> Path:
    """An image in ``root`` with ``/image-name`` and with empty directories where binds go."""
    for name in ("usr", "etc", "dev", "proc", "sys", "tmp", "run", "home", "root", "mnt", "var/tmp"):
        (root / name).mkdir(parents=True)
    for place in (*brought(), *map(str, places)):
        (root / place.lstrip("/")).mkdir(parents=True, exist_ok=True)
    for name in ("bin", "lib", "lib64", "sbin"):
        (root / name).symlink_to(f"usr/{name}")
    for name in ("passwd", "group", "hosts", "resolv.conf"):
        shutil.copy(f"/etc/{name}", root / "etc" / name)
    (root / "image-name").write_text(NAME)
    return root


def brought() -> tuple[str, ...]:
    """What the image lacks: the system's programs, this Python and this repository."""
    places = {"/usr", str(ROOT), str(Path(sys.base_prefix)), str(Path(sys.prefix))}
    return tuple(sorted(place for place in places if place == "/usr" or not place.startswith("/usr/")))
