"""What a module would return, without its weights.

A piece of the cut runs the model's own Python code, in which modules of other pieces are called too. Such a call gets a
stand-in: tensors of the right shapes that take no memory. The shapes come from the module itself, run on torch's meta
device, once for every kind of module and shape of arguments."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vpipe.errors import UserError
from vpipe.models.huggingface.trees import leaves, mapped

HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)


@dataclass(frozen=True)
class AbsentTensor:
    """A tensor that is not there."""

    size: tuple[int, ...]
    dtype: torch.dtype

    def tensor(self, device: torch.device, fill: float = torch.nan, solid: bool = False) -> Tensor:
        """A tensor of this shape, without memory unless it must be ``solid`` because code writes into it. It is not a
        number, so that a result that depended on it would show."""
        value = fill if self.dtype.is_floating_point else 0
        if solid:
            return torch.full(self.size, value, dtype=self.dtype, device=device)
        return torch.full((), value, dtype=self.dtype, device=device).expand(self.size)


def shaped(value: Any) -> Any:
    """``value`` with every tensor replaced by its shape."""
    return mapped(
        value, lambda _, leaf: AbsentTensor(tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else leaf
    )


def without_hooks(module: nn.Module) -> nn.Module:
    """A module that shares everything with ``module`` but its hooks and what is set on it later."""
    made = object.__new__(type(module))
    made.__dict__ = dict(module.__dict__)
    for name in HOOKS:
        made.__dict__[name] = OrderedDict()
    return made


def hooked(unit: nn.Module) -> dict[str, nn.Module]:
    """The modules inside ``unit``, itself included, whose results a hook takes: router logits, hidden states."""
    return {name: module for name, module in unit.named_modules() if module._forward_hooks}


class StandIns:
    """Stand-ins for the calls of a model's modules. ``root`` has its parameters on meta."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self.solid = False
        """Whether stand-ins have memory of their own."""
        self._blanks: dict[Any, nn.Module] = {}
        self._known: dict[Any, Any] = {}

    def returned(self, path: str, args: Any, kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """(what the call would return, what the hooked modules inside would return), with shapes as leaves."""
        unit = self._root.get_submodule(path)
        taps = tuple(hooked(unit))
        kind = (type(unit), taps, tuple((name, tuple(p.shape)) for name, p in unit.named_parameters()))
        key = (kind, _key(args), _key(kwargs))
        if key not in self._known:
            if kind not in self._blanks:
                self._blanks[kind] = _blank(unit)
            self._known[key] = _on_meta(self._blanks[kind], taps, args, kwargs, path)
        return self._known[key]  # type: ignore[no-any-return]


def _key(value: Any) -> Any:
    """What of the arguments decides the result's shape."""
    return tuple(
        (path, leaf if isinstance(leaf, AbsentTensor | int | float | str | bool | None) else type(leaf))
        for path, leaf in leaves(shaped(value))
    )


def _blank(unit: nn.Module) -> nn.Module:
    """A copy of ``unit`` without hooks and without storage."""
    same = {id(parameter): parameter for parameter in unit.parameters()}
    blank = copy.deepcopy(unit, dict(same))
    for module in blank.modules():
        for name in HOOKS:
            module.__dict__[name] = OrderedDict()
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(torch.empty_like(parameter, device="meta"), False)
    return blank.to("meta")


def _on_meta(blank: nn.Module, taps: tuple[str, ...], args: Any, kwargs: Any, path: str) -> tuple[Any, dict[str, Any]]:
    def bare(_: Any, leaf: Any) -> Any:
        return torch.empty_like(leaf, device="meta") if isinstance(leaf, Tensor) else leaf

    seen: dict[str, Any] = {}
    handles = [
        module.register_forward_hook(KeepOutput(seen, name)) for name, module in blank.named_modules() if name in taps
    ]
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            made = _first_that_works(
                lambda: blank(*mapped(args, bare), **mapped(kwargs, bare)),
                lambda: _lenient(blank, lambda: blank(*mapped(args, bare), **mapped(kwargs, bare))),
                lambda: _with_storage(blank, args, kwargs),
            )
    except Exception as error:
        raise UserError(
            f"the shape of what {path} ({type(blank).__name__}) returns cannot be known without its weights "
            f"({type(error).__name__}: {' '.join(str(error).split())[:200]}), so this model cannot be cut there"
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    return shaped(made), {name: shaped(value) for name, value in seen.items()}


def _first_that_works(*ways: Callable[[], Any]) -> Any:
    for way in ways[:-1]:
        try:
            return way()
        except Exception:
            continue
    return ways[-1]()


def _with_storage(blank: nn.Module, args: Any, kwargs: Any) -> Any:
    """The call with memory for this one module, of any values, which are dropped again."""
    real = copy.deepcopy(blank).to_empty(device="cpu")
    for tensor in (*real.parameters(), *real.buffers()):
        tensor.fill_(0.01 if tensor.is_floating_point() or tensor.is_complex() else 0)
    for name, module in blank.named_modules():
        real.get_submodule(name)._forward_hooks = module._forward_hooks
    return real(*args, **kwargs)


@dataclass
class KeepOutput:
    """A hook that keeps what its module returned."""

    into: dict[str, Any]
    name: str

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self.into[self.name] = output


def _lenient(blank: nn.Module, call: Callable[[], Any]) -> Any:
    """``call()``, in which a module inside ``blank`` that cannot run without values returns what it was given.

    That is right for experts, which look at the router's choice and give back the shape of their input. A wrong guess
    is told by the piece that owns the module, when it sees the real result."""
    inner = [module for name, module in blank.named_modules() if name]
    for module in inner:
        module.__dict__["forward"] = _OrInput(module)
    try:
        return call()
    finally:
        for module in inner:
            del module.__dict__["forward"]


@dataclass
class _OrInput:
    module: nn.Module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return type(self.module).forward(self.module, *args, **kwargs)
        except Exception:
            return next(torch.empty_like(leaf) for _, leaf in leaves((args, kwargs)) if isinstance(leaf, Tensor))
