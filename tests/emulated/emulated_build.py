"""Builds the emulated accelerator, once per version of torch and of its sources.

The library lies in the user's cache directory, outside the tree. No ninja and no setuptools: two calls of g++ and one
of its linker. ``python tests/emulated/emulated_build.py`` builds it ahead of the tests.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from importlib.metadata import version
from pathlib import Path

NATIVE = Path(__file__).parent / "native"
UNITS = ("device_unit", "backend_unit")
LIBRARIES = ("c10", "torch_cpu", "torch", "torch_python")


class CannotBuild(RuntimeError):
    """Why there is no emulated accelerator here, in a sentence."""


def library() -> Path:
    """The built library; built now if it is not there yet."""
    target = _cache() / f"torch-{version('torch')}-{_digest()}" / "emulated.so"
    if target.exists():
        return target
    _check()
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target.parent / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another process may build it at this moment
        if not target.exists():
            _build(target)
    return target


def _cache() -> Path:
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError:
        root = Path(tempfile.gettempdir())
    return root / "vpipe-emulated"


def _digest() -> str:
    found = hashlib.sha256(sys.version.encode())
    for path in sorted([*NATIVE.iterdir(), Path(__file__)]):
        found.update(path.name.encode() + path.read_bytes())
    return found.hexdigest()[:16]


def _check() -> None:
    if shutil.which("g++") is None:
        raise CannotBuild("the emulated accelerator needs a C++ compiler: install g++")
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        raise CannotBuild("the emulated accelerator needs Python's headers: install python3-dev")


def _build(target: Path) -> None:
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.submodule_search_locations
    torch = Path(spec.submodule_search_locations[0])
    headers = [torch / "include", torch / "include/torch/csrc/api/include", sysconfig.get_paths()["include"]]
    flags = ["-std=c++20", "-O0", "-fPIC", "-DTORCH_EXTENSION_NAME=emulated"]
    flags += [part for path in headers for part in ("-isystem", str(path))]
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        objects = [f"{scratch}/{unit}.o" for unit in UNITS]
        calls = [
            ["g++", *flags, "-c", str(NATIVE / f"{unit}.cpp"), "-o", object_]
            for unit, object_ in zip(UNITS, objects, strict=True)
        ]
        running = [subprocess.Popen(call, stderr=subprocess.PIPE, text=True) for call in calls]
        said = "".join([compiler.communicate()[1] for compiler in running])
        if any(compiler.returncode for compiler in running):
            raise RuntimeError(f"the emulated accelerator does not compile with torch {version('torch')}:\n{said}")
        made = f"{scratch}/emulated.so"
        libraries = [f"-L{torch / 'lib'}", *(f"-l{name}" for name in LIBRARIES), f"-Wl,-rpath,{torch / 'lib'}"]
        subprocess.run(["g++", *objects, "-shared", *libraries, "-o", made], check=True)
        Path(made).replace(target)


if __name__ == "__main__":
    print(library())
