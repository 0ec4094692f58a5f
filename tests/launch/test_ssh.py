"""``machines`` by a real sshd: several host names on loopback, and hosts in network namespaces."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path

import psutil
import pytest
from ssh_server import Server, behind_a_bridge, missing, missing_namespaces

import forked_python
from vpipe.config import PipelineConfig, load
from vpipe.errors import UserError
from vpipe.launch.hosts import Node, nodes
from vpipe.launch.remote import Hello
from vpipe.launch.ssh import SshLaunch, command, from_config, order, run

pytestmark = pytest.mark.timeout(120)
needs_sshd = pytest.mark.skipif(bool(missing()), reason=missing() or "sshd is here")

LAUNCHER = """
import sys
from pathlib import Path
from vpipe.launch.ssh import SshLaunch, run
*machines, script, folder = sys.argv[1:]
sys.exit(run(SshLaunch(tuple(machines), (script,), folder, Path(folder) / "run"), lambda line: print(line, flush=True)))
"""

TRAIN = """
import os, sys, torch
from vpipe import Pipeline
torch.set_num_threads(1); torch.manual_seed(0)
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
told = ("LOCAL_RANK", "GROUP_RANK", "VPIPE_DEVICES", "MASTER_ADDR", "GLOO_SOCKET_IFNAME")
print("rank", rank, *(os.environ[name] for name in told))
pipe = Pipeline([torch.nn.Linear(8, 8) for _ in range(size)], torch.nn.functional.mse_loss, num_microbatches=4)
x = torch.randn(8, 8)
for _ in range(3): loss = pipe.train_step(x, x, update=False)  # an optimizer would import torch._dynamo
print(f"loss {loss:.6f}")
torch.distributed.barrier()
"""

SLEEP = "import subprocess, time, os; print('up', flush=True); subprocess.run(['sleep', '{mark}'])\n"
FAIL = "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit('rank 1 has had enough')\ntime.sleep(600)\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    hosts = {"node-a": "127.0.0.2", "node-b": "127.0.0.3"}
    server = Server(tmp_path_factory.mktemp("sshd"), hosts)
    try:
        server.listen(list(hosts.values()))
        yield server
    finally:
        server.stop()


def launch(server: Server, folder: Path, script: str, *machines: str, **variables: str) -> subprocess.Popen[str]:
    (folder / "script.py").write_text(script)
    return subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, *machines, str(folder / "script.py"), str(folder)],
        env=os.environ | {"VPIPE_SSH_CONFIG": str(server.config)} | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@needs_sshd
@pytest.mark.slow
def test_ranks_on_two_hosts_train_together(server: Server, tmp_path: Path) -> None:
    """node-a is node 0 with ranks 0 and 2, node-b is node 1 with rank 1."""
    process = launch(server, tmp_path, TRAIN, "node-a:0", "node-b:3", "node-a:1", HF_TOKEN="secret-word")
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output
    assert "node-a: [0] rank 0 0 0 0,1 127.0.0.2 lo" in output
    assert "node-b: [1] rank 1 0 1 3 127.0.0.2 lo" in output
    assert "node-a: [2] rank 2 1 0 0,1 127.0.0.2 lo" in output
    assert len(set(re.findall(r"loss (\S+)", output))) == 1
    run = tmp_path / "run"
    assert (run / "machinefile").read_text() == "node-a:0\nnode-b:3\nnode-a:1\n"
    assert len((run / "command_history.log").read_text().splitlines()) == 2
    assert "[1] loss" in (run / "output.log.1").read_text()
    assert "[0] loss" in (run / "output.log.0").read_text()
    written = "".join(path.read_text() for path in run.iterdir())
    assert "secret-word" not in written + output


@needs_sshd
@pytest.mark.slow
def test_a_config_with_machines_trains_by_ssh(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way from a config to ranks that train: two hosts with a rank each."""
    monkeypatch.setenv("VPIPE_SSH_CONFIG", str(server.config))
    monkeypatch.setattr(sys, "executable", forked_python.program())
    path = Path(__file__).parents[2] / "configs" / "gpt_small_cpu.yaml"
    machines = ["launch.machines=[node-a:0, node-b:0]", "parallel.model_parallel_size=2"]
    overrides = [*machines, "training.max_iterations=2", "launch.threads=1"]
    words = [str(path), *(word for override in overrides for word in ("--set", override))]
    launch = from_config(load(path, overrides).config, words, tmp_path / "run")
    assert launch is not None
    lines: list[str] = []
    assert run(launch, lines.append) == 0, lines
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["iterations_done"] == 2
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"command_history.log", "machinefile", "output.log.0", "output.log.1", "config.yaml"} <= names


@needs_sshd
@pytest.mark.slow
def test_the_summary_of_a_run_by_ssh_is_alone_on_standard_output(server: Server, tmp_path: Path) -> None:
    """The nodes' lines come through one pipe each, and go elsewhere."""
    path = Path(__file__).parents[2] / "configs" / "gpt_small_cpu.yaml"
    settings = ["launch.machines=[node-a:0, node-b:0]", "parallel.model_parallel_size=2", "training.max_iterations=2"]
    words = [str(path), *(word for each in settings for word in ("--set", each)), "--output-dir", str(tmp_path / "run")]
    done = subprocess.run(
        [forked_python.program(), "-m", "vpipe", "train", *words, "--quiet", "--json"],
        env=os.environ | {"VPIPE_SSH_CONFIG": str(server.config), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["iterations_done"] == 2
    assert "iteration 1/2" not in done.stderr


@needs_sshd
def test_a_failing_rank_ends_all_nodes(server: Server, tmp_path: Path) -> None:
    process = launch(server, tmp_path, FAIL, "node-a:0", "node-b:0", "node-a:1")
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 1
    assert "node-b: [1] rank 1 has had enough" in output
    assert "rank 1 ended with exit code 1" in output
    assert not running(str(tmp_path / "script.py"))


@needs_sshd
@pytest.mark.parametrize("how", ["interrupt", "kill the launcher", "kill ssh"])
def test_remote_processes_end_with_the_launcher(server: Server, tmp_path: Path, how: str) -> None:
    mark = str(700_000 + os.getpid() + 10 * len(how))
    process = launch(server, tmp_path, SLEEP.format(mark=mark), "node-a:0", "node-b:0")
    until(lambda: len(running(mark)) == 2)
    if how == "interrupt":
        process.send_signal(signal.SIGINT)
    elif how == "kill the launcher":
        process.kill()
    else:
        children = psutil.Process(process.pid).children()
        next(child for child in children if child.name() == "ssh").kill()
    process.wait(200)
    assert process.returncode != 0
    until(lambda: not running(mark) and not running(str(tmp_path / "script.py")))
    assert process.stdout is not None
    process.stdout.close()


PATIENT = """
import os, signal, sys, time
from pathlib import Path
def asked(number, _):
    print("asked", number, flush=True)
    while not Path("FOLDER/go").exists(): time.sleep(0.01)
    os._exit(75)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP): signal.signal(number, asked)
print("up", flush=True)
while True: time.sleep(1)
"""


@needs_sshd
def test_lines_of_two_machines_are_not_mixed(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``show`` is a ``print`` that takes its time between a line and its end."""
    (tmp_path / "script.py").write_text("for number in range(30):\n    print('number', number, flush=True)\n")
    shown: list[str] = []

    def slowly(line: str) -> None:
        shown.append(line)
        time.sleep(0.002)
        shown.append("\n")

    monkeypatch.setenv("VPIPE_SSH_CONFIG", str(server.config))
    script = str(tmp_path / "script.py")
    launch = SshLaunch(("node-a:0", "node-b:0"), (script,), str(tmp_path), tmp_path / "run")
    assert run(launch, slowly) == 0
    assert set(shown[1::2]) == {"\n"}


def _said_by_vpipe(lines: Iterable[str]) -> Iterator[str]:
    """Without what a machine's own login shell says (two of them that rehash pyenv at once complain)."""
    return (line for line in lines if "pyenv" not in line)


@needs_sshd
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_ranks_elsewhere_get_the_same_signal_and_the_same_grace(server: Server, tmp_path: Path, number: int) -> None:
    """They were given TERM and five seconds, or, where the launcher was told TERM, nobody waited for them at all."""
    process = launch(server, tmp_path, PATIENT.replace("FOLDER", str(tmp_path)), "node-a:0", "node-b:0")
    assert process.stdout is not None
    told = _said_by_vpipe(process.stdout)
    said = list(islice(told, 2))
    assert all("] up" in line for line in said), said
    process.send_signal(number)
    said = list(islice(told, 3))
    assert sum("stopping 2 ranks, at most 60 s" in line for line in said) == 1, said
    assert sum(f"asked {int(number)}" in line for line in said) == 2, said
    (tmp_path / "go").touch()
    process.communicate(timeout=200)
    assert process.returncode == 75


@needs_sshd
def test_no_secret_is_in_any_list_of_processes(server: Server, tmp_path: Path) -> None:
    mark = str(700_777 + os.getpid())
    process = launch(server, tmp_path, SLEEP.format(mark=mark), "node-a:0", "node-b:0", WANDB_API_KEY="secret-word")
    until(lambda: len(running(mark)) == 2)
    assert not running("secret-word")
    environments = [psutil.Process(pid).environ().get("WANDB_API_KEY") for pid in running(mark)]
    assert environments == ["secret-word"] * 2
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=200)


@needs_sshd
@pytest.mark.parametrize(
    ("machines", "sentence"),
    [
        (("nowhere.invalid:0",), r"nowhere.invalid could not be started by ssh: .*[Rr]esolve"),
        (("node-a:0", "127.0.0.9:0"), r"127.0.0.9 could not be started by ssh: .*refused"),
    ],
)
def test_a_host_that_does_not_answer_is_named(
    server: Server, tmp_path: Path, machines: tuple[str, ...], sentence: str
) -> None:
    process = launch(server, tmp_path, SLEEP.format(mark="1"), *machines)
    output, _ = process.communicate(timeout=200)
    assert process.returncode != 0
    assert re.search(sentence, output), output


@needs_sshd
@pytest.mark.slow
@pytest.mark.skipif(bool(missing_namespaces()), reason=missing_namespaces() or "namespaces are here")
def test_hosts_in_network_namespaces_find_the_interface_that_leads_to_each_other(tmp_path: Path) -> None:
    """Two machines with addresses and interfaces of their own behind a bridge; their loopbacks cannot meet."""
    tag = f"vp{os.getpid() % 100_000}"
    hosts = {"far-a": "10.199.77.2", "far-b": "10.199.77.3"}
    server = Server(tmp_path, hosts)
    with behind_a_bridge(server, tag, "10.199.77"):
        process = launch(server, tmp_path, TRAIN, "far-a:0", "far-b:0")
        output, _ = process.communicate(timeout=200)
        assert process.returncode == 0, output
        assert f"far-a: [0] rank 0 0 0 0 10.199.77.2 {tag}f0" in output
        assert f"far-b: [1] rank 1 0 1 0 10.199.77.2 {tag}f1" in output
        assert len(set(re.findall(r"loss (\S+)", output))) == 1


def test_the_command_is_words_and_the_far_side_gets_quoted_ones() -> None:
    node = Node(0, "node-a", (0,), (0,))
    folder = "/data/it's a $(dir)"
    words = command(node, SshLaunch(("node-a:0",), ("-m", "vpipe"), folder, Path("run"), python="/opt/my python"))
    assert words[0] == "ssh"
    assert words[-3:-1] == ["--", "node-a"]
    assert words[-1] == "cd '/data/it'\"'\"'s a $(dir)' && exec '/opt/my python' -m vpipe.launch.remote"


@pytest.mark.parametrize("host", ["-oProxyCommand=id", "a b", "a;id", "a\nb", "", "$(id)", "a'", "host\n"])
def test_a_host_is_a_name(host: str) -> None:
    with pytest.raises(UserError, match="must be a host name"):
        command(Node(0, host, (0,), (0,)), SshLaunch((), (), "/", Path("run")))


def test_an_order_speaks_torchs_words_and_respects_the_users_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    node = Node(1, "b", (1, 3), (0, 1))
    sent = order(
        node, SshLaunch(("a", "b", "a", "b"), ("x.py",), "/w", Path("r"), "py"), "10.0.0.1", 77, Hello("b", 1, "e0")
    )
    assert sent.command == ("py", "x.py")
    assert sent.ranks == {"1": {"RANK": "1", "LOCAL_RANK": "0"}, "3": {"RANK": "3", "LOCAL_RANK": "1"}}
    expected = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1", "MASTER_ADDR": "10.0.0.1"}
    assert expected.items() <= sent.environment.items()
    assert sent.environment["MASTER_PORT"] == "77"
    assert sent.environment["GLOO_SOCKET_IFNAME"] == "ib0"


def test_a_configs_machines_become_a_launch(tmp_path: Path) -> None:
    values = {"model": {"name": "gpt"}, "dataset": {"name": "synthetic"}, "parallel": {"model_parallel_size": 2}}
    here = PipelineConfig.from_dict(values | {"launch": {"machines": ["localhost:0", "localhost:1"]}})
    assert from_config(here, ["c.yaml"], tmp_path) is None
    image = {"kind": "apptainer", "image": "/images/torch.sif"}
    there = PipelineConfig.from_dict(
        values | {"launch": {"machines": ["a:0", "b:1"], "container": image, "threads": 2}}
    )
    launch = from_config(there, ["c.yaml", "--scheduler", "1f1b"], tmp_path)
    assert launch is not None
    assert launch.command == ("-m", "vpipe", "train", "c.yaml", "--scheduler", "1f1b", "--output-dir", str(tmp_path))
    assert (launch.python, launch.threads, launch.machines) == ("python3", 2, ("a:0", "b:1"))
    assert "apptainer exec" in command(nodes(launch.machines)[0], launch)[-1]


def running(mark: str) -> list[int]:
    """Processes of ranks with ``mark`` among their words; launchers do not count."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        words = process.info["cmdline"] or []
        if mark in words and LAUNCHER not in words and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process.pid)
    return found


def until(true: Callable[[], bool], seconds: float = 150) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)
