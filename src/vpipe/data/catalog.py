"""The data sets by name: the one place where a config's ``dataset`` section meets a reader.

A reader's keyword arguments are the options that ``dataset.extra`` may hold. They are checked here against its
signature, so that a misspelt or ill-typed option is a sentence before anything is read.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Mapping
from importlib import import_module
from inspect import Parameter, signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vpipe.errors import UserError, nearest
from vpipe.registry import DATASET_REGISTRY

if TYPE_CHECKING:
    from vpipe.data.dataset import DataSet

_READERS = DATASET_REGISTRY.built_in


def dataset_names() -> list[str]:
    """What ``dataset.name`` may be, aliases left out."""
    return sorted(_READERS)


def options(name: str) -> dict[str, Any]:
    """The options of a data set with their defaults: what ``dataset.extra`` may hold beside ``path``."""
    parameters = signature(_reader(name)).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is Parameter.KEYWORD_ONLY and p.name != "seed"}


def load(
    name: str,
    *,
    path: Path | str | None = None,
    sequence_length: int = 128,
    seed: int = 1024,
    extra: Mapping[str, Any] | None = None,
) -> DataSet:
    """A data set ready to train on; its ``valid`` is the held-out part.

    ``path`` is where the data lie (``extra["path"]`` says the same). ``seed`` draws the held-out examples where the
    data have none of their own. ``extra`` are the options of the named data set; ``options(name)`` lists them.
    """
    given = dict(extra or {})
    place = given.pop("path", None) if path is None else path
    if place is not None and not isinstance(place, str | Path):
        raise UserError(f"dataset.extra.path is {place!r}; it must be the path of a folder or a file")
    reader = _reader(name)
    _check_options(name, reader, given)
    return typing.cast("DataSet", reader(None if place is None else Path(place), sequence_length, seed=seed, **given))


def _reader(name: str) -> Callable[..., Any]:
    address = _READERS.get(DATASET_REGISTRY.aliases.get(name, name))
    if address is None:
        raise UserError(
            f"there is no data set {name!r}: choose from {', '.join(dataset_names())}{nearest(name, _READERS)}"
        )
    module, _, function = address.partition(":")
    return typing.cast("Callable[..., Any]", getattr(import_module(module), function))


def _check_options(name: str, reader: Callable[..., Any], given: Mapping[str, Any]) -> None:
    known, hints = options(name), typing.get_type_hints(reader)
    for key, value in given.items():
        if key not in known:
            raise UserError(
                f"the data set {name!r} has no option {key!r}: it has "
                f"{', '.join(['path', *known])}{nearest(key, known)}"
            )
        if not _fits(value, hints[key]):
            wanted = getattr(hints[key], "__name__", str(hints[key]))
            raise UserError(f"dataset.extra.{key} is {value!r} ({type(value).__name__}); it must be {wanted}")


def _fits(value: Any, hint: Any) -> bool:
    if isinstance(hint, types.UnionType):
        return any(_fits(value, part) for part in typing.get_args(hint))
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, hint) and (hint is not int or not isinstance(value, bool))
