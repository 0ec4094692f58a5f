"""``vpipe doctor`` answers in seconds, says how to mend what is missing, and never fails itself."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import forked_python
from vpipe.launch import doctor
from vpipe.launch.doctor import Finding

ROOT = Path(__file__).parents[2]
TOPICS = {
    "python",
    "torch",
    "accelerator",
    "cores",
    "threads",
    "memory",
    "disk",
    "interface",
    "gloo",
    "ports",
    "slurm",
    "ssh",
    "container",
}


def ask(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [forked_python.program(), "-m", "vpipe", "doctor", *words],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_every_topic_is_answered_and_json_is_only_json() -> None:
    done = ask("--json")
    answer = json.loads(done.stdout)
    assert answer["can_train"] is True
    assert {finding["topic"] for finding in answer["findings"]} >= TOPICS
    assert all(finding["mend"] for finding in answer["findings"] if finding["status"] == "missing")
    assert done.returncode == 0


def test_a_machine_with_nothing_gets_remedies(tmp_path: Path) -> None:
    """No program on the PATH: no SLURM, ssh or container, and still an answer."""
    done = ask(PATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "run vpipe submit on a login node" in done.stdout
    assert "apt-get install openssh-client" in done.stdout


def test_it_says_which_interface_gloo_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nonet0")
    (finding,) = [each for each in doctor._network() if each.topic == "gloo"]
    assert finding.status == "missing"
    assert "interfaces are" in finding.mend
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    (finding,) = [each for each in doctor._network() if each.topic == "gloo"]
    assert finding.status == "found"


def test_a_check_that_fails_is_a_finding() -> None:
    def _broken() -> Iterator[Finding]:
        raise RuntimeError("boom")
        yield

    assert doctor._safely(_broken) == [Finding("broken", "note", "could not be examined: RuntimeError: boom")]


def test_a_program_that_hangs_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("sbatch", "sinfo"):
        (tmp_path / name).write_text("#!/bin/sh\nexec sleep 60\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(doctor, "SECONDS", 0.2)
    found = doctor._safely(doctor._slurm)
    assert found[0].status == "missing"
    assert "does not answer" in found[0].detail


def test_it_loads_no_torch() -> None:
    code = "import sys; from vpipe.launch.doctor import examine; examine(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=200)


def program(folder: Path, name: str, *lines: str) -> None:
    """A program of that name on a PATH that has nothing else."""
    file = folder / name
    file.write_text("\n".join(["#!/bin/sh", *lines]) + "\n")
    file.chmod(0o755)


@pytest.mark.parametrize(
    ("facts", "status", "said"),
    [
        ('{"devices": "2 × A", "memory": "1 GiB", "backend": "xccl"}', "found", "2 × A, 1 GiB each, backend xccl"),
        ("{}", "missing", "nvidia-smi lists 1: B, 8 GiB; this torch finds none"),
        (None, "note", "torch did not say"),
    ],
)
def test_what_torch_finds_counts_and_not_what_a_tool_lists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, facts: str | None, status: str, said: str
) -> None:
    program(tmp_path, "nvidia-smi", "echo B, 8 GiB")
    program(tmp_path, "python", "exit 1" if facts is None else f"echo '{facts}'")
    monkeypatch.setattr(doctor.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    (finding,) = doctor._accelerators()
    assert finding.status == status
    assert said in finding.detail


@pytest.mark.parametrize(("daemon", "status"), [("exit 1", "missing"), ("echo 28.2.2", "found")])
def test_docker_without_a_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, daemon: str, status: str) -> None:
    program(tmp_path, "docker", 'if [ "$1" = --version ]; then echo Docker version 28; exit; fi', daemon)
    monkeypatch.setenv("PATH", str(tmp_path))
    (finding,) = doctor._containers()
    assert finding.status == status
    assert finding.detail.startswith("docker: Docker version 28")
    assert ("its daemon does not answer" in finding.detail) == (status == "missing")
    assert bool(finding.mend) == (status == "missing")


def test_ssh_without_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, "ssh")
    program(tmp_path, "ssh-add", 'if [ "$AGENT" = full ]; then echo 256 SHA256:x me; else echo none; exit 1; fi')
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SSH_AUTH_SOCK", "/nowhere")
    (finding,) = doctor._ssh()
    assert finding.status == "note"
    assert finding.detail.startswith("no keys in ~/.ssh and no agent with any")
    assert "ssh-keygen" in finding.mend
    monkeypatch.setenv("AGENT", "full")
    (finding,) = doctor._ssh()
    assert (finding.status, finding.detail) == ("found", "keys: none in ~/.ssh; an agent with 1")
    monkeypatch.delenv("SSH_AUTH_SOCK")
    (tmp_path / ".ssh").mkdir()
    for name in ("id_ed25519", "id_ed25519.pub"):
        (tmp_path / ".ssh" / name).touch()
    (finding,) = doctor._ssh()
    assert (finding.status, finding.detail) == ("found", "keys: id_ed25519; no agent with any")


def test_every_extra_that_users_can_ask_for_is_looked_at() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    wanted = {name: {re.split("[<>=]", each)[0] for each in extras[name]} for name in extras.keys() - {"test", "dev"}}
    assert {name: set(modules) for name, modules in doctor.EXTRAS.items()} == wanted
