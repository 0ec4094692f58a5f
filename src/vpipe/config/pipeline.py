"""The whole config: seven sections in one closed, frozen object; as YAML that is read back to the same values, with the
meaning of every field, and as a schema.

``PipelineConfig.from_yaml("job.yaml")`` is the short way; :func:`vpipe.config.load` also applies overrides and tells
the warnings. Either way a config that exists has passed every check.

PyYAML quotes what its own reader would misunderstand, which is not what ours would: it writes the string ``1e-4``
plainly. So every string that our reader would take for something else is quoted here.
"""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from textwrap import wrap
from typing import Any

import yaml
from pydantic import BaseModel

from vpipe.config.base import Section, Text, worded
from vpipe.config.document import plain
from vpipe.config.placement import ParallelConfig
from vpipe.config.problems import ConfigError, expects, section_of
from vpipe.config.running import CheckpointConfig, LaunchConfig, ObserveConfig
from vpipe.config.sections import DatasetConfig, ModelConfig, TrainingConfig

WIDTH = 120


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
    plugins: tuple[Text, ...] = worded((), "a list of Python files or modules", strict=False)
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
        text = commented(self) if comments else dump(self.to_dict()) + "\n"
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    def validate(self) -> None:  # type: ignore[override]  # OurGPipe's name; pydantic's own is a deprecated classmethod
        """Check the rules between fields. Raises ``UserError`` with all that are broken."""
        from vpipe.config.checks import check

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


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _string(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    try:
        ambiguous = not isinstance(plain(text), str)
    except ValueError:
        ambiguous = True
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="'" if ambiguous else None)


_Dumper.add_representer(str, _string)


def dump(value: Any, flow: bool = False) -> str:
    """Plain values as YAML; ``flow`` puts them on one line."""
    text = yaml.dump(
        value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=flow or None, width=2**30
    )
    return str(text).removesuffix("...\n").rstrip("\n")


def example() -> PipelineConfig:
    """The defaults, with names for the two fields that have none."""
    return PipelineConfig(model=ModelConfig(name="gpt"), dataset=DatasetConfig(name="code_search_net"))


def commented(config: PipelineConfig | None = None) -> str:
    """The config (or the defaults) with the meaning of every field above it."""
    return "\n".join(_explained(config or example(), "")) + "\n"


def _explained(section: BaseModel, indent: str) -> list[str]:
    lines: list[str] = []
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        text = " ".join((field.description or "").split())
        if section_of(field) is not None:
            lines += ["", *_comment(text, indent), f"{indent}{name}:", *_explained(value, indent + "  ")]
        else:
            written = dump(section.model_dump(mode="json", include={name})[name], flow=True)
            lines += [*_comment(f"{text} ({expects(field)})", indent), f"{indent}{name}: {written}"]
    return lines[1:] if not indent else lines


def _comment(text: str, indent: str) -> list[str]:
    return [f"{indent}# {line}" for line in wrap(text, WIDTH - len(indent) - 2)]


def schema() -> dict[str, Any]:
    """The JSON schema of a config file, for editors: completion, types and the text of every field."""
    made: dict[str, Any] = PipelineConfig.model_json_schema()
    _tidy(made)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **made, "title": "vpipe config"}


def _tidy(node: Any) -> None:
    """Fold line breaks of descriptions; drop our own words for errors."""
    if isinstance(node, dict):
        if isinstance(node.get("description"), str):
            node["description"] = " ".join(node["description"].split())
        if isinstance(node.get("expects"), str):
            del node["expects"]
        for item in node.values():
            _tidy(item)
    elif isinstance(node, list):
        for item in node:
            _tidy(item)
