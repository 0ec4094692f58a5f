"""The reference page ``docs/config.md``, made from the fields themselves, so that it cannot say anything else.

python docs/config_page.py > docs/config.md
"""

from __future__ import annotations

import sys
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from vpipe.config.pipeline import PipelineConfig, dump
from vpipe.config.problems import expects, section_of

INTRODUCTION = """\
# Config reference

This page is made from the fields by `python docs/config_page.py > docs/config.md`; a test keeps it true.

A job is one YAML file with up to seven sections. Only `model.name` and `dataset.name` have no default. An unknown key
is an error that suggests the nearest one, and all errors of a file are told at once, with line, key, the value found
and the value that would do. What only the model and the data together show (a vocabulary smaller than the data's ids,
sequences longer than the positions, labels that the loss cannot read, fewer layers than stages, too few examples for a
batch) is told in the same way before any rank starts, by `train`, `parity`, `profile`, `plan` and `submit`: the model
is built without storage and the first rows are sent through it by their shapes. `submit` does so on the machine where
it is typed, and warns of files that are not there. Under torchrun, srun or mpirun the ranks run already and say it
themselves.

- `vpipe train job.yaml --set training.epochs=1 --set parallel.partition=[2,4,4,2]` overrides keys for one run.
- `vpipe train job.yaml --print-config` prints the resolved config, every field with its explanation.
- VPipe's flat YAML files load too ([from-vpipe.md](from-vpipe.md)), and OurGPipe's
  ([from-ourgpipe.md](from-ourgpipe.md)).
- What is read (`dataset.path`, `model.config`, `model.directory`, a plan) lies relative to the YAML file; in a `--set`
  it lies relative to the working directory. What is written goes to the working directory.

YAML as it is read here: `1e-4` is a number; only `true` and `false` are booleans (`no` is a word); `010`, a key given
twice, aliases, merge keys and tags are refused, and so is a file of more than 1 MB.
"""


def reference() -> str:
    """The page as Markdown."""
    parts = [INTRODUCTION]
    for name, field in PipelineConfig.model_fields.items():
        section = section_of(field)
        if section is not None:
            parts += _section(section, name)
        else:
            parts += [f"## `{name}`", "", f"{_flat(field.description)} ({_flat(expects(field))})", ""]
    return "\n".join(parts)


def _section(section: type[BaseModel], path: str) -> list[str]:
    lines = [
        f"## `{path}`",
        "",
        _flat(section.__doc__),
        "",
        "| key | default | accepts | meaning |",
        "| --- | --- | --- | --- |",
    ]
    inner: list[str] = []
    for name, field in section.model_fields.items():
        below = section_of(field)
        if below is not None:
            inner += _section(below, f"{path}.{name}")
            lines.append(f"| `{name}` | | see below | {_cell(field.description)} |")
        else:
            default = (
                "required"
                if field.is_required()
                else f"`{_cell(dump(_plain(field.get_default(call_default_factory=True)), flow=True))}`"
            )
            lines.append(f"| `{name}` | {default} | {_cell(expects(field))} | {_cell(field.description)} |")
    return [*lines, "", *inner]


def _plain(default: Any) -> Any:
    assert default is not PydanticUndefined
    return list(default) if isinstance(default, tuple) else default


def _flat(text: str | None) -> str:
    return " ".join((text or "").split())


def _cell(text: str | None) -> str:
    return _flat(text).replace("|", "\\|")


if __name__ == "__main__":
    sys.stdout.write(reference())
