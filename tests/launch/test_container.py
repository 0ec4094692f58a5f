"""A container is a prefix: the words of each kind, and charliecloud and bubblewrap run for real."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from container_image import ROOT, brought, build
from ssh_server import NEEDS_SSHD, Server

from programs import find, needs
from vpipe.config import ContainerConfig
from vpipe.errors import UserError
from vpipe.launch.container import MARK, NONE, Container, command_inside, wrap
from vpipe.launch.machines import run
from vpipe.launch.ssh import SshLaunch

PYTHON = ["python3", "-Pm", "vpipe"]


@pytest.mark.parametrize(
    ("container", "expected"),
    [
        (NONE, "python3 -Pm vpipe"),
        (
            Container("apptainer", "/images/torch.sif", ("/data", "/scratch:/tmp/s"), gpus=True),
            "apptainer exec --nv --bind /data:/data --bind /scratch:/tmp/s --bind /work:/work --pwd /work "
            "/images/torch.sif python3 -Pm vpipe",
        ),
        (
            Container("singularity", "torch.sif", ("/work",)),
            "singularity exec --bind /work:/work --pwd /work torch.sif python3 -Pm vpipe",
        ),
        (
            Container("docker", "pytorch/pytorch:2.6.0", ("/data",), gpus=True),
            "docker run --rm --init --interactive --network=host --ipc=host --gpus=all --volume /data:/data "
            "--volume /work:/work --workdir /work --env HF_TOKEN --env RANK pytorch/pytorch:2.6.0 python3 -Pm vpipe",
        ),
        (
            Container("charliecloud", "/images/torch", ("/data",)),
            "ch-run --bind=/data:/data --bind=/work:/work --cd=/work /images/torch -- python3 -Pm vpipe",
        ),
        (
            Container("bubblewrap", "/images/torch"),
            "bwrap --ro-bind /images/torch / --dev /dev --proc /proc --bind /dev/shm /dev/shm --bind /work /work "
            "--chdir /work --die-with-parent -- python3 -Pm vpipe",
        ),
    ],
    ids=lambda value: value.kind if isinstance(value, Container) else None,
)
def test_the_words_of_each_kind(container: Container, expected: str) -> None:
    assert wrap(container, PYTHON, "/work", ["RANK", "HF_TOKEN"]) == expected.split()


def test_a_bind_that_brings_the_working_directory_is_enough() -> None:
    words = wrap(Container("apptainer", "i.sif", ("/home/me:/home/me",)), PYTHON, "/home/me/project")
    assert words.count("--bind") == 1


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Container("dokcer", "image"), r"did you mean 'docker'\?"),
        (lambda: Container("docker", "-v/:/host"), "does not begin with a dash"),
        (lambda: Container("docker", ""), "must be a path"),
        (lambda: Container("docker", "my image"), "without spaces"),
        (lambda: Container("docker", "image", ("/a:/b:rw",)), "without commas"),
        (lambda: Container("docker", "image", ("relative",)), "without commas"),
        (lambda: wrap(Container("docker", "image"), [], "/", ["A=b"]), "a name of letters"),
    ],
)
def test_what_is_refused(make: object, sentence: str) -> None:
    assert callable(make)
    with pytest.raises(UserError, match=sentence):
        make()


def test_every_kind_of_the_config_is_known() -> None:
    for kind in ContainerConfig.model_fields["kind"].annotation.__args__:  # type: ignore[union-attr]
        config = ContainerConfig(kind=kind, image=None if kind == "none" else "image")
        assert Container.from_config(config).kind == kind


def test_a_local_run_enters_its_container_once() -> None:
    container = Container("docker", "image")
    words = command_inside(container, ["train", "c.yaml"], "/work", {"HF_TOKEN": "x", "HOME": "/"})
    assert words is not None
    assert words[-9:] == ["--env", "HF_TOKEN", "--env", MARK, "image", *PYTHON, "train", "c.yaml"][-9:]
    assert command_inside(container, ["train"], "/work", {MARK: "1"}) is None
    assert command_inside(NONE, ["train"], "/work", {}) is None


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("image"), tmp_path_factory.getbasetemp())


def works(*command: str) -> bool:
    try:
        return subprocess.run(command, capture_output=True, timeout=200, check=False).returncode == 0
    except OSError:
        return False


KINDS = {
    "charliecloud": [needs("ch-run")],
    "bubblewrap": [
        needs("bwrap"),
        pytest.mark.skipif(
            bool(find("bwrap")) and not works("bwrap", "--ro-bind", "/", "/", "true"), reason="bwrap cannot run here"
        ),
    ],
}

INSIDE = "import os; print(open('/image-name').read(), os.getcwd(), os.environ.get('HF_TOKEN'), os.environ.get('RANK'))"


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=mark) for kind, mark in KINDS.items()])
def test_a_command_runs_inside_for_real(kind: str, image: Path, tmp_path: Path) -> None:
    container = Container(kind, str(image), brought())
    environment = os.environ | {"USER": os.environ.get("USER", "root"), "HF_TOKEN": "token-1", "RANK": "3"}
    words = wrap(container, [sys.executable, "-c", INSIDE], str(ROOT), ["HF_TOKEN"])
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.stdout.split() == ["vpipe-test-image", str(ROOT), "token-1", "3"], done.stderr
    outside = subprocess.run([sys.executable, "-c", INSIDE], capture_output=True, text=True, timeout=200, check=False)
    assert outside.returncode != 0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("sshd"), {"node-a": "127.0.0.2", "node-b": "127.0.0.3"})
    try:
        server.listen(["127.0.0.2", "127.0.0.3"])
        yield server
    finally:
        server.stop()


MEET = """
import os
from datetime import timedelta
from torch.distributed import TCPStore
rank = int(os.environ["RANK"])
store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), 2, rank == 0, timedelta(seconds=60))
store.set(f"from {rank}", open("/image-name").read())
print(store.get(f"from {1 - rank}").decode(), os.environ["RANK"], flush=True)
if rank == 0:
    store.get("end")  # who keeps the store leaves last
else:
    store.set("end", "")
"""


@pytest.mark.slow
@NEEDS_SSHD
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=mark) for kind, mark in KINDS.items()])
def test_ranks_on_two_hosts_meet_inside_containers(
    kind: str, image: Path, server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("VPIPE_SSH_CONFIG", str(server.config))
    (image / str(tmp_path).lstrip("/")).mkdir(parents=True, exist_ok=True)
    script = tmp_path / "meet.py"
    script.write_text(MEET)
    container = Container(kind, str(image), (*brought(), str(tmp_path)))
    launch = SshLaunch(("node-a:0", "node-b:0"), str(ROOT), tmp_path, container=container)
    printed = io.BytesIO()
    assert run(launch, [str(script)], 2, stdout=printed) == 0
    lines = printed.getvalue().decode().splitlines()
    assert {"vpipe-test-image 0", "[rank 1] vpipe-test-image 1"} <= set(lines), lines
