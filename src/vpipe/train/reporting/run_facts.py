"""What a run directory says about its run before the first step: ``run.json``."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import torch

from vpipe import __version__
from vpipe.rundir.claim import command
from vpipe.schedule.text import to_csv
from vpipe.train.session import Session


def run_facts(session: Session, num_microbatches: int) -> dict[str, Any]:
    """Schedule, program, partition and stages, as ``observe`` reads them."""
    pipeline, config, skeleton = session.pipeline, session.config, session.skeleton
    program = pipeline.programs.training(num_microbatches=num_microbatches)
    return {
        "vpipe": __version__,
        "torch": torch.__version__,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "schedule": config.parallel.scheduler,
        "synchronous": pipeline.programs.synchronous,
        "num_ranks": program.num_ranks,
        "num_stages": program.num_stages,
        "num_microbatches": program.num_microbatches,
        "microbatches_per_iteration": config.training.num_microbatches,
        "partition": pipeline.partition,
        "program": to_csv(program),
        "versions": str(program.versions),
        "placement": [list(ranks) for ranks in program.placement.ranks_of],
        "skips": sorted(list(skip) for skip in program.skips),
        "model": {"name": config.model.name, "parameters": session.model.num_parameters},
        "stages": [
            {
                "stage": stage,
                "layers": skeleton.layer_names[begin:end],
                "parameters": sum(skeleton.parameters[begin:end]),
                "weight_bytes": sum(skeleton.weight_bytes[begin:end]),
            }
            for stage, (begin, end) in enumerate(pipeline.flow.bounds)
        ],
        "hosts": [seat.host for seat in pipeline.layout.seats],
        "layout": pipeline.layout.as_document(),
        "command": command(),
        "trace": config.observe.trace,
    }
