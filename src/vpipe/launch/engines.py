"""From a config and the options of ``vpipe submit`` to Ray or Kubernetes; what an engine has no use for is refused."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vpipe.config import PipelineConfig, load
from vpipe.errors import UserError
from vpipe.launch import kubernetes, ray_cluster
from vpipe.launch.container import PYTHON
from vpipe.launch.job import Load

Show = Callable[[str], None]

KNOWN = {
    "ray": {"address", "gpus_per_task", "spread", "cpus_per_task", "python"},
    "kubernetes": {"image", "volume", "gpus_per_task", "cpus_per_task", "memory", "name"},
}
"""Engine → the options that it understands."""


def submit(
    to: str,
    path: str,
    overrides: Sequence[str],
    scheduler: str | None,
    dry_run: bool,
    options: Mapping[str, Any],
    show: Show,
    load: Load = load,
) -> int:
    """Hand the config to the engine, or with ``dry_run`` show what would be handed in; the exit code."""
    given = {name: value for name, value in options.items() if value is not None}
    for name in given.keys() - KNOWN[to]:
        understood = ", ".join(f"--{each.replace('_', '-')}" for each in sorted(KNOWN[to]))
        raise UserError(f"--{name.replace('_', '-')} says nothing to {to.capitalize()}, which understands {understood}")
    loaded = load(path, overrides, scheduler)
    if loaded.config.launch.elastic is not None:
        raise UserError(
            f"launch.elastic is {loaded.config.launch.elastic}, but ranks that {to.capitalize()} starts cannot come "
            "and go; remove it, or submit to SLURM"
        )
    for warning in loaded.warnings:
        show(f"vpipe: warning: {warning}")
    if to == "kubernetes":
        return _to_kubernetes(loaded.config, path, given, dry_run, show)
    return _to_ray(loaded.config, path, overrides, scheduler, given, dry_run, show)


def _to_kubernetes(config: PipelineConfig, path: str, given: Mapping[str, Any], dry_run: bool, show: Show) -> int:
    image = given.get("image") or config.launch.container.image
    if image is None:
        raise UserError("Kubernetes runs images; give --image, or launch.container.image in the config")
    if not dry_run:
        raise UserError(
            "vpipe does not talk to Kubernetes itself; "
            "pipe the manifest: vpipe submit … --to kubernetes --dry-run | kubectl apply -f -"
        )
    asked = kubernetes.KubernetesJob(
        name=given.get("name") or kubernetes.name_of(f"vpipe-{Path(path).stem}"),
        image=image,
        config=config.to_yaml(),
        num_ranks=config.num_ranks,
        run_directory=config.observe.directory,
        gpus=given.get("gpus_per_task", 0),
        cpus=given.get("cpus_per_task", config.launch.slurm.cpus_per_task),
        memory=given.get("memory", config.launch.slurm.memory),
        volume=given.get("volume"),
    )
    show(kubernetes.manifest(asked).rstrip("\n"))
    return 0


def _to_ray(
    config: PipelineConfig,
    path: str,
    overrides: Sequence[str],
    scheduler: str | None,
    given: Mapping[str, Any],
    dry_run: bool,
    show: Show,
) -> int:
    python = given.get("python", sys.executable if config.launch.container.kind == "none" else PYTHON)
    words = [word for override in overrides for word in ("--set", override)]
    chosen = ("--scheduler", scheduler) if scheduler else ()
    job = ray_cluster.RayJob(
        command=(python, "-m", "vpipe", "train", str(Path(path).resolve()), *words, *chosen),
        num_ranks=config.num_ranks,
        directory=str(Path.cwd()),
        address=given.get("address", "auto"),
        cpus_per_task=given.get("cpus_per_task", config.launch.slurm.cpus_per_task or 1),
        gpus_per_task=given.get("gpus_per_task", 0),
        spread=bool(given.get("spread")),
        interface=config.launch.interface,
        threads=config.launch.threads,
    )
    if config.launch.container.kind != "none":
        raise UserError(
            "launch.container does not work with --to ray; start Ray's machines from the image, and set it to none"
        )
    if dry_run:
        show(f"{job.num_ranks} actors with {job.cpus_per_task} CPUs and {job.gpus_per_task} GPUs each run")
        show(" ".join(job.command))
        return 0
    return ray_cluster.run(job, show)
