"""``machines`` by a real sshd: several host names on loopback, and hosts in network namespaces."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import psutil
import pytest
from ssh_server import NEEDS_HOSTS, NEEDS_SSHD, Server, behind_a_bridge

import forked_python
from vpipe.config import PipelineConfig
from vpipe.errors import UserError
from vpipe.launch.host_link import HostLink
from vpipe.launch.hosts import Node, nodes
from vpipe.launch.ssh import SshLaunch, command, from_config
from vpipe.rundir.journal import EndingKind, read_ending

pytestmark = pytest.mark.timeout(120)

LAUNCHER = """
import sys
from pathlib import Path
from vpipe.launch.machines import run
from vpipe.launch.ssh import SshLaunch
*machines, script, folder = sys.argv[1:]
sys.exit(run(SshLaunch(tuple(machines), folder, Path(folder) / "run"), [script], len(machines)))
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


@NEEDS_SSHD
@pytest.mark.slow
def test_ranks_on_two_hosts_train_together(server: Server, tmp_path: Path) -> None:
    """node-a is node 0 with ranks 0 and 2, node-b is node 1 with rank 1."""
    process = launch(server, tmp_path, TRAIN, "node-a:0", "node-b:3", "node-a:1", HF_TOKEN="secret-word")
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output
    lines = output.splitlines()
    assert "rank 0 0 0 0,1 127.0.0.2 lo" in lines
    assert "[rank 1] rank 1 0 1 3 127.0.0.2 lo" in lines
    assert "[rank 2] rank 2 1 0 0,1 127.0.0.2 lo" in lines
    assert len(set(re.findall(r"loss (\S+)", output))) == 1
    assert "secret-word" not in output


@NEEDS_SSHD
@pytest.mark.slow
def test_a_config_with_machines_trains_by_ssh_and_its_summary_is_alone_on_standard_output(
    server: Server, tmp_path: Path
) -> None:
    """Two hosts with a rank each."""
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
    run = tmp_path / "run"
    assert (run / "machinefile").read_text() == "node-a:0\nnode-b:0\n"
    assert "--json" in (run / "command_history.log").read_text()
    assert [(run / f"output.log.{node}").resolve().name for node in (0, 1)] == ["rank0.log", "rank1.log"]


@NEEDS_SSHD
def test_a_failing_rank_ends_all_nodes(server: Server, tmp_path: Path) -> None:
    process = launch(server, tmp_path, FAIL, "node-a:0", "node-b:0", "node-a:1")
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 1
    assert "[rank 1] rank 1 has had enough" in output
    assert "rank 1 failed: it ended with exit code 1" in output
    assert "rank 2: ended because rank 1 failed" in output
    assert not running(str(tmp_path / "script.py"))


@NEEDS_SSHD
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
    output, _ = process.communicate(timeout=200)
    assert process.returncode != 0
    if how == "kill ssh":
        lost = re.search(r"rank (\d) is lost with (node-.)\nrank \d: ended because rank \1 failed", output)
        assert lost is not None, output
        assert f"{lost[2]} is lost: ssh ended by SIGKILL" in output
        assert process.returncode == 69
    until(lambda: not running(mark) and not running(str(tmp_path / "script.py")))


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


@NEEDS_SSHD
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_ranks_elsewhere_get_the_same_signal_and_the_same_grace(server: Server, tmp_path: Path, number: int) -> None:
    """They were given TERM and five seconds, or, where the launcher was told TERM, nobody waited for them at all."""
    process = launch(server, tmp_path, PATIENT.replace("FOLDER", str(tmp_path)), "node-a:0", "node-b:0")
    assert process.stdout is not None
    said = list(islice(process.stdout, 2))
    assert sorted(said) == ["[rank 1] up\n", "up\n"], said
    process.send_signal(number)
    said = list(islice(process.stdout, 3))
    assert sum("stopping 2 ranks, at most 60 s" in line for line in said) == 1, said
    assert sum(f"asked {int(number)}" in line for line in said) == 2, said
    (tmp_path / "go").touch()
    process.communicate(timeout=200)
    assert process.returncode == 75


@NEEDS_SSHD
def test_no_secret_is_in_any_list_of_processes(server: Server, tmp_path: Path) -> None:
    mark = str(700_777 + os.getpid())
    process = launch(server, tmp_path, SLEEP.format(mark=mark), "node-a:0", "node-b:0", WANDB_API_KEY="secret-word")
    until(lambda: len(running(mark)) == 2)
    assert not running("secret-word")
    environments = [psutil.Process(pid).environ().get("WANDB_API_KEY") for pid in running(mark)]
    assert environments == ["secret-word"] * 2
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=200)


@NEEDS_SSHD
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


@NEEDS_SSHD
def test_a_failed_start_is_told_by_the_run_directory(server: Server, tmp_path: Path) -> None:
    """Its state was "gone without a word"."""
    path = Path(__file__).parents[2] / "configs" / "gpt_small_cpu.yaml"
    settings = ["launch.machines=[nowhere.invalid:0, node-b:0]", "parallel.model_parallel_size=2"]
    words = [str(path), *(word for each in settings for word in ("--set", each)), "--output-dir", str(tmp_path / "run")]
    done = subprocess.run(
        [forked_python.program(), "-m", "vpipe", "train", *words],
        env=os.environ | {"VPIPE_SSH_CONFIG": str(server.config)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 2
    assert "nowhere.invalid could not be started by ssh" in done.stderr
    ending = read_ending(tmp_path / "run")
    assert ending is not None
    assert ending.kind is EndingKind.FAILED
    assert "nowhere.invalid could not be started by ssh" in ending.sentence


@pytest.mark.parametrize(
    ("printed", "ends", "expected"),
    [
        ('printf \'conda> \'; echo \'{"vpipe": ["hello", "10.0.0.1", 6, 7, "e0"]}\'', False, "10.0.0.1"),
        ("printf 'Password: '; sleep 60", False, "no answer within 60 s; Password:;"),
        ("echo 'no such file'; printf 'really'", True, "started by ssh: really;"),
    ],
)
def test_a_half_line_of_a_far_shell_hides_no_hello_and_no_question(printed: str, ends: bool, expected: str) -> None:
    """After 62 s there was advice about passwords."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(["sh", "-c", f"{printed}"], stdin=pipe, stdout=pipe, process_group=0)
    assert process.stdout is not None
    os.set_blocking(process.stdout.fileno(), False)
    link = HostLink(Node(0, "node-a", (0,), (0,)), process)
    try:
        if expected == "10.0.0.1":
            link.greet(time.monotonic() + 60, "ssh")
            assert link.address == expected
        else:
            with pytest.raises(UserError, match=re.escape(expected)):
                link.greet(time.monotonic() + (60 if ends else 0.5), "ssh")
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@NEEDS_SSHD
@pytest.mark.slow
@NEEDS_HOSTS
def test_hosts_in_network_namespaces_find_the_interface_that_leads_to_each_other(tmp_path: Path) -> None:
    """Two machines with addresses and interfaces of their own behind a bridge; their loopbacks cannot meet."""
    tag = f"vp{os.getpid() % 100_000}"
    hosts = {"far-a": "10.199.77.2", "far-b": "10.199.77.3"}
    server = Server(tmp_path, hosts)
    with behind_a_bridge(server, tag, "10.199.77"):
        process = launch(server, tmp_path, TRAIN, "far-a:0", "far-b:0")
        output, _ = process.communicate(timeout=200)
        assert process.returncode == 0, output
        assert f"rank 0 0 0 0 10.199.77.2 {tag}f0" in output.splitlines()
        assert f"[rank 1] rank 1 0 1 0 10.199.77.2 {tag}f1" in output
        assert len(set(re.findall(r"loss (\S+)", output))) == 1


def test_the_command_is_words_and_the_far_side_gets_quoted_ones() -> None:
    node = Node(0, "node-a", (0,), (0,))
    folder = "/data/it's a $(dir)"
    words = command(node, SshLaunch(("node-a:0",), folder, Path("run"), python="/opt/my python"))
    assert words[0] == "ssh"
    assert words[-3:-1] == ["--", "node-a"]
    assert words[-1] == "cd '/data/it'\"'\"'s a $(dir)' && exec '/opt/my python' -Pm vpipe.launch.node"


@pytest.mark.parametrize("host", ["-oProxyCommand=id", "a b", "a;id", "a\nb", "", "$(id)", "a'", "host\n"])
def test_a_host_is_a_name(host: str) -> None:
    with pytest.raises(UserError, match="must be a host name"):
        command(Node(0, host, (0,), (0,)), SshLaunch((), "/", Path("run")))


@pytest.mark.parametrize(
    ("machine", "host", "gpu"),
    [
        ("node1", "node1", 0),
        ("me@node1:2", "me@node1", 2),
        ("[fd00::1]:3", "fd00::1", 3),
        ("me@[fd00::1]", "me@fd00::1", 0),
    ],
)
def test_users_and_ipv6_addresses_are_machines(machine: str, host: str, gpu: int) -> None:
    (node,) = nodes([machine])
    assert (node.host, node.gpus) == (host, (gpu,))
    assert command(node, SshLaunch((machine,), "/", Path("run")))[-2] == host


@pytest.mark.parametrize("machine", ["fd00::1", "a:b", "me@@x:0", "[x]:0", "-l@x:0", "a:0:1", "[a", "me@:0"])
def test_what_is_no_machine_is_refused(machine: str) -> None:
    with pytest.raises(UserError, match=r"launch\.machines\[0\]"):
        nodes([machine])


def test_a_configs_machines_become_a_launch(tmp_path: Path) -> None:
    values = {"model": {"name": "gpt"}, "dataset": {"name": "synthetic"}, "parallel": {"model_parallel_size": 2}}
    image = {"kind": "apptainer", "image": "/images/torch.sif"}
    there = PipelineConfig.from_dict(
        values | {"launch": {"machines": ["a:0", "b:1"], "container": image, "threads": 2}}
    )
    launch = from_config(there, tmp_path)
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
