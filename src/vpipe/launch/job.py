"""From a config and options to a job: what the config asks, what the command line overrides, what must agree.

Every run of a sweep is loaded here, so that a wrong value is found before the job waits in a queue.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vpipe.config import Loaded, PipelineConfig, load
from vpipe.errors import UserError
from vpipe.launch.container import PYTHON, Container
from vpipe.launch.slurm import SlurmJob, limit_warning, sweep

Load = Callable[[str, Sequence[str], str | None], Loaded]
"""Reads a config with overrides and a schedule, and raises where it is wrong."""


def plan_job(
    path: str,
    axes: Sequence[str],
    overrides: Sequence[str],
    scheduler: str | None,
    options: Mapping[str, Any],
    load: Load = load,
) -> tuple[SlurmJob, tuple[str, ...]]:
    """The job, and what to tell the user about its config. ``options`` are those of ``vpipe submit``; None is not
    given. ``load`` reads and checks the config."""
    loaded = load(path, overrides, scheduler)
    points = sweep(axes)
    for point in points:
        other = load(path, [*overrides, *point], scheduler).config
        if other.num_ranks != loaded.config.num_ranks:
            raise UserError(
                f"the sweep's run {' '.join(point)} has {other.num_ranks} ranks, the config {loaded.config.num_ranks}; "
                "the runs of one job array have equally many, so submit them one by one"
            )
    given = {name: value for name, value in options.items() if value is not None}
    launch = loaded.config.launch
    slurm = launch.slurm.model_dump() | given
    least_nodes, num_nodes = node_range(slurm["nodes"])
    tasks_per_node = _places(loaded.config, least_nodes, num_nodes, slurm["ntasks_per_node"])
    asked = {name: str(value) for name, value in (launch.slurm.options | given.get("options", {})).items()}
    container = Container.from_config(launch.container, gpus="gpu" in asked.get("gres", ""))
    words = [word for override in overrides for word in ("--set", override)]
    job = SlurmJob(
        config=path,
        num_nodes=num_nodes,
        tasks_per_node=tasks_per_node,
        name=given.get("name", job_name(path)),
        python=given.get("python", sys.executable if container.kind == "none" or launch.elastic else PYTHON),
        arguments=(*words, *(["--scheduler", scheduler] if scheduler else [])),
        run_directory=loaded.config.observe.directory,
        checkpoint_directory=loaded.config.checkpoint.directory,
        container=container,
        options=asked,
        requeue=slurm["requeue"],
        interface=launch.interface,
        port=launch.master_port,
        points=points,
        elastic=launch.elastic is not None,
        least_nodes=least_nodes if least_nodes != num_nodes else None,
        array=given.get("array"),
    )
    if points and job.array is not None:
        _check_array(job.array, len(points))
    late = limit_warning(job)
    return job, (*loaded.warnings, *([late] if late else []))


def _places(config: PipelineConfig, least_nodes: int, num_nodes: int, tasks_per_node: int | None) -> int:
    """Ranks per node; of an elastic run places, so that the most have one on all nodes, and the fewest on the fewest
    nodes."""
    if config.launch.elastic is not None:
        least, most = map(int, config.launch.elastic.split(":"))
        places = tasks_per_node or -(-most // num_nodes)
        for count, ranks, name in ((num_nodes, most, "MAX"), (least_nodes, least, "MIN")):
            if count * places < ranks:
                raise UserError(
                    f"{count} nodes x {places} places are {count * places}, but launch.elastic is "
                    f"{config.launch.elastic}; give more nodes (--nodes), more places (--with ntasks_per_node), or "
                    f"lower {name}"
                )
        return places
    if least_nodes != num_nodes:
        raise UserError(
            f"--nodes {least_nodes}-{num_nodes} lets SLURM choose, but this run has {config.num_ranks} ranks; give one "
            "number, or launch.elastic: MIN:MAX"
        )
    return shape(config, num_nodes, tasks_per_node)


def _check_array(array: str, num_points: int) -> None:
    """``--with array`` chooses among the runs of the sweep."""
    wanted = 0
    for first, last, stride in re.findall(r"(\d+)(?:-(\d+))?(?::(\d+))?", array.partition("%")[0]):
        wanted = max(wanted, max(range(int(first), int(last or first) + 1, int(stride or 1)), default=0))
    if wanted >= num_points:
        raise UserError(
            f"--with array={array} asks for run {wanted}, but the sweep has {num_points}, 0 to {num_points - 1}; "
            "give fewer, or leave it away to run all"
        )


def shape(config: PipelineConfig, num_nodes: int, tasks_per_node: int | None) -> int:
    """Ranks per node, which must make the ranks of the pipeline."""
    ranks = config.num_ranks
    if tasks_per_node is None:
        if ranks % num_nodes:
            raise UserError(
                f"{ranks} ranks cannot be spread evenly over {num_nodes} nodes; give --nodes a divisor of {ranks}, or "
                "change parallel.model_parallel_size"
            )
        return ranks // num_nodes
    if num_nodes * tasks_per_node != ranks:
        raise UserError(
            f"--nodes {num_nodes} x ntasks_per_node {tasks_per_node} are {num_nodes * tasks_per_node} ranks, but the "
            f"config has {ranks} (parallel.model_parallel_size x data_parallel_size); change one of them"
        )
    return tasks_per_node


def node_range(nodes: int | str) -> tuple[int, int]:
    """``3`` or ``2-4``: the fewest and the most nodes."""
    least, dash, most = str(nodes).partition("-")
    found = (int(least), int(most) if dash else int(least)) if re.fullmatch(r"[0-9]+(-[0-9]+)?", str(nodes)) else (0, 0)
    if not 1 <= found[0] <= found[1]:
        raise UserError(f"--nodes {nodes} is neither a number of nodes nor MIN-MAX, such as 2 or 2-4")
    return found


def job_name(path: str) -> str:
    """The config's name, with what SLURM would not take left out."""
    name = re.sub(r"[^A-Za-z0-9_.-]", "", Path(path).stem).lstrip("_.-")
    return f"vpipe-{name[:100]}" if name else "vpipe"
