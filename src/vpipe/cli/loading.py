"""Loading the config of a command that builds a model: everything that is wrong with it is said at once, before a rank
starts or a job waits in a queue. And as which rank the command was started, where it was as one of several."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vpipe import config as configs
from vpipe import process
from vpipe.config import Loaded, PipelineConfig, Problem
from vpipe.errors import UserError
from vpipe.registry import DATASET_REGISTRY, MODEL_REGISTRY, OPTIMIZER_REGISTRY, SCHEDULE_REGISTRY

if TYPE_CHECKING:
    from vpipe.train.session import Materials

KNOWN: dict[str, Callable[[], Collection[str]]] = {
    "parallel.scheduler": SCHEDULE_REGISTRY.names,
    "training.optimizer": OPTIMIZER_REGISTRY.names,
    "model.name": MODEL_REGISTRY.names,
    "dataset.name": DATASET_REGISTRY.names,
}
"""Key → the names that it may have, once the config's plugins are imported. No torch."""


def load(path: Path | str, overrides: Sequence[str] = (), scheduler: str | None = None) -> Loaded:
    """The checked config; where a field is wrong, what model and data show together is told as well."""
    return configs.load(path, overrides, scheduler, names=KNOWN, together=_together)


def load_for_elsewhere(
    path: Path | str, overrides: Sequence[str] = (), scheduler: str | None = None, remedy: str = ""
) -> Loaded:
    """The same for a job on other machines, model and data checked here and now as far as their files are here.
    ``remedy``: where files are missing the job is refused with it."""
    from vpipe.train import preflight, sizes

    loaded = load(path, overrides, scheduler)
    if loaded.config.launch.elastic is None:
        refuse(loaded.config, here=False)
    else:
        for size in sizes.all_of(loaded.config):
            refuse(size, here=False)
    missing = [
        f"{configs.dotted(key)} {file} is not on this machine" for key, file in preflight.missing_files(loaded.config)
    ]
    if missing and remedy and loaded.config.launch.container.kind == "none":
        raise UserError(f"{'; '.join(missing)}, and no job was submitted; {remedy}")
    unseen = [f"{each}, so it was not checked with the rest" for each in missing]
    return replace(loaded, warnings=(*loaded.warnings, *unseen))


def _together(config: PipelineConfig) -> list[Problem]:
    from vpipe.train import preflight

    return preflight.check(config, here=False).problems


def launched_as() -> int | None:
    """Which rank of another launcher's this process is; ``None`` where it is the only one."""
    if process.told_rank() is not None:
        from vpipe.launch import environment

        environment.adopt()
    return process.rank()


def check(config: PipelineConfig, parallel: bool = True) -> dict[str, Any]:
    """What ``launch.local.run`` asks before any rank starts; ``parallel`` asks for the stages too, of an elastic run
    for its fewest and its most."""
    return {
        "function": "vpipe.train.preflight:refuse",
        "arguments": {"config": config.to_dict(), "parallel": parallel},
    }


def refuse(config: PipelineConfig, parallel: bool = True, here: bool = True) -> Materials | None:
    """The same, asked here and now; ``here`` also says that the ranks will be. What was gathered for the answer."""
    from vpipe.train import preflight

    found = preflight.check(config, parallel=parallel, here=here)
    if found.problems:
        raise configs.ConfigError(found.problems)
    return found.materials
