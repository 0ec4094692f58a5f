"""What every rank of ``vpipe train`` runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from vpipe.config import PipelineConfig
from vpipe.observe.console import Console
from vpipe.runtime import assembly
from vpipe.runtime.pipeline import Pipeline
from vpipe.train import rundir
from vpipe.train.gathering import gather_text
from vpipe.train.session import open_session
from vpipe.train.trainer import Trainer


def train(
    config: dict[str, Any], directory: str | None = None, resume: str | None = None, output_dir: str | None = None
) -> int:
    """Train as one of the ranks that a launcher started, or alone; the exit code."""
    checked = PipelineConfig.from_dict(config)
    if checked.launch.threads:
        torch.set_num_threads(checked.launch.threads)
    in_process = not assembly.under_launcher()
    rank = 0
    if not in_process:
        assembly.join(checked.parallel.timeout)
        rank = dist.get_rank()
    session = open_session(checked)
    where = Path(directory) if directory else _agree_on_directory(session.pipeline, checked, output_dir, rank)
    observe = checked.observe
    console = Console(line_format=observe.line_format, log_interval=observe.log_interval) if rank == 0 else None
    trainer = Trainer(session, where, console)
    if resume is not None:
        trainer.resume(Path(resume))
    trainer.run()
    return 0


def _agree_on_directory(pipeline: Pipeline, config: PipelineConfig, output_dir: str | None, rank: int) -> Path:
    """Rank 0 makes the run directory and tells the others its name."""
    mine = str(rundir.create(config, Path(output_dir) if output_dir else None)) if rank == 0 else ""
    return Path(gather_text(pipeline, mine)[0])
