"""``--set`` and ``--plugin``, the same for every command that reads a config or builds a program."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import wraps
from typing import Any

import click

from vpipe.cli import completion

set_option: Callable[[Any], Any] = click.option(
    "--set",
    "overrides",
    shell_complete=completion.settings,
    multiple=True,
    metavar="SECTION.KEY=VALUE",
    help="Set a field of the config; may be repeated.",
)

plugin_option: Callable[[Any], Any] = click.option(
    "--plugin",
    "plugins",
    multiple=True,
    metavar="FILE",
    help="Import a Python file (or module) that registers your model, data set or schedule; may be repeated.",
)


def with_plugins(overrides: tuple[str, ...], plugins: tuple[str, ...]) -> tuple[str, ...]:
    """The overrides, and one that adds the plugins: so they reach the ranks of every launcher."""
    if not plugins:
        return overrides
    files = [os.path.abspath(os.path.expanduser(item)) if item.endswith(".py") else item for item in plugins]
    return (*overrides, f"plugins={json.dumps(files)}")


def config_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command that reads a config both; it is called with ``overrides``, in which the plugins are."""

    @wraps(command)
    def with_overrides(overrides: tuple[str, ...], plugins: tuple[str, ...], **given: Any) -> Any:
        return command(overrides=with_plugins(overrides, plugins), **given)

    decorated: Callable[..., Any] = set_option(plugin_option(with_overrides))
    return decorated
