"""What every room's tests share."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings

settings.register_profile("patient", deadline=None)
settings.load_profile("patient")  # a busy machine is no defect

Vpipe = Callable[..., "subprocess.CompletedProcess[str]"]

TOGETHER = ("test_slurm.py", "test_ssh.py", "test_container.py")
"""Files whose tests share a cluster, a server or an image, and so a worker of xdist."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """``--dist loadgroup`` with files as groups. xdist 3.8 tells groups by the end of a test's name, which pytest 9.2
    does not let it write any more: marks are accepted and do nothing, and two clusters of SLURM take the same ports."""
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadGroupScheduling

    class Together(LoadGroupScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return file if file.endswith(TOGETHER) else nodeid

    return Together(config, log)


@pytest.fixture(scope="session")
def vpipe() -> Vpipe:
    """Run the command line in a process of its own, as a user does: ``vpipe("draw", "1f1b", "-p", "4", "-m", "8")``."""

    def run(
        *args: str, stdin: str | None = None, timeout: float = 60, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        known = {key: value for key, value in os.environ.items() if not key.startswith("VPIPE_")}
        return subprocess.run(
            [sys.executable, "-m", "vpipe", *args],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout,
            env=known | environment,
            check=False,
        )

    return run
