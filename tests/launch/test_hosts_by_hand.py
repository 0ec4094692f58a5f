"""Two machines (network namespaces) whose ranks are started by torchrun's variables alone, as a user's own scripts do."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ssh_server import NEEDS_HOSTS, ip

ROOT = Path(__file__).parents[2]
FIRST = "10.199.78.2"

pytestmark = [
    pytest.mark.slow,
    NEEDS_HOSTS,
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


def trained(folder: Path, befores: tuple[str, str], *words: str, **more: str) -> tuple[list[int], list[str]]:
    """Two ranks of ``vpipe train`` by torch's variables alone: codes, and what they say. ``befores`` are run first,
    each in a view of the file system of its own."""
    config = ROOT / "configs" / "gpt_1f1b_cpu.yaml"
    train = f"exec {sys.executable} -m vpipe train {config} --set parallel.model_parallel_size=2 {' '.join(words)}"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    meeting = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [
        subprocess.Popen(
            ["unshare", "--mount", "sh", "-c", f"{before}{train}"],
            env={k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
            | meeting
            | {"RANK": str(rank), "LOCAL_RANK": "0"}
            | more,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=folder,
        )
        for rank, before in enumerate(befores)
    ]
    said = [rank.communicate(timeout=200)[0] for rank in ranks]
    return [rank.returncode for rank in ranks], said


def test_a_run_directory_that_a_machine_does_not_see_is_refused(tmp_path: Path) -> None:
    """The second rank has a disk of its own at the same path: rank 0 would wait for its pieces of a checkpoint."""
    (tmp_path / "runs").mkdir()
    codes, said = trained(tmp_path, ("", "mount -t tmpfs none runs && "))
    assert codes == [2, 2], said
    told = "".join(said)
    assert f"does not see the run directory {tmp_path}/runs/" in told
    assert "rank 1 on" in told
    assert "on a file system that all machines share" in told


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core cannot be shared")
def test_ranks_of_no_launcher_share_the_cores(tmp_path: Path) -> None:
    """Each would compute with a thread for every core: a step took fifty times as long."""
    (tmp_path / "says.py").write_text(
        "import atexit, torch\natexit.register(lambda: print('threads', torch.get_num_threads()))\n"
    )
    pin = f"taskset -pc {min(os.sched_getaffinity(0))},{max(os.sched_getaffinity(0))} $$ > /dev/null && "
    words = ("--set training.max_iterations=1", "--plugin", "says.py")
    for more, threads in (({}, 1), ({"OMP_NUM_THREADS": "2"}, 2)):
        codes, said = trained(tmp_path, (pin, pin), *words, **more)
        assert codes == [0, 0], said
        assert all(f"threads {threads}" in one for one in said), said


def test_machines_that_share_no_home_and_no_secret_are_refused(tmp_path: Path) -> None:
    """The store is never open: who listens there might be anybody."""
    codes, said = trained(
        tmp_path,
        (f"export XDG_STATE_HOME={tmp_path}/a && ", f"export XDG_STATE_HOME={tmp_path}/b && "),
        "--set parallel.timeout=10",
    )
    assert codes[1] == 2, said
    assert "does not know the secret of this run: set VPIPE_SECRET" in said[1]
    assert "Traceback" not in "".join(said)
    assert "done:" not in said[0]
