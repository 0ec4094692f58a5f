"""A config as text: YAML that this package reads back to the same values, and the commented form that explains itself.

PyYAML quotes what its own reader would misunderstand, which is not what ours would: it writes the string ``1e-4``
plainly. So every string that our reader would take for something else is quoted here.
"""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from textwrap import wrap
from typing import Any

import yaml
from pydantic import BaseModel

from vpipe.config.document import plain
from vpipe.config.pipeline import PipelineConfig
from vpipe.config.problems import expects, section_of
from vpipe.config.sections import DatasetConfig, ModelConfig

WIDTH = 120


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


def write(config: PipelineConfig, path: str | PathLike[str] | None, comments: bool) -> str:
    """The config as YAML, written to ``path`` if given."""
    text = commented(config) if comments else dump(config.to_dict()) + "\n"
    if path is not None:
        Path(path).write_text(text, encoding="utf-8")
    return text


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
