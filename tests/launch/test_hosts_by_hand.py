"""Two machines (network namespaces) whose ranks are started by torchrun's variables alone, as a user's own scripts do."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ssh_server import ip, missing_namespaces

ROOT = Path(__file__).parents[2]
FIRST = "10.199.78.2"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing_namespaces()), reason=missing_namespaces() or "namespaces are here"),
]

SCRIPT = """
import torch
from torch import nn
from vpipe import Pipeline
torch.manual_seed(0)
pipe = Pipeline([nn.Linear(4, 4) for _ in range(4)], nn.functional.mse_loss, num_microbatches=2, timeout=30,
                transport="distributed", optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1))
print("loss", pipe.train_step(torch.ones(4, 4), torch.zeros(4, 4)), flush=True)
pipe.close()
"""


@pytest.fixture(scope="module")
def spaces() -> Iterator[list[str]]:
    """Two namespaces joined by a cable; in each, the machine's name resolves to loopback, as on many machines."""
    tag = f"vq{os.getpid() % 100_000}"
    names = [f"{tag}a", f"{tag}b"]
    try:
        for name in names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("-n", names[0], "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", names[1])
        for index, name in enumerate(names):
            ip("-n", name, "address", "add", f"10.199.78.{index + 2}/24", "dev", "cable")
            ip("-n", name, "link", "set", "cable", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def start(space: str, rank: int, script: Path, **more: str) -> subprocess.Popen[str]:
    places = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": FIRST, "MASTER_PORT": "29511"}
    return subprocess.Popen(
        ["ip", "netns", "exec", space, sys.executable, str(script)],
        env=os.environ | places | {"OMP_NUM_THREADS": "1"} | more,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
    )


@pytest.mark.rotates(1, of="hosts")
def test_ranks_find_the_interface_that_leads_to_the_first(spaces: list[str], tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    ranks = [start(space, rank, script) for rank, space in enumerate(spaces)]
    said = [rank.communicate(timeout=200)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    assert len({line for text in said for line in text.splitlines() if line.startswith("loss")}) == 1, said


@pytest.mark.rotates(1, of="hosts")
def test_an_interface_that_leads_nowhere_ends_both_in_words(spaces: list[str], tmp_path: Path) -> None:
    """Both ranks take loopback: neither can reach the other, and each says so within the timeout."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    ranks = [start(space, rank, script, GLOO_SOCKET_IFNAME="lo") for rank, space in enumerate(spaces)]
    said = [rank.communicate(timeout=200)[0] for rank in ranks]
    assert all(rank.returncode for rank in ranks), said
    assert "Traceback" not in "".join(said)
    assert any("cannot connect to the other ranks by the network interface lo" in text for text in said), said
