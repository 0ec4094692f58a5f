"""VPipe's ``machines``: one ssh per node, one rank per entry, everything ends together.

    this machine ── ssh node0 ──▶ vpipe.launch.node ──▶ rank 0, rank 2
                 └─ ssh node1 ──▶ vpipe.launch.node ──▶ rank 1

The ssh command is a list of words that starts a fixed program on the far side; what that program runs is sent through
the connection. Each node says hello with the address by which it was reached, so ranks meet at an address that works.
"""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from vpipe.config import PipelineConfig
from vpipe.launch import command_words as valid
from vpipe.launch.container import NONE, PYTHON, Container, wrap
from vpipe.launch.environment import carried
from vpipe.launch.hosts import Node
from vpipe.process import AS_MODULE

OPTIONS = {"BatchMode": "yes", "ConnectTimeout": "10", "ServerAliveInterval": "5", "ServerAliveCountMax": "3"}
"""No password prompts that nobody sees; a host that is gone is noticed."""


@dataclass(frozen=True)
class SshLaunch:
    """On which machines, and how a node is started there."""

    machines: tuple[str, ...]
    directory: str
    """Working directory, the same on every node."""
    run_directory: Path
    python: str = sys.executable
    container: Container = NONE
    interface: str | None = None
    port: int = 0
    threads: int = 0
    through: str = "ssh"
    """``ssh`` or ``srun``."""

    def __post_init__(self) -> None:
        valid.path(self.directory, "the working directory")
        valid.path(self.python, "the Python program")
        if self.interface is not None:
            valid.option(self.interface, "launch.interface")


def from_config(config: PipelineConfig, run_directory: Path) -> SshLaunch:
    """The launch of a config whose ``machines`` are not all this one."""
    section = config.launch
    container = Container.from_config(section.container, gpus=config.parallel.backend == "nccl")
    return SshLaunch(
        machines=section.machines,
        directory=str(Path.cwd()),
        run_directory=run_directory,
        python=sys.executable if container.kind == "none" else PYTHON,
        container=container,
        interface=section.interface,
        port=section.master_port,
        threads=section.threads,
        through=section.through,
    )


def command(node: Node, launch: SshLaunch) -> list[str]:
    """The ssh command of one node. The far side's shell reads one string, so every word of it is quoted."""
    remote = wrap(
        launch.container, [launch.python, AS_MODULE, "vpipe.launch.node"], launch.directory, carried(os.environ)
    )
    line = f"cd {shlex.quote(launch.directory)} && exec {shlex.join(remote)}"
    options = [word for name, value in OPTIONS.items() for word in ("-o", f"{name}={value}")]
    config = os.environ.get("VPIPE_SSH_CONFIG")
    file = ["-F", valid.path(config, "VPIPE_SSH_CONFIG")] if config else []
    return ["ssh", *file, *options, "-T", "--", valid.destination(node.host), line]
