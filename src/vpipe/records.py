"""Dataclasses out of JSON. Every field is checked for its type before it is believed: a file may be of another version,
half written, or damaged. What a field may be, its annotation says.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, TypeVar

from annotated_types import Ge

from vpipe.errors import nearest

T = TypeVar("T")
Natural = Annotated[int, Ge(0)]
Amount = Annotated[float, Ge(0)]
EXACT = {"extra": "forbid", "allow_inf_nan": False}
"""``__pydantic_config__`` of a dataclass that has these fields and no other; elsewhere a later version's are left
out."""
_adapters: dict[type, Any] = {}


def parsed(kind: type[T], found: Any, name: str = "") -> T:
    """What ``dataclasses.asdict`` has made of a ``kind``; ``ValueError`` with the first wrong field for anything
    else."""
    from pydantic import TypeAdapter, ValidationError  # a twentieth of a second, for commands that read no such file

    if kind not in _adapters:
        _adapters[kind] = TypeAdapter(kind)
    try:
        value: T = _adapters[kind].validate_json(json.dumps(found), strict=True)
    except ValidationError as error:
        errors = error.errors(include_url=False)
        first = min(errors, key=lambda each: {"unexpected_keyword_argument": 0, "missing": 2}.get(each["type"], 1))
        where = ".".join(str(part) for part in (name, *first["loc"]) if part != "")
        if first["type"] == "missing":
            raise ValueError(f"{where} is missing") from None
        if first["type"] == "unexpected_keyword_argument":
            known = getattr(kind, "__dataclass_fields__", ()) if len(first["loc"]) == 1 else ()
            raise ValueError(f"{where} is no key here{nearest(str(first['loc'][-1]), known)}") from None
        raise ValueError(f"{where or 'it'} is {first['input']!r:.40}: {first['msg']}") from None
    return value


def parsed_or_none(kind: type[T], found: Any) -> T | None:
    """The same; ``None`` for anything else."""
    try:
        return parsed(kind, found)
    except ValueError:
        return None
