"""Three hosts (network namespaces) on one switch, the last behind a slow cable: ``vpipe profile`` finds out, and
``vpipe plan`` sends little there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from ssh_server import NEEDS_HOSTS, NEEDS_SSHD, Server, ip

import forked_python
from vpipe.plan.costs import Profile, load_profile
from vpipe.plan.planner import plan

ROOT = Path(__file__).parents[2]
SLOW_MBIT = 60

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(120),
    NEEDS_HOSTS,
]

TINY: dict[str, Any] = {
    "model": {"name": "gpt", "hidden_size": 8, "num_layers": 4, "num_heads": 2, "sequence_length": 8},
    "dataset": {"name": "synthetic", "batch_size": 8, "extra": {"vocab_size": 32, "num_examples": 32}},
    "training": {"num_microbatches": 4, "optimizer": "sgd"},
    "parallel": {"model_parallel_size": 3, "scheduler": "1f1b", "timeout": 60.0},
    "launch": {"threads": 1},
}


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Namespaces joined by a bridge in a fourth; what the last host sends and gets is held back."""
    tag = f"vl{os.getpid() % 100_000}"
    names, switch = [f"{tag}{letter}" for letter in "abc"], f"{tag}s"
    try:
        ip("netns", "add", switch)
        ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", switch, "link", "set", "bridge", "up")
        for index, name in enumerate(names):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "add", "cable", "type", "veth", "peer", "name", f"port{index}", "netns", switch)
            ip("-n", switch, "link", "set", f"port{index}", "master", "bridge", "up")
            ip("-n", name, "address", "add", f"10.199.77.{index + 2}/24", "dev", "cable")
            ip("-n", name, "link", "set", "cable", "up")
        for space, device in ((names[2], "cable"), (switch, "port2")):
            shape = f"tc qdisc add dev {device} root tbf rate {SLOW_MBIT}mbit burst 32kb latency 400ms"
            subprocess.run(["ip", "netns", "exec", space, *shape.split()], check=True, capture_output=True)
        yield names
    finally:
        for name in (*names, switch):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def started_on(hosts: list[str], address: str, folder: Path, *words: str) -> list[str]:
    """What a rank on each host says, as torchrun would start it."""
    common = {"WORLD_SIZE": str(len(hosts)), "LOCAL_RANK": "0", "MASTER_ADDR": address, "MASTER_PORT": "29513"}
    started = [
        subprocess.Popen(
            ["ip", "netns", "exec", host, sys.executable, "-m", "vpipe", *words],
            env=os.environ | common | {"RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=folder,
        )
        for rank, host in enumerate(hosts)
    ]
    said = [process.communicate(timeout=200)[0] for process in started]
    assert not any(process.returncode for process in started), said
    return said


def test_a_host_whose_name_leads_to_itself_is_reached_by_the_others(hosts: list[str], tmp_path: Path) -> None:
    """Debian writes 127.0.1.1 for the machine's own name; the ranks of other machines know it by another address."""
    names = [Path("/etc/netns", host, "hosts") for host in hosts[:2]]
    more = {"training": {"max_iterations": 2}, "parallel": {"timeout": 10.0}}
    asked = TINY | {section: TINY[section] | keys for section, keys in more.items()}
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(asked))
    try:
        for file, address in zip(names, ("127.0.1.1", "10.199.77.2"), strict=True):
            file.parent.mkdir(parents=True)
            file.write_text(f"127.0.0.1 localhost\n{address} node1\n")
        words = ("train", "tiny.yaml", "--set", "parallel.model_parallel_size=2")
        said = started_on(hosts[:2], "node1", tmp_path, *words)
        assert "done: 2 iterations" in said[0]
        assert "socket.cpp" not in "".join(said), "torch complains of names that lead nowhere back"
    finally:
        for file in names:
            file.unlink(missing_ok=True)
            file.parent.rmdir()


def profiled(hosts: list[str], folder: Path) -> Profile:
    """``vpipe profile`` on every host, as torchrun would start it."""
    (folder / "tiny.yaml").write_text(yaml.safe_dump(TINY))
    said = started_on(hosts, "10.199.77.2", folder, "profile", "tiny.yaml", "-o", "profile.json", "--repeat", "2")
    assert "links between 3 ranks:" in said[0]
    assert "written to profile.json" in said[0]
    assert not any("forward" in words for words in said[1:]), "one rank speaks"
    return load_profile(folder / "profile.json")


def test_a_slow_cable_is_found_and_avoided(hosts: list[str], tmp_path: Path) -> None:
    found = profiled(hosts, tmp_path)
    links = found.links
    assert links is not None
    assert links.bandwidth is not None
    assert links.latency is not None
    speed = links.bandwidth
    slow = [speed[0][2], speed[2][0], speed[1][2], speed[2][1]]
    assert max(slow) < 1.5 * SLOW_MBIT * 1e6 / 8, "no more than the cable lets through, a burst aside"
    assert min(speed[0][1], speed[1][0]) > 2 * max(slow), speed
    assert found.link_bandwidth == min(slow), "one figure for all is that of the slowest"
    # The command reads them from the profile: its step is that of a plan with these links, not with one figure for all.
    asked = [
        forked_python.program(),
        "-m",
        "vpipe",
        "plan",
        "profile.json",
        "-p",
        "3",
        "-m",
        "4",
        "--scheduler",
        "1f1b",
    ]
    done = subprocess.run([*asked, "--json"], cwd=tmp_path, capture_output=True, text=True, check=True)
    step = json.loads(done.stdout)["step_time"]
    assert step == plan(replace(found, links=None), 3, num_microbatches=4, links=links).step_time
    assert step < plan(replace(found, links=None), 3, num_microbatches=4).step_time


@NEEDS_SSHD
def test_machines_of_the_config_measure_by_ssh(tmp_path: Path) -> None:
    """The ranks of ``launch.machines`` measure there; the profile is written here."""
    server = Server(tmp_path, {"node-a": "127.0.0.2", "node-b": "127.0.0.3"})
    machines = {"machines": ["node-a:0", "node-b:0"], "interface": "lo", "threads": 1}
    parallel = {**TINY["parallel"], "model_parallel_size": 2}
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(TINY | {"launch": machines, "parallel": parallel}))
    words = [forked_python.program(), "-m", "vpipe", "profile", "tiny.yaml", "-o", "profile.json", "--repeat", "1"]
    try:
        server.listen(["127.0.0.2", "127.0.0.3"])
        done = subprocess.run(
            words,
            env=os.environ | {"VPIPE_SSH_CONFIG": str(server.config)},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=110,
            check=False,
        )
    finally:
        server.stop()
    assert done.returncode == 0, done.stderr
    found = load_profile(tmp_path / "profile.json")
    assert found.links is not None
    assert found.links.num_ranks == 2
