"""What an optimizer keeps of a parameter, as tensors by path.

torch's own optimizers keep tensors by name: ``exp_avg``. One of another package may keep numbers, words, lists and
dicts of them; the path says what was where, and the end what was no tensor:

    {"exp_avg": tensor, "seen": 3, "past": [tensor, {"rank": "high"}]}
        ↔ exp_avg   seen:int   past/[0]   past/[1]/rank:str
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any
from urllib.parse import quote, unquote

import torch
from torch import Tensor

from vpipe.errors import UserError

HOSTED = ":host"
"""Behind the path of a tensor that is on the host beside weights that are not."""
_NUMBERS = {"bool": torch.bool, "int": torch.int64, "float": torch.float64}
_EMPTY: dict[str, Callable[[], Any]] = {"none": lambda: None, "dict": dict, "list": list, "tuple": tuple}


@lru_cache(maxsize=4096)
def _quoted(key: str) -> str:
    """A few names, asked for with every parameter while a step waits."""
    return quote(key, safe="")


def flatten(state: Mapping[Any, Any], who: str) -> dict[str, Tensor]:
    """The state as tensors; ``who`` names the optimizer where it holds what no path can say."""
    return dict(leaf for key, value in state.items() for leaf in _leaves(_part(key, who), value, who))


def _part(key: object, who: str) -> str:
    if isinstance(key, str):
        return _quoted(key)
    if isinstance(key, int) and not isinstance(key, bool):
        return f"<{key}>"
    raise UserError(
        f"{who} keeps its state under {key!r}, a {type(key).__name__}; a checkpoint holds names and whole numbers: "
        "use one of them as the key, or train without checkpoints (checkpoint.interval: -1)"
    )


def _leaves(path: str, value: Any, who: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
    elif value is None or (isinstance(value, dict | list | tuple) and not value):
        yield f"{path}:{'none' if value is None else type(value).__name__}", torch.empty(0, dtype=torch.uint8)
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from _leaves(f"{path}/{_part(key, who)}", each, who)
    elif type(value) in (list, tuple):
        mark = "[{}]" if isinstance(value, list) else "({})"
        for index, each in enumerate(value):
            yield from _leaves(f"{path}/{mark.format(index)}", each, who)
    elif isinstance(value, str):
        yield f"{path}:str", torch.frombuffer(bytearray(value.encode() + b"\0"), dtype=torch.uint8)
    elif type(value).__name__ in _NUMBERS:
        yield f"{path}:{type(value).__name__}", torch.tensor(value, dtype=_NUMBERS[type(value).__name__])
    else:
        raise UserError(
            f"{who} keeps a {type(value).__name__} in its state ({unquote(path)}), which a checkpoint cannot hold; "
            "keep tensors, numbers, words, lists and dicts, or train without checkpoints (checkpoint.interval: -1)"
        )


def unflatten(found: Mapping[str, Tensor]) -> dict[Any, Any]:
    """The state that ``flatten`` has flattened, of the same tensors."""
    tree: dict[str, Any] = {}
    for path, tensor in found.items():
        *outer, last = path.split("/")
        name, colon, kind = last.partition(":")
        place = tree
        for part in outer:
            place = place.setdefault(part, {})
        place[name] = _Leaf(kind if colon else "", tensor)
    return {_key(part): _value(inner) for part, inner in tree.items()}


class _Leaf:
    def __init__(self, kind: str, tensor: Tensor) -> None:
        self.kind, self.tensor = kind, tensor

    def value(self) -> Any:
        if self.kind in _EMPTY:
            return _EMPTY[self.kind]()
        if self.kind == "str":
            return bytes(self.tensor.tolist())[:-1].decode()
        return self.tensor.item() if self.kind in _NUMBERS else self.tensor


def _key(part: str) -> str | int:
    return int(part[1:-1]) if part.startswith("<") else unquote(part)


def _value(inner: Any) -> Any:
    if isinstance(inner, _Leaf):
        return inner.value()
    first = next(iter(inner))
    if first[0] in "[(":
        ordered = [_value(inner[part]) for part in sorted(inner, key=lambda part: int(part[1:-1]))]
        return ordered if first[0] == "[" else tuple(ordered)
    return {_key(part): _value(each) for part, each in inner.items()}
