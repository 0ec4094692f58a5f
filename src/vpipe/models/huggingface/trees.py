"""Arguments and results of modules as leaves with paths: tuples, lists and mappings in any nesting, the library's
output classes included."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

LeafPath = tuple[Any, ...]


def leaves(value: Any, path: LeafPath = ()) -> Iterator[tuple[LeafPath, Any]]:
    """Every leaf of ``value`` with the keys that lead to it."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves(item, (*path, key))
    elif isinstance(value, tuple | list):
        for index, item in enumerate(value):
            yield from leaves(item, (*path, index))
    else:
        yield path, value


def mapped(value: Any, change: Callable[[LeafPath, Any], Any], path: LeafPath = ()) -> Any:
    """``value`` with every leaf changed; the containers are new ones of the same kind."""
    if isinstance(value, Mapping):
        items = {key: mapped(item, change, (*path, key)) for key, item in value.items()}
        return items if type(value) is dict else type(value)(**items)
    if isinstance(value, tuple | list):
        made = [mapped(item, change, (*path, index)) for index, item in enumerate(value)]
        return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)
    return change(path, value)
