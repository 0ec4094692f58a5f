"""What this machine has, what would run, what is missing: answered before a job waits in a queue.

Each check looks at one thing and gives a finding: found, missing (something cannot be done without it) or note (works
differently than one may think), with the command that mends it. No check may take long or fail: what goes wrong inside
one is its finding.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import psutil

from vpipe.launch.hosts import free_port
from vpipe.launch.process import files_for
from vpipe.network import interface_of, interface_towards, is_loopback
from vpipe.process import num_cores

SECONDS = 5
"""How long another program may take to answer."""
TORCH_SECONDS = 30
"""The same for one that imports torch, on a busy machine."""

EXTRAS = {
    "data": ("h5py", "tokenizers"),
    "huggingface": ("transformers",),
    "dashboard": ("starlette", "uvicorn"),
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
    "ray": ("ray",),
}
"""Extra → what it installs."""

CONTAINERS = {
    "apptainer": "see apptainer.org",
    "singularity": "apptainer is its successor",
    "docker": "see docs.docker.com",
    "ch-run": "apt-get install charliecloud",
    "bwrap": "apt-get install bubblewrap",
}


@dataclass(frozen=True)
class Finding:
    """What one check has found."""

    topic: str
    status: Literal["found", "missing", "note"]
    detail: str
    mend: str = ""


def examine() -> list[Finding]:
    """All checks, side by side: several wait for other programs."""
    checks = (
        *(_python, _torch, _accelerators, _cores, _files, _compiler, _memory, _shared_memory, _disk, _network),
        *(_meeting, _ports, _slurm, _ssh, _containers, _extras),
    )
    with ThreadPoolExecutor(len(checks)) as pool:
        return [finding for found in pool.map(_safely, checks) for finding in found]


def _safely(check: Callable[[], Iterator[Finding]]) -> list[Finding]:
    try:
        return list(check())
    except Exception as error:
        name = check.__name__.strip("_").replace("_", " ")
        return [Finding(name, "note", f"could not be examined: {type(error).__name__}: {error}")]


def _python() -> Iterator[Finding]:
    yield Finding("python", "found", f"{platform.python_version()} at {sys.executable}, {platform.platform()}")


def _torch() -> Iterator[Finding]:
    """Read from its files: importing it would take longer than all other checks."""
    try:
        build = version("torch")
    except PackageNotFoundError:
        yield Finding("torch", "missing", "not installed", "pip install -e . installs it")
        return
    spec = find_spec("torch")
    text = Path(spec.origin).with_name("version.py").read_text() if spec and spec.origin else ""
    cuda = next((line.split("=")[1].strip(" '\"") for line in text.splitlines() if line.startswith("cuda")), "None")
    kind = "for CPUs" if cuda == "None" else f"for CUDA {cuda}"
    yield Finding("torch", "found", f"{build}, built {kind}")


OFFERED = "import json; from vpipe.train.proof.device import offered; print(json.dumps(offered()))"


def _accelerators() -> Iterator[Finding]:
    """What torch finds, asked in a process of its own, beside what the vendor's tool lists: they may disagree."""
    told = lines_of([sys.executable, "-P", "-c", OFFERED], TORCH_SECONDS)
    facts = json.loads(told[-1]) if told else {}
    listed = lines_of(["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"])
    seen = f"nvidia-smi lists {len(listed)}: {'; '.join(listed)}"
    if facts:
        detail = f"{facts['devices']}, {facts['memory']} each, backend {facts['backend']}"
        yield Finding("accelerator", "found", f"{detail}; 'vpipe doctor --gpu' tries them")
    elif not told:
        asked = f"torch did not say within {TORCH_SECONDS} s what it finds"
        yield Finding("accelerator", "note", f"{asked}; {seen}" if listed else asked)
    elif listed:
        yield Finding("accelerator", "missing", f"{seen}; this torch finds none", "install a build of torch for CUDA")
    else:
        yield Finding("accelerator", "note", "none found by torch; ranks compute on processor cores and talk by gloo")


def _cores() -> Iterator[Finding]:
    usable = num_cores()
    load = os.getloadavg()[0]
    yield Finding("cores", "found", f"{usable} usable of {os.cpu_count()}, load {load:.1f}; more ranks share them")
    told = os.environ.get("OMP_NUM_THREADS", "")
    ranks = f"{told} in each rank, however many there are (OMP_NUM_THREADS)"
    shared = f"cores / ranks: {usable} in one rank, 1 in each of {usable} and more (launch.threads, OMP_NUM_THREADS)"
    yield Finding("threads", "note" if told not in ("", "1") else "found", ranks if told else shared)
    if load > usable:
        yield Finding("load", "note", f"{load:.1f} processes want {usable} cores: times measured now mean little")


def _files() -> Iterator[Finding]:
    """Launchers of ours raise the soft limit."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    few = most != resource.RLIM_INFINITY and most < files_for(128)
    shown = "as many as wanted" if most == resource.RLIM_INFINITY else str(most)
    mend = "raise it: limits.conf, or docker run --ulimit nofile=65536" if few else ""
    yield Finding("open files", "note" if few else "found", f"{shown} (ulimit -Hn); 128 ranks need 1056", mend)


def _compiler() -> Iterator[Finding]:
    names = (os.environ.get("CXX", "c++"), "g++", "clang++")
    compiler = next((path for name in names if (path := shutil.which(name))), None)
    if compiler is None:
        yield Finding("compiler", "missing", "none for C++: model.compile cannot be used", "apt-get install g++")
    else:
        yield Finding("compiler", "found", f"{compiler}, which model.compile needs")


def _meeting() -> Iterator[Finding]:
    """Where a launcher's variables, or the user's, say that the ranks meet."""
    host = os.environ.get("MASTER_ADDR")
    if host is None:
        return
    interface = interface_towards(host)
    if interface is None:
        yield Finding("MASTER_ADDR", "missing", f"{host} leads nowhere from here", "give the address of rank 0's node")
    else:
        yield Finding("MASTER_ADDR", "found", f"{host}, by {interface}")


def _memory() -> Iterator[Finding]:
    memory = psutil.virtual_memory()
    yield Finding("memory", "found", f"{_gib(memory.available)} available of {_gib(memory.total)}")


def _shared_memory() -> Iterator[Finding]:
    place = Path("/dev/shm")
    if not place.is_dir():
        yield Finding("shared memory", "missing", "no /dev/shm", "use parallel.transport: distributed")
        return
    free = shutil.disk_usage(place).free
    small = free < 2**30
    mend = "docker run --ipc=host or --shm-size=8g" if small else ""
    yield Finding("shared memory", "note" if small else "found", f"{_gib(free)} free in /dev/shm", mend)


def _disk() -> Iterator[Finding]:
    here = Path.cwd()
    free = shutil.disk_usage(here).free
    if not os.access(here, os.W_OK):
        yield Finding("disk", "missing", f"{here} cannot be written", "work elsewhere or set observe.directory")
    elif free < 5 * 2**30:
        yield Finding(
            "disk", "note", f"{_gib(free)} free in {here}: little for checkpoints", "set checkpoint.directory"
        )
    else:
        yield Finding("disk", "found", f"{_gib(free)} free in {here}")


def _network() -> Iterator[Finding]:
    states = psutil.net_if_stats()
    for name, addresses in psutil.net_if_addrs().items():
        shown = [each.address for each in addresses if each.family in (socket.AF_INET, socket.AF_INET6)]
        if shown and states[name].isup:
            yield Finding("interface", "found", f"{name}: {', '.join(shown)}")
    yield _gloo()


def _gloo() -> Finding:
    """gloo takes the interface that the environment names, else the one that this machine's name leads to."""
    chosen = os.environ.get("GLOO_SOCKET_IFNAME")
    if chosen:
        known = all(name in psutil.net_if_addrs() for name in chosen.split(","))
        mend = "" if known else f"interfaces are {', '.join(psutil.net_if_addrs())}"
        return Finding("gloo", "found" if known else "missing", f"GLOO_SOCKET_IFNAME={chosen}", mend)
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        return Finding(
            "gloo", "missing", f"the name {name} of this machine does not resolve", f"add {name} to /etc/hosts"
        )
    where = f"{interface_of(address) or 'no interface'} ({name} is {address})"
    if is_loopback(address):
        several = "fine on one machine; over several, vpipe takes the interface that leads to the first node"
        return Finding("gloo", "note", f"{where}: {several}", "set launch.interface to choose another")
    return Finding("gloo", "found", where)


def _ports() -> Iterator[Finding]:
    port = free_port()
    yield Finding("ports", "found", f"127.0.0.1:{port} can be listened on")
    text = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    yield Finding(
        "ports",
        "found",
        f"ephemeral ports {text[0]} to {text[1]}; SLURM jobs meet at 10000 to 29999, MPI jobs at 30000 to 31999",
    )


def _slurm() -> Iterator[Finding]:
    if not shutil.which("sbatch"):
        yield Finding(
            "slurm", "missing", "no sbatch here", "run vpipe submit on a login node; --dry-run works anywhere"
        )
        return
    lines = lines_of(["sinfo", "--noheader", "--format=%P %D nodes %G %a"])
    if lines:
        yield Finding("slurm", "found", f"{_first(['sbatch', '--version'])}; {'; '.join(lines)}")
    else:
        mend = "is SLURM_CONF set, is slurmctld up? 'sinfo' says more"
        yield Finding("slurm", "missing", "sbatch is here, but the controller does not answer", mend)
    if "SLURM_JOB_ID" in os.environ:
        yield Finding("slurm", "found", f"inside job {os.environ['SLURM_JOB_ID']}")


def _ssh() -> Iterator[Finding]:
    if not shutil.which("ssh"):
        yield Finding("ssh", "missing", "no ssh: launch.machines cannot be used", "apt-get install openssh-client")
        return
    home = Path.home() / ".ssh"
    keys = sorted(path.name for path in home.glob("id_*") if path.suffix != ".pub") if home.is_dir() else []
    held = lines_of(["ssh-add", "-l"]) if os.environ.get("SSH_AUTH_SOCK") else []
    if keys or held:
        agent = f"an agent with {len(held)}" if held else "no agent with any"
        yield Finding("ssh", "found", f"keys: {', '.join(keys) or 'none in ~/.ssh'}; {agent}")
    else:
        why = "no keys in ~/.ssh and no agent with any: a machine of launch.machines would ask for a password, unless "
        mend = "ssh-keygen -t ed25519, then ssh-copy-id to each machine; 'ssh -o BatchMode=yes HOST true' tells"
        yield Finding("ssh", "note", why + "~/.ssh/config or the site knows another way", mend)


def _containers() -> Iterator[Finding]:
    found = {name: path for name in CONTAINERS if (path := shutil.which(name))}
    for name in found:
        said = f"{name}: {_first([name, '--version'])}"
        if name == "docker" and not lines_of(["docker", "version", "--format", "{{.Server.Version}}"]):
            mend = "start it (systemctl start docker) or join the group docker; 'docker info' says more"
            yield Finding("container", "missing", f"{said}, but its daemon does not answer: no container starts", mend)
        else:
            yield Finding("container", "found", said)
    if not found:
        yield Finding("container", "note", "none; launch.container.kind: none works", CONTAINERS["ch-run"])


def _extras() -> Iterator[Finding]:
    for extra, modules in EXTRAS.items():
        absent = [module for module in modules if find_spec(module) is None]
        if absent:
            yield Finding("extra", "missing", f"{extra}: no {', '.join(absent)}", f"pip install 'vpipe[{extra}]'")
        else:
            yield Finding("extra", "found", f"{extra}: {', '.join(modules)}")


def lines_of(command: list[str], seconds: float | None = None) -> list[str]:
    """What a program prints, if it prints it soon."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds or SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    text = (done.stdout or done.stderr) if done.returncode == 0 else ""
    return [line.strip() for line in text.splitlines() if line.strip()]


def _first(command: list[str]) -> str:
    return next(iter(lines_of(command)), "no version told")


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
