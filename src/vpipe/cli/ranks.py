"""The machine that ``vpipe plan`` is asked about: replicas, and links that differ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import click

from vpipe.errors import UserError
from vpipe.plan.links import Links, links_from_json

AUTO: Literal["auto"] = "auto"


class Replicas(click.ParamType[Any]):
    """``2``, ``2,1,1`` or ``auto``."""

    name = "N[,N…]|auto"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == AUTO or isinstance(value, int | tuple):
            return value
        parts = str(value).split(",")
        if not all(part.isascii() and part.isdigit() and 0 < int(part) <= 65536 for part in parts):
            self.fail(
                f"{str(value)[:40]!r} is neither a number of replicas, nor one for each stage, nor auto", param, ctx
            )
        numbers = tuple(int(part) for part in parts)
        return numbers[0] if len(numbers) == 1 else numbers


def read_links(path: Path, num_ranks: int) -> Links:
    """The links of a file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: the links cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise UserError(f"{path}: the links are not JSON") from None
    return links_from_json(found, str(path), num_ranks)
