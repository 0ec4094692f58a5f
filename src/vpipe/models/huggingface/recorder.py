"""One run of a model's own forward, written down: which modules it calls, and which value comes from where.

The modules do not compute: they return stand-ins, so that neither weights nor memory are needed. Between the calls the
model's code runs as it is, and every torch function in it is seen. A value is then known by its origin: an input of the
model, a result of a call, a parameter that the code uses by itself, or a function of other values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vpipe.errors import UserError
from vpipe.models.huggingface.anatomy import Anatomy
from vpipe.models.huggingface.standins import AbsentTensor, StandIns, hooked, without_hooks
from vpipe.models.huggingface.trees import LeafPath, leaves, mapped

DECIDING = {
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
    "item",
    "tolist",
    "equal",
    "allclose",
    "is_nonzero",
    "numpy",
}
"""Functions that turn a tensor's values into Python's: what follows may depend on them."""
RANDOM = {
    "dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout", "bernoulli", "rand",
    "rand_like", "randn_like", "multinomial", "normal", "uniform_", "normal_", "bernoulli_", "gumbel_softmax", "rrelu",
}  # fmt: skip


@dataclass(eq=False)
class Origin:
    """Where a value comes from; equal only to itself."""

    kind: str
    """``input``, ``call``, ``raw`` (a parameter used outside its module) or ``function``."""
    name: str
    time: int
    """How many calls were made before."""
    parents: tuple[Origin, ...] = ()
    call: int = -1
    leaf: LeafPath = ()
    size: tuple[int, ...] = ()
    weighty: bool = False
    """Whether it depends on parameters."""


@dataclass
class Call:
    """One call of a module: the origins of its arguments' leaves (``None``: a constant), and of its results."""

    path: str
    arguments: dict[LeafPath, Origin | None]
    results: dict[LeafPath, Origin]
    values: dict[LeafPath, Any] = field(default_factory=dict)
    """The arguments' leaves themselves."""


@dataclass
class Recording:
    """What one run showed."""

    calls: list[Call]
    output: dict[LeafPath, Origin | None]
    values: dict[LeafPath, Any]
    """The leaves of the output."""
    decided_by: set[str]
    """Inputs whose values steer the code."""
    touched: dict[str, int]
    """Per input, how many calls were made before the code first did anything with it."""


class Gate:
    """Stands for the forward of a module that the spine calls."""

    def __init__(self, answer: Any, path: str) -> None:
        self.answer, self.path = answer, path

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.answer(self.path, args, kwargs)


def gated_copy(root: nn.Module, body: Anatomy, answer: Any, free: Mapping[str, nn.Module]) -> nn.Module:
    """``root`` with its spine copied and a gate before every module that is called; nothing of ``root`` is changed."""

    def grown(module: nn.Module, path: str) -> nn.Module:
        if path in free:
            return free[path]
        made = without_hooks(module)
        if path in body.called:
            made.__dict__["forward"] = Gate(answer, path)
            return made
        made.__dict__["_parameters"] = dict(module._parameters)
        made.__dict__["_buffers"] = dict(module._buffers)
        made.__dict__["_modules"] = {
            name: grown(child, f"{path}.{name}" if path else name)
            for name, child in module._modules.items()
            if child is not None
        } | {name: None for name, child in module._modules.items() if child is None}
        return made

    return grown(root, "")


class CallRecorder(TorchFunctionMode):
    """Runs ``root`` once. ``fill`` is the number in every stand-in; what depends on it shows in a second run."""

    def __init__(self, root: nn.Module, body: Anatomy, stand_ins: StandIns, fill: float) -> None:
        super().__init__()
        self._body, self._stand_ins, self._fill = body, stand_ins, fill
        self._root = root
        free = {path: root.get_submodule(path) for path in body.free}
        self.copy = gated_copy(root, body, self._answer, free)
        self._names = {id(parameter): name for name, parameter in root.named_parameters()}
        self._origins: dict[int, Origin] = {}
        self._kept: list[Any] = []
        self._raw: dict[str, Tensor] = {}
        self._asleep = False
        self._calls: list[Call] = []
        self._decided_by: set[str] = set()
        self._touched: dict[str, int] = {}

    def run(self, inputs: Mapping[str, Any], task: Any) -> Recording:
        for name, value in inputs.items():
            for path, leaf in leaves(value):
                if isinstance(leaf, Tensor):
                    self._note(leaf, Origin("input", name, 0, leaf=path))
        with torch.no_grad(), self:
            arguments = task.arguments(inputs)
            self._touched.clear()
            made = task.output(self.copy, self.copy(**arguments))
        output = {path: self._origin(leaf) for path, leaf in leaves(made)}
        if not self._calls:
            raise UserError(
                f"the forward of {type(self._root).__name__} calls no module with weights, so it is not cut"
            )
        return Recording(self._calls, output, dict(leaves(made)), self._decided_by, self._touched)

    def _origin(self, leaf: Any) -> Origin | None:
        return self._origins.get(id(leaf)) if isinstance(leaf, Tensor) else None

    def _note(self, tensor: Tensor, origin: Origin) -> Tensor:
        self._kept.append(tensor)
        origin.size = tuple(tensor.shape)
        self._origins[id(tensor)] = origin
        return tensor

    def _answer(self, path: str, args: Any, kwargs: Any) -> Any:
        """A call of a module."""
        index = len(self._calls)
        args, kwargs = mapped(args, self._real), mapped(kwargs, self._real)
        self._asleep = True
        try:
            given = dict(leaves((args, kwargs)))
            self._kept.append(given)
            call = Call(path, {key: self._origin(leaf) for key, leaf in given.items()}, {}, given)
            self._touch(tuple(origin for origin in call.arguments.values() if origin is not None))
            self._calls.append(call)
            shapes, inner = self._stand_ins.returned(path, args, kwargs)
            made = self._standing(call, index, ("out",), shapes)
            sides = {name: self._standing(call, index, ("hook", name), value) for name, value in inner.items()}
        finally:
            self._asleep = False
        fire_hooks(self._root.get_submodule(path), args, made, sides)
        return made

    def _standing(self, call: Call, index: int, start: LeafPath, shapes: Any) -> Any:
        def stand(path: LeafPath, leaf: Any) -> Any:
            if not isinstance(leaf, AbsentTensor):
                return leaf
            origin = Origin("call", call.path, index + 1, call=index, leaf=(*start, *path), weighty=True)
            call.results[origin.leaf] = origin
            return self._note(leaf.tensor(torch.device("cpu"), self._fill, self._stand_ins.solid), origin)

        return mapped(shapes, stand)

    def _real(self, _: LeafPath, leaf: Any) -> Any:
        """A parameter that the code uses by itself, as a stand-in."""
        if not isinstance(leaf, nn.Parameter) or id(leaf) not in self._names:
            return leaf
        name = self._names[id(leaf)]
        if name not in self._raw:
            shape = AbsentTensor(tuple(leaf.shape), leaf.dtype)
            origin = Origin("raw", name, len(self._calls), weighty=True)
            self._raw[name] = self._note(shape.tensor(torch.device("cpu"), self._fill), origin)
        return self._raw[name]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._asleep:
            return func(*args, **(kwargs or {}))
        args, kwargs = mapped(args, self._real), mapped(kwargs or {}, self._real)
        found = {id(leaf): self._origin(leaf) for _, leaf in leaves((args, kwargs))}
        parents = tuple(origin for origin in found.values() if origin is not None)
        made = func(*args, **kwargs)
        if not parents:
            return made
        name = getattr(func, "__name__", str(func))
        self._touch(parents)
        self._check(name, parents)
        in_place = name.endswith("_") and (not name.startswith("__") or name.startswith("__i"))
        for _, leaf in leaves(made):
            if isinstance(leaf, Tensor) and (in_place or id(leaf) not in found):
                weighty = any(parent.weighty for parent in parents)
                self._note(leaf, Origin("function", name, len(self._calls), parents, weighty=weighty))
        return made

    def _touch(self, origins: tuple[Origin, ...]) -> None:
        for origin in ancestors(tuple(origin for origin in origins if not origin.weighty)):
            if origin.kind == "input":
                self._touched.setdefault(origin.name, len(self._calls))

    def _check(self, name: str, parents: tuple[Origin, ...]) -> None:
        if name not in DECIDING:
            return
        for origin in ancestors(parents):
            if origin.kind in ("call", "raw"):
                raise UserError(
                    f"the forward of {type(self._root).__name__} looks at values that {origin.name} computes, outside "
                    "its blocks, to decide what to do next; a stage that does not hold them cannot, so it is not cut"
                )
            if origin.kind == "input":
                self._decided_by.add(origin.name)


def ancestors(origins: tuple[Origin, ...]) -> list[Origin]:
    """The origins and everything that they come from, each once."""
    found: dict[Origin, None] = {}
    waiting = list(origins)
    while waiting:
        origin = waiting.pop()
        if origin not in found:
            found[origin] = None
            waiting.extend(origin.parents)
    return list(found)


def fire_hooks(unit: nn.Module, args: Any, made: Any, sides: Mapping[str, Any]) -> None:
    """What the hooks of ``unit`` and of modules inside it would have taken from a call that did not take place."""
    for name, module in hooked(unit).items():
        if name == "":
            for hook in module._forward_hooks.values():
                hook(module, args, made)
        elif name in sides:
            for hook in module._forward_hooks.values():
                hook(module, (), sides[name])
