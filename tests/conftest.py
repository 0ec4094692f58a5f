"""What every room's tests share."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest

Vpipe = Callable[..., "subprocess.CompletedProcess[str]"]


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
