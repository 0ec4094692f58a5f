"""What VPipe kept of a run on one machine, under VPipe's names: for habits and scripts that look for them."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from vpipe.config import PipelineConfig
from vpipe.launch.hosts import machinefile
from vpipe.rundir.layout import LOGS, OF_A_RUN


def keep(
    directory: Path, config: PipelineConfig, command: Sequence[str], source: Path | None, in_processes: bool
) -> None:
    """``command_history.log``, ``machinefile``, ``output.log.0`` and the file as it was given.

    ``output.log.0`` is the log of rank 0, where ranks are processes and have one."""
    with (directory / "command_history.log").open("a", encoding="utf-8") as history:
        history.write(f"{shlex.join(command)}\n")
    machines = config.launch.machines or tuple(f"localhost:{rank}" for rank in range(config.num_ranks))
    (directory / "machinefile").write_text(machinefile(machines), encoding="utf-8")
    if source is not None and source.is_file():
        shutil.copyfile(source, directory / (f"given-{source.name}" if source.name in OF_A_RUN else source.name))
    if in_processes:
        with suppress(FileExistsError):
            (directory / "output.log.0").symlink_to(Path(LOGS) / "rank0.log")
