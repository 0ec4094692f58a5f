"""The whole config: seven sections in one closed, frozen object.

``PipelineConfig.from_yaml("job.yaml")`` is the short way; :func:`vpipe.config.load` also applies overrides and tells
the warnings. Either way a config that exists has passed every check.
"""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import Any

from vpipe.config.base import Section, Text, listed
from vpipe.config.placement import ParallelConfig
from vpipe.config.running import CheckpointConfig, LaunchConfig, ObserveConfig
from vpipe.config.sections import DatasetConfig, ModelConfig, TrainingConfig


class PipelineConfig(Section):
    """One training job."""

    model: ModelConfig
    """What is trained."""
    dataset: DatasetConfig
    """What it is trained on."""
    training: TrainingConfig = TrainingConfig()
    """How it is trained."""
    parallel: ParallelConfig = ParallelConfig()
    """How it is spread over ranks."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """What is kept of it."""
    observe: ObserveConfig = ObserveConfig()
    """What it shows and writes down."""
    launch: LaunchConfig = LaunchConfig()
    """Where its ranks run."""
    plugins: tuple[Text, ...] = listed((), "a list of Python files or modules")
    """Your own code: Python files, or modules that can be imported, that register models, data sets, stages or
    schedules. Every rank imports them. A file lies relative to this one."""

    @classmethod
    def from_yaml(cls, path: str | PathLike[str]) -> PipelineConfig:
        """The config of a YAML file, ours, OurGPipe's or VPipe's. Raises ``UserError`` with all problems."""
        from vpipe.config.load import load

        return load(path, run_plugins=False).config

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> PipelineConfig:
        """The config of nested dictionaries. Raises ``UserError`` with all problems."""
        from vpipe.config.load import from_values

        return from_values(values)

    def to_dict(self) -> dict[str, Any]:
        """Nested dictionaries and lists of plain values; ``from_dict`` gives the config back."""
        values: dict[str, Any] = self.model_dump(mode="json")
        return values

    def to_yaml(self, path: str | PathLike[str] | None = None, comments: bool = False) -> str:
        """The config as YAML, written to ``path`` if given; with ``comments`` every field is explained."""
        from vpipe.config.write import write

        return write(self, path, comments)

    def validate(self) -> None:  # type: ignore[override]  # OurGPipe's name; pydantic's own is a deprecated classmethod
        """Check the rules between fields. Raises ``UserError`` with all that are broken."""
        from vpipe.config.checks import check
        from vpipe.config.problems import ConfigError

        problems = check(self)
        if problems:
            raise ConfigError(problems)

    @property
    def num_stages(self) -> int | None:
        """Stages of the pipeline where the config alone says it; ``None`` where the schedule decides."""
        parallel = self.parallel
        if parallel.stages_per_rank is None:
            return None
        return parallel.model_parallel_size * parallel.stages_per_rank

    @property
    def num_ranks(self) -> int:
        """Ranks of the whole run."""
        parallel = self.parallel
        if parallel.replicas is not None and len(parallel.replicas) == parallel.model_parallel_size:
            return sum(parallel.replicas)
        return parallel.model_parallel_size * parallel.data_parallel_size
