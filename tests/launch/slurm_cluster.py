"""A real SLURM on this machine, as several nodes: private keys, ports and folders, gone when the tests are done."""

from __future__ import annotations

import getpass
import os
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from programs import find, needs

CONFIG = """
ClusterName=vpipe
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={root}/munge.socket
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_min_interval=100000
ReturnToService=2
SlurmdParameters=config_overrides
KillWait=2
MinJobAge=300
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldPort={control_port}
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool.%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd.%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd.%n.log
GresTypes=gpu
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10
"""


NEEDS_SLURM = needs("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "sinfo", "root")


def _port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Cluster:
    """``num_nodes`` nodes n1, n2, ... at 127.0.0.1, 127.0.0.2, ..., with two cores and two GPUs each that are none."""

    def __init__(self, root: Path, num_nodes: int) -> None:
        self.root, self.num_nodes = root, num_nodes
        self._processes: list[subprocess.Popen[bytes]] = []
        self._nodes: dict[int, subprocess.Popen[bytes]] = {}
        self.environment: Mapping[str, str] = os.environ | {"SLURM_CONF": str(root / "slurm.conf")}

    def start(self) -> None:
        host = socket.gethostname().split(".")[0]
        lines = [
            f"NodeName=n{index} NodeHostname={host} NodeAddr=127.0.0.{index} Port={_port()} "
            "CPUs=2 RealMemory=2000 Gres=gpu:2 State=UNKNOWN"
            for index in range(1, self.num_nodes + 1)
        ]
        text = CONFIG.format(
            host=host, user=getpass.getuser(), root=self.root, control_port=_port(), nodes="\n".join(lines)
        )
        (self.root / "slurm.conf").write_text(text)
        (self.root / "gres.conf").write_text("Name=gpu File=/dev/null,/dev/zero\n")
        (self.root / "state").mkdir()
        key = self.root / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        self.root.chmod(0o755)
        names = ("key-file", "socket", "pid-file", "log-file", "seed-file")
        files = [f"--{name}={self.root}/munge.{name.split('-')[0]}" for name in names]
        self._run(["munged", "-F", "-f", *files])
        self._until(lambda: (self.root / "munge.socket").exists(), "munged")
        self._run(["slurmctld", "-D"])
        for index in range(1, self.num_nodes + 1):
            self._nodes[index] = self._run(["slurmd", "-D", "-N", f"n{index}"])
        self._until(
            lambda: self.call("sinfo", "-hNp", "main", "-o", "%T").split() == ["idle"] * self.num_nodes, "nodes"
        )

    def call(self, *command: str) -> str:
        """What a SLURM command prints; empty where it fails."""
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=200, check=False)
        return done.stdout if done.returncode == 0 else ""

    def stop(self) -> None:
        self.call("scancel", "--user", getpass.getuser())
        for process in reversed(self._processes):
            process.terminate()
        for process in self._processes:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()

    def state(self, job: int) -> str:
        line = self.call("scontrol", "-o", "show", "job", str(job))
        return next((word.split("=")[1] for word in line.split() if word.startswith("JobState=")), "")

    def wait(self, job: int, *states: str, seconds: float = 200) -> str:
        """The first of ``states`` that the job is in."""
        self._until(lambda: self.state(job) in states, f"job {job} to be {' or '.join(states)}", seconds)
        return self.state(job)

    def kill_node(self, index: int) -> None:
        """The slurmd of a node, at once; what it has started lives on."""
        self._nodes[index].kill()
        self._nodes[index].wait()

    def _run(self, command: list[str]) -> subprocess.Popen[bytes]:
        program = find(command[0])
        assert program is not None
        log = (self.root / f"{command[0]}.stdout").open("ab")
        arguments = [program, *command[1:]]
        self._processes.append(subprocess.Popen(arguments, env=self.environment, stdout=log, stderr=log))
        return self._processes[-1]

    def _until(self, true: object, what: str, seconds: float = 30) -> None:
        assert callable(true)
        deadline = time.monotonic() + seconds
        while not true():
            if time.monotonic() > deadline:
                logs = "\n".join(f"{path.name}: {path.read_text()[-2000:]}" for path in self.root.glob("slurm*.log"))
                raise TimeoutError(f"waited {seconds} s for {what}\n{logs}")
            time.sleep(0.1)
