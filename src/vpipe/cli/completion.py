"""What the shell offers at TAB: schedules, keys of a config, and the names that a key may have.

Click asks these functions while a line is typed, so they import what they need and nothing heavy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import click
from click.shell_completion import CompletionItem


def schedules(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """A schedule of the catalogue; anything else that is typed may be a CSV file."""
    from vpipe.schedule.catalog import entries

    found = [CompletionItem(each.name, help=each.summary) for each in entries() if each.name.startswith(incomplete)]
    return found or [CompletionItem(incomplete, type="file")]


def several_schedules(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """``gpipe,1f1b,z`` → what goes on from ``z``."""
    from vpipe.schedule.catalog import entries

    before, comma, last = incomplete.rpartition(",")
    return [CompletionItem(before + comma + each.name) for each in entries() if each.name.startswith(last)]


def settings(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """``SECTION.KEY=``, then the names that the key may have, where they are known."""
    from vpipe.config.pipeline import PipelineConfig

    key, equals, start = incomplete.partition("=")
    if equals:
        return [CompletionItem(f"{key}={name}") for name in _names(key) if name.startswith(start)]
    return [
        CompletionItem(f"{name}=", help=text)
        for name, text in _keys(PipelineConfig)
        if name.startswith(key) and "." in name
    ]


def _keys(model: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    from vpipe.config.problems import section_of

    for name, field in model.model_fields.items():
        inner = section_of(field)
        if inner is not None:
            yield from _keys(inner, f"{prefix}{name}.")
        else:
            yield prefix + name, " ".join((field.description or "").split())


def _names(key: str) -> Iterable[str]:
    from vpipe.cli.loading import KNOWN

    return sorted(KNOWN[key]()) if key in KNOWN else ()
