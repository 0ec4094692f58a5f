"""Orion's interface against a small C library with the same symbols, really preloaded into a fresh interpreter."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from vpipe.compat.priorities.order import POLICIES
from vpipe.compat.priorities.orion import Orion, client_of, is_preloaded, num_clients
from vpipe.compat.priorities.turns import take_turns
from vpipe.errors import UserError
from vpipe.schedule.action import parse

SOURCE = r"""
#include <stdio.h>
static int clients = 0, threshold = 10;
static __thread int me = -1;
int orion_start_scheduler(int n, int device) {
    fprintf(stderr, "start %d %d\n", n, device);
    if (n > 16 || device == 99) return -1;
    clients = n; return 0;
}
void orion_stop_scheduler(void) { fprintf(stderr, "stop\n"); clients = 0; }
void orion_set_client_idx(int idx) { me = idx; }
int orion_get_client_idx(void) { return me; }
void orion_sync_client_stream(int idx) { fprintf(stderr, "sync %d\n", idx); }
void orion_set_sm_threshold(int value) { threshold = value; }
int orion_get_sm_threshold(void) { return threshold; }
#ifndef INCOMPLETE
void orion_reset_state(void) { threshold = 10; }
#endif
"""

pytestmark = pytest.mark.skipif(not shutil.which("gcc"), reason="needs gcc to compile the test's Orion library")


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("orion")
    (folder / "orion.c").write_text(SOURCE)
    for name, flags in (("whole", []), ("incomplete", ["-DINCOMPLETE"])):
        command = ["gcc", "-shared", "-fPIC", *flags, "-o", str(folder / f"{name}.so"), str(folder / "orion.c")]
        subprocess.run(command, check=True, timeout=200)
    return folder


def preloaded(library: Path, code: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"LD_PRELOAD": str(library)}
    modules = ("vpipe.compat.priorities.orion", "vpipe.compat.priorities.order", "vpipe.schedule.action")
    prelude = "".join(f"from {module} import *\n" for module in modules)
    command = [sys.executable, "-c", prelude + code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)


def test_without_preload_there_is_an_error_and_no_mock() -> None:
    assert not is_preloaded()
    with pytest.raises(UserError, match=r"not preloaded.*ORION_LIBRARY=.*LD_PRELOAD=.*use_orion_scheduler: false"):
        Orion()


def test_a_preloaded_library_is_found_and_driven(libraries: Path) -> None:
    done = preloaded(
        libraries / "whole.so",
        "import threading\n"
        "assert is_preloaded()\n"
        "orion = Orion(); orion.start(4, 1); orion.set_client(3)\n"
        "seen = []\n"
        "other = threading.Thread(target=lambda: seen.append(orion.client())); other.start(); other.join()\n"
        "assert (orion.client(), seen) == (3, [-1])\n"
        "orion.set_client(UNMANAGED); orion.sync(2); orion.stop(); orion.stop()\n",
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.split("\n") == ["start 4 1", "sync 2", "stop", ""]


@pytest.mark.parametrize(
    ("library", "code", "sentence"),
    [
        ("incomplete", "Orion()", "the preloaded Orion library lacks orion_reset_state"),
        ("whole", "Orion().start(17, 0)", "1 to 16 clients, not 17"),
        ("whole", "Orion().start(0, 0)", "1 to 16 clients, not 0"),
        ("whole", "Orion().start(2, 99)", "orion_start_scheduler returned -1"),
        ("whole", "o = Orion(); o.start(2, 0); o.start(2, 0)", "already running with 2 clients"),
        ("whole", "o = Orion(); o.start(2, 0); o.set_client(2)", "clients 0..1, not 2"),
        ("whole", "Orion().set_client(0)", "not 0; start it"),
        ("whole", "OrionClients(fifo, 17, 0)", "1 to 16 clients, not 17"),
    ],
)
def test_every_failure_is_an_error(libraries: Path, library: str, code: str, sentence: str) -> None:
    done = preloaded(libraries / f"{library}.so", code)
    assert done.returncode == 1
    assert "UserError" in done.stderr
    assert sentence in done.stderr


def test_the_config_gets_orion_or_an_error(libraries: Path) -> None:
    with pytest.raises(UserError, match="not preloaded"):
        take_turns(lambda guard: None, "first-hp", use_orion=True, num_microbatches=4)
    code = (
        "from vpipe.compat.priorities.turns import take_turns\n"
        "backend = take_turns(lambda guard: None, 'critical-path', use_orion=True, num_microbatches=40)\n"
        "assert backend.num_clients == 3; backend.close()"
    )
    assert preloaded(libraries / "whole.so", code).returncode == 0


def test_a_missing_library_does_not_pass_for_orion(libraries: Path) -> None:
    """The loader only warns about a file that is not there: the detection must not be fooled."""
    done = preloaded(libraries / "absent.so", "Orion()")
    assert done.returncode == 1
    assert "not preloaded" in done.stderr


def test_a_turn_runs_forward_and_backward_as_the_client(libraries: Path) -> None:
    done = preloaded(
        libraries / "whole.so",
        "import torch\n"
        "class Who(torch.autograd.Function):\n"
        "    @staticmethod\n"
        "    def forward(ctx, x): seen.append(orion.client()); return x * 2\n"
        "    @staticmethod\n"
        "    def backward(ctx, dy): seen.append(orion.client()); return dy * 2\n"
        "seen = []; orion = Orion(); backend = OrionClients(none, 4, 0, orion)\n"
        "for unit in (0, 3):\n"
        "    with backend.turn(parse(f'0F{unit}')): y = Who.apply(torch.ones(1, requires_grad=True))\n"
        "    with backend.turn(parse(f'0B{unit}')): y.backward()\n"
        "    assert orion.client() == -1\n"
        "assert seen == [0, 0, 3, 3], seen\n"
        "backend.close()\n",
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.split("\n") == ["start 4 0", *(f"sync {client}" for client in range(4)), "stop", ""]


@pytest.mark.parametrize(
    ("name", "units", "expected"),
    [
        ("first-hp", 4, {"0F0": 0, "1B0": 0, "0F1": 1, "0F3": 3, "0STEP": -1}),
        ("first-hp", 40, {"0F0": 0, "0F1": 1, "0F15": 15, "0F16": 1, "0F39": 9}),
        ("fifo", 16, {"0F0": 0, "0F15": 15}),
        ("critical-path", 40, {"0B7": 0, "0I0": 0, "0F0": 1, "0W39": 2}),
        ("first-hp", 1, {"0F0": 0}),
    ],
)
def test_actions_map_to_clients(name: str, units: int, expected: dict[str, int]) -> None:
    policy = POLICIES[name]
    clients = num_clients(policy, units)
    assert {text: client_of(policy, parse(text), clients) for text in expected} == expected
