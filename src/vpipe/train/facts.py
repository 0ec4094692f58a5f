"""What a run directory says about its run before the first step: ``run.json``."""

from __future__ import annotations

import socket
import sys
from datetime import UTC, datetime
from typing import Any

import torch

from vpipe import __version__
from vpipe.schedule.text import to_csv
from vpipe.train.session import Session


def run_facts(session: Session) -> dict[str, Any]:
    """Schedule, program, partition and stages, as ``observe`` reads them."""
    pipeline, config = session.pipeline, session.config
    program = pipeline.programs.training()
    with torch.device("meta"):
        modules = session.model.build()
    counts = [sum(p.numel() for p in module.parameters()) for module in modules]
    sizes = [sum(p.numel() * p.element_size() for p in module.parameters()) for module in modules]
    names = [layer.name or type(module).__name__ for layer, module in zip(session.model.layers, modules, strict=True)]
    return {
        "vpipe": __version__,
        "torch": torch.__version__,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "schedule": config.parallel.scheduler,
        "synchronous": pipeline.programs.synchronous,
        "num_ranks": program.num_ranks,
        "num_stages": program.num_stages,
        "num_microbatches": program.num_microbatches,
        "partition": pipeline.partition,
        "program": to_csv(program),
        "versions": str(program.versions),
        "placement": [list(ranks) for ranks in program.placement.ranks_of],
        "model": {"name": config.model.name, "parameters": session.model.num_parameters},
        "stages": [
            {
                "stage": stage,
                "layers": names[begin:end],
                "parameters": sum(counts[begin:end]),
                "weight_bytes": sum(sizes[begin:end]),
            }
            for stage, (begin, end) in enumerate(pipeline.flow.bounds)
        ],
        "hosts": [socket.gethostname()] * program.num_ranks,
        "command": sys.argv,
    }
