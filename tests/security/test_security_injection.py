"""Every string that reaches a command line, against every payload: refused in one line, or passed on as one word.

The scripts are really run by bash, with programs in the place of srun and scontrol that write down the words they got.
"""

from __future__ import annotations

import json
import os
import shlex
import stat
import subprocess
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from security_payloads import PAYLOADS

from vpipe.config import load
from vpipe.errors import UserError
from vpipe.launch.container import Container, wrap
from vpipe.launch.hosts import Node, nodes
from vpipe.launch.slurm import SlurmJob, script, sweep
from vpipe.launch.ssh import SshLaunch, command

RECORDER = """#!/bin/sh
printf '%s\\0' "$0" "$@" END >> {log}
case "$0 $*" in
  *"scontrol show hostnames"*) echo n1 ;;
  *scontrol*) echo "NodeName=n1 NodeAddr=10.0.0.1 Port=1" ;;
esac
"""

WORDS = ("name", "options", "time", "array", "interface")
"""Fields of a job that are single checked words."""

TEXTS: dict[str, Callable[[str], SlurmJob]] = {
    "config": lambda payload: SlurmJob(payload, 2, 1),
    "python": lambda payload: SlurmJob("c.yaml", 2, 1, python=payload),
    "run_directory": lambda payload: SlurmJob("c.yaml", 2, 1, run_directory=payload),
    "checkpoint_directory": lambda payload: SlurmJob("c.yaml", 2, 1, checkpoint_directory=payload),
    "arguments": lambda payload: SlurmJob("c.yaml", 2, 1, arguments=("--set", payload)),
    "points": lambda payload: SlurmJob("c.yaml", 2, 1, points=((payload,), ("a.b=1",))),
    "image": lambda payload: SlurmJob("c.yaml", 1, 2, container=Container("apptainer", payload)),
    "bind": lambda payload: SlurmJob("c.yaml", 1, 2, container=Container("docker", "image", (f"{payload}:/inside",))),
}
"""Fields of a job that may hold any line of text."""


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sandbox")
    (folder / "bin").mkdir()
    for name in ("srun", "scontrol", "ssh", "python", "probe"):
        program = folder / "bin" / name
        program.write_text(RECORDER.format(log=shlex.quote(str(folder / "log"))))
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return folder


def run(sandbox: Path, *command: str, text: str = "") -> list[list[str]]:
    """The words that programs got when ``command`` ran."""
    (sandbox / "log").write_text("")
    environment = {
        "PATH": f"{sandbox}/bin:/usr/bin:/bin",
        "SLURM_JOB_ID": "7",
        "SLURM_ARRAY_JOB_ID": "7",
        "SLURM_ARRAY_TASK_ID": "0",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_RESTART_COUNT": "1",
    }
    subprocess.run(
        command, input=text.encode(), cwd=sandbox, env=environment, timeout=200, capture_output=True, check=False
    )
    calls: list[list[str]] = [[]]
    for word in (sandbox / "log").read_text().split("\0")[:-1]:
        if word == "END":
            calls.append([])
        else:
            calls[-1].append(word)
    return calls[:-1]


def allowed(make: Callable[[str], object], payload: str) -> object | None:
    """What is made of a payload; None where it is refused, which takes one line."""
    try:
        return make(payload)
    except UserError as error:
        refusal = str(error)
    assert "\n" not in refusal
    assert len(refusal) < 400
    return None


def armed(payload: str, sandbox: Path) -> str:
    return payload.replace("CANARY", str(sandbox / "canary"))


def test_there_are_enough_payloads() -> None:
    cases = len(PAYLOADS) * (len(WORDS) + len(TEXTS) + 12)
    print(f"{cases} cases")
    assert cases >= 300


def test_every_string_of_a_job_is_attacked() -> None:
    texts = {field.name for field in fields(SlurmJob)} - {
        "num_nodes",
        "least_nodes",
        "elastic",
        "tasks_per_node",
        "requeue",
        "port",
    }
    assert texts - {"container"} <= {*WORDS, *TEXTS}


@pytest.mark.parametrize("payload", PAYLOADS, ids=range(len(PAYLOADS)))
@pytest.mark.parametrize("field", WORDS)
def test_words_of_slurm_are_refused_or_plain(field: str, payload: str) -> None:
    def made(word: str) -> SlurmJob:
        values: dict[str, Any] = {"options": {"gres": word}, "time": {"time": word}}
        return SlurmJob("c.yaml", 2, 1, **({"options": values[field]} if field in values else {field: word}))

    job = allowed(made, payload)
    if job is None:
        return
    assert isinstance(job, SlurmJob)
    plain = script(made("7")).splitlines()
    lines = script(job).splitlines()
    assert len(lines) == len(plain), payload
    assert not payload.startswith("-")
    assert shlex.quote(payload) == payload or payload.replace("%", "") == shlex.quote(payload.replace("%", ""))


@pytest.mark.rotates(140)
@pytest.mark.parametrize("payload", PAYLOADS, ids=range(len(PAYLOADS)))
@pytest.mark.parametrize("field", TEXTS)
def test_texts_of_a_script_stay_one_word(field: str, payload: str, sandbox: Path) -> None:
    payload = armed(payload, sandbox)
    job = allowed(TEXTS[field], payload)
    if job is None:
        return
    assert isinstance(job, SlurmJob)
    calls = run(sandbox, "bash", text=script(job))
    assert not (sandbox / "canary").exists()
    (srun,) = [call for call in calls if Path(call[0]).name == "srun"]
    if field in ("config", "python", "arguments", "points", "image"):
        assert payload in srun
    elif field == "run_directory":
        assert f"{payload}/slurm-7" in srun
    elif field == "bind":
        assert f"{payload}:/inside" in srun
    assert all("scontrol" in call[0] or "srun" in call[0] for call in calls)


@pytest.mark.parametrize("payload", PAYLOADS, ids=range(len(PAYLOADS)))
def test_the_far_shell_sees_quoted_words(payload: str, sandbox: Path) -> None:
    """The working directory and the Python program, as sshd hands them to a shell."""
    payload = armed(payload, sandbox)
    for launch in (
        lambda word: command(Node(0, "a", (0,), (0,)), SshLaunch(("a",), word, Path("r"), "python")),
        lambda word: command(Node(0, "a", (0,), (0,)), SshLaunch(("a",), str(sandbox), Path("r"), word)),
    ):
        words = allowed(launch, payload)
        if words is not None:
            assert isinstance(words, list)
            run(sandbox, "sh", "-c", words[-1])
            assert not (sandbox / "canary").exists()


@pytest.mark.parametrize("payload", PAYLOADS, ids=range(len(PAYLOADS)))
def test_hosts_are_names(payload: str) -> None:
    for make in (lambda word: nodes([word]), lambda word: nodes([f"{word}:0"]), lambda word: nodes([f"node:{word}"])):
        found = allowed(make, payload)
        for node in found or ():  # type: ignore[attr-defined]
            assert shlex.quote(node.host) == node.host
            assert not node.host.startswith("-")


@pytest.mark.parametrize("kind", ["apptainer", "singularity", "docker", "charliecloud", "bubblewrap"])
@pytest.mark.parametrize("payload", PAYLOADS, ids=range(len(PAYLOADS)))
def test_container_words_add_no_options(kind: str, payload: str) -> None:
    """Against a plain container: as many words, the same options."""
    plain = wrap(Container(kind, "image", ("/data",)), ["python3"], "/work")
    for make in (
        lambda word: wrap(Container(kind, word, ("/data",)), ["python3"], "/work"),
        lambda word: wrap(Container(kind, "image", (word,)), ["python3"], "/work"),
        lambda word: wrap(Container(kind, "image", (f"/data:{word}",)), ["python3"], "/work"),
        lambda word: wrap(Container(kind, "image", ("/data", "/work")), ["python3"], word),
    ):
        words = allowed(make, payload)
        if words is not None:
            assert isinstance(words, list)
            assert options(words) <= options(plain) | {"--bind=/data", "--cd=/work"}


def options(words: list[str]) -> set[str]:
    """The options among the words, without what follows their ``=``."""
    return {word.partition("=")[0] for word in words if word.startswith("-")}


@pytest.mark.parametrize("payload", PAYLOADS, ids=range(len(PAYLOADS)))
def test_the_config_refuses_what_the_launcher_would_refuse(payload: str, tmp_path: Path) -> None:
    """The same payloads in the launch section of a file: an error of sentences, or a value that stays one word."""
    for options in ({"partition": payload}, {payload: "gpu"}):
        launch = {"slurm": {"options": options}}
        text = json.dumps({"model": {"name": "gpt"}, "dataset": {"name": "synthetic"}, "launch": launch})
        path = tmp_path / "job.yaml"
        try:
            path.write_text(text)
            config = load(path, environment={}).config
        except (UserError, UnicodeEncodeError):
            continue
        SlurmJob("c.yaml", 2, 1, options={name: str(value) for name, value in config.launch.slurm.options.items()})


@pytest.mark.parametrize("axis", ["training.seed", "=1,2", "seed=1,2", "training.seed=1,,2", "training.seed="])
def test_a_sweep_is_section_key_values(axis: str) -> None:
    with pytest.raises(UserError, match=r"is not section.key=a,b"):
        sweep([axis])


SECRETS = {"HF_TOKEN": "s3cret-1", "WANDB_API_KEY": "s3cret-2", "HUGGING_FACE_HUB_TOKEN": "s3cret-3"}


def test_secrets_are_in_no_script_and_no_command(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    made = [
        script(SlurmJob("c.yaml", 2, 2, container=Container("docker", "image"))),
        str(
            command(
                Node(0, "a", (0,), (0,)), SshLaunch(("a",), "/w", Path("r"), container=Container("docker", "image"))
            )
        ),
        str(wrap(Container("docker", "image"), ["python3"], "/w", os.environ)),
    ]
    assert not [value for value in SECRETS.values() for text in made if value in text]
    assert "--env HF_TOKEN" in made[0]
