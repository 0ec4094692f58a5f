"""The built-in models by name, made from the ``model`` section of a config.

A builder is a plain function with keyword arguments; its signature is the list of options it takes. That keeps one
statement of what a model accepts: an option that no builder reads cannot exist, and a misspelt one is an error that
names the nearest.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from vpipe.errors import UserError, nearest
from vpipe.models.model import Model
from vpipe.registry import MODEL_REGISTRY

BUILDERS = MODEL_REGISTRY.built_in
"""Name in a config → ``module:function``; a module is imported when its model is asked for."""


def builder(name: str) -> Callable[..., Model]:
    """The function that makes the model ``name``."""
    if name not in BUILDERS:
        raise UserError(
            f"model.name {name!r} is not a model{nearest(name, BUILDERS)}; the models are {', '.join(BUILDERS)}"
        )
    module, _, function = BUILDERS[name].partition(":")
    made: Callable[..., Model] = getattr(import_module(module), function)
    return made


def build(
    name: str, section: Mapping[str, Any] | None = None, *, vocab_size: int | None = None, seed: int = 0
) -> Model:
    """The model ``name`` with the options of ``section`` (``extra`` is folded in; ``name`` is left out).

    ``vocab_size`` is the data set's, taken where the section has none or −1.
    """
    make = builder(name)
    options = {key: value for key, value in (section or {}).items() if key not in ("name", "extra")}
    options.update((section or {}).get("extra") or {})
    if options.get("vocab_size", -1) == -1:
        options.pop("vocab_size", None)
        if vocab_size is not None:
            options["vocab_size"] = vocab_size
    known = inspect.signature(make).parameters
    for key in options:
        if key not in known:
            raise UserError(
                f"model.{key} is not an option of {name!r}{nearest(key, known)}; it takes {', '.join(known)}"
            )
    missing = [key for key, option in known.items() if option.default is option.empty and key not in options]
    if missing:
        raise UserError(f"model.{missing[0]} is missing and {name!r} needs it; give it, or a data set that knows it")
    return make(**{"seed": seed, **options})
