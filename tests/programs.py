"""What some tests need of the machine. A test says ``@needs("sbatch", "root")``, and is skipped with the remedy where that is missing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from functools import cache

import pytest

PACKAGES = {
    "bwrap": "bubblewrap",
    "ch-run": "charliecloud",
    "chromium": "chromium",
    "ip": "iproute2",
    "mpirun": "openmpi-bin",
    "mpirun.mpich": "mpich",
    "mpirun.openmpi": "openmpi-bin",
    "munged": "munge",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "sshd": "openssh-server",
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "strace": "strace",
    **dict.fromkeys(("sbatch", "scancel", "scontrol", "sinfo", "srun"), "slurm-client"),
}
"""Program → Debian's package that has it."""


@cache
def _can_add_namespaces() -> bool:
    name = f"vpipe-try-{os.getpid()}"
    added = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode == 0
    subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
    return added


RIGHTS: dict[str, Callable[[], bool]] = {"root": lambda: os.geteuid() == 0, "namespaces": _can_add_namespaces}
"""What no package gives."""


def needs(*names: str) -> pytest.MarkDecorator:
    """Mark a test that needs these programs or rights; ``-m needs`` selects all such tests."""
    return pytest.mark.needs(*names)


def another_user() -> list[str]:
    """Words before the text of a program in Python that another user runs. That user may not enter a folder of links or a virtual
    environment below root's own, so it is the interpreter behind ours."""
    words = [
        "setpriv",
        "--reuid",
        "65534",
        "--regid",
        "65534",
        "--clear-groups",
        os.path.realpath(sys.executable),
        "-c",
    ]
    if os.getuid() or shutil.which("setpriv") is None or subprocess.run([*words, ""], check=False).returncode:
        pytest.skip("another user's process needs root, setpriv, and an interpreter that others may start")
    return words


def find(program: str) -> str | None:
    """The path of a program, also of one for administrators where PATH has the system's others (.ci/bare_path has not)."""
    path = os.environ.get("PATH", "")
    return shutil.which(program, path=f"{path}:/usr/sbin:/sbin" if "/usr/bin" in path.split(":") else path)


def absent(names: Iterable[str]) -> str:
    """Why a test that needs ``names`` cannot run here, with the remedy; empty where it can."""
    missing = [name for name in names if name in PACKAGES and find(name) is None]
    if missing:
        packages = dict.fromkeys(PACKAGES[program] for program in missing)
        return f"no {', '.join(missing)}; apt-get install {' '.join(packages)}"
    return ", ".join(f"no right to {name}" for name in names if name in RIGHTS and not RIGHTS[name]())
