"""The files that VPipe kept in the directory of a run on one machine."""

from __future__ import annotations

import re
import shlex
import shutil
from contextlib import suppress
from pathlib import Path

from vpipe.config import PipelineConfig
from vpipe.rundir.claim import command
from vpipe.rundir.layout import LOGS, OF_A_RUN


def keep(directory: Path, config: PipelineConfig, source: Path | None, in_processes: bool) -> None:
    """Write ``command_history.log``, ``machinefile``, ``output.log.<node>`` and the config as it was given.

    ``output.log.<node>`` is the log of the first rank of a machine, where ranks are processes and have one.
    """
    with (directory / "command_history.log").open("a", encoding="utf-8") as history:
        history.write(f"{shlex.join(command())}\n")
    machines = config.launch.machines or tuple(f"localhost:{rank}" for rank in range(config.num_ranks))
    (directory / "machinefile").write_text("".join(f"{machine}\n" for machine in machines), encoding="utf-8")
    if source is not None and source.is_file():
        shutil.copyfile(source, directory / (f"given-{source.name}" if source.name in OF_A_RUN else source.name))
    hosts = [re.sub(r":\d+$", "", machine) for machine in machines] if in_processes else []
    for node, host in enumerate(dict.fromkeys(hosts)):
        with suppress(FileExistsError):
            (directory / f"output.log.{node}").symlink_to(Path(LOGS) / f"rank{hosts.index(host)}.log")
