"""From a config and the options of ``vpipe submit`` to Ray or Kubernetes; what an engine has no use for is refused."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vpipe.config import PipelineConfig, load
from vpipe.errors import UserError, nearest
from vpipe.launch import kubernetes, ray_cluster
from vpipe.launch.container import PYTHON
from vpipe.launch.job import Load
from vpipe.launch.ssh import SshLaunch
from vpipe.process import AS_MODULE

Show = Callable[[str], None]

KNOWN = {
    "slurm": ("ntasks_per_node", "requeue", "name", "array", "python", "cancel_on_interrupt"),
    "ray": ("address", "gpus_per_task", "spread", "cpus_per_task", "python"),
    "kubernetes": ("image", "volume", "gpus_per_task", "cpus_per_task", "memory", "name"),
}
"""Engine → what it may be asked for; SLURM also for any option of sbatch."""
_COUNTS, _FLAGS = ("cpus_per_task", "gpus_per_task", "ntasks_per_node"), {"true": True, "false": False}
_TRUE_OR_FALSE = ("spread", "requeue", "cancel_on_interrupt")


def asked_for(to: str, words: Sequence[str]) -> dict[str, Any]:
    """``NAME=VALUE`` of ``vpipe submit --with``, as values."""
    found: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        name = name.strip().replace("-", "_")
        if equals and to == "slurm" and name not in KNOWN[to]:
            found.setdefault("options", {})[name.replace("_", "-")] = value
            continue
        if not equals or name not in KNOWN[to]:
            hint = nearest(name, KNOWN[to]) if equals else "; it is NAME=VALUE"
            raise UserError(f"--with {word} says nothing to {to}, which understands {', '.join(KNOWN[to])}{hint}")
        if name in _COUNTS and not (value.isascii() and value.isdigit()):
            raise UserError(f"--with {name} is {value[:40]!r}, but it is a whole number")
        if name in _TRUE_OR_FALSE and value not in _FLAGS:
            raise UserError(f"--with {name} is {value[:40]!r}, but it is true or false")
        found[name] = int(value) if name in _COUNTS else _FLAGS.get(value, value)
    return found


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
    for name in given.keys() - set(KNOWN[to]):
        raise UserError(f"--{name.replace('_', '-')} says nothing to {to.capitalize()}; leave it out")
    loaded = load(path, overrides, scheduler)
    if loaded.config.launch.elastic is not None:
        raise UserError(
            f"launch.elastic is {loaded.config.launch.elastic}, but ranks that {to.capitalize()} starts cannot come "
            "and go; remove it, or submit to SLURM"
        )
    lost = "every restart begins anew, its checkpoints go with the pods; --with volume=CLAIM keeps them"
    for warning in (*loaded.warnings, *([lost] if to == "kubernetes" and "volume" not in given else ())):
        show(f"{'# ' if to == 'kubernetes' else ''}vpipe: warning: {warning}")  # a remark where it is read as YAML
    if to == "kubernetes":
        return _to_kubernetes(loaded.config, path, given, dry_run, show)
    return _to_ray(loaded.config, path, overrides, scheduler, given, dry_run, show)


def _to_kubernetes(config: PipelineConfig, path: str, given: Mapping[str, Any], dry_run: bool, show: Show) -> int:
    image = given.get("image") or config.launch.container.image
    if image is None:
        raise UserError("Kubernetes runs images; give --with image=NAME, or launch.container.image in the config")
    if not dry_run:
        raise UserError(
            "vpipe does not talk to Kubernetes itself; "
            "pipe the manifest: vpipe submit … --to kubernetes --dry-run | kubectl apply -f -"
        )
    for plugin in config.plugins:
        if plugin.endswith(".py"):
            raise UserError(
                f"plugins: {plugin} is a file of this machine, which no pod has; install it in the image as a module "
                "and name that: plugins: [package.module]"
            )
    name = given.get("name") or kubernetes.name_of(f"vpipe-{Path(path).stem}")
    show(kubernetes.manifest(config, image, name, given).rstrip("\n"))
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
        command=(AS_MODULE, "vpipe", "train", str(Path(path).resolve()), *words, *chosen),
        num_ranks=config.num_ranks,
        launch=SshLaunch(
            (),
            str(Path.cwd()),
            Path.cwd(),
            python,
            interface=config.launch.interface,
            threads=config.launch.threads,
            through="ray",
        ),
        address=given.get("address", "auto"),
        cpus_per_task=given.get("cpus_per_task", 1),
        gpus_per_task=given.get("gpus_per_task", 0),
        spread=bool(given.get("spread")),
        grace=config.launch.grace,
    )
    if config.launch.container.kind != "none":
        raise UserError(
            "launch.container does not work with --to ray; start Ray's machines from the image, and set it to none"
        )
    if dry_run:
        show(f"{job.num_ranks} actors with {job.cpus_per_task} CPUs and {job.gpus_per_task} GPUs each run")
        show(" ".join((python, *job.command)))
        return 0
    return ray_cluster.run(job, show)
