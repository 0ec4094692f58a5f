"""``--set`` and ``--plugin``, the same for every command that reads a config or builds a program."""

from __future__ import annotations

from collections.abc import Callable
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
