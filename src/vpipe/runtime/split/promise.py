"""What the I of one graph leaves to W: the products, what they need, and the gradients that came by.

    prepare   before I: take x of every product, put a hook on its node
    seal      after I: every hook has seen its dy
    run       W: compute the products and add them

A product goes straight into its weight's gradient where there is at most a transpose on the way. Everything else
autograd itself carries to the weight, from the product's node on: copies of lower precision, sums of several uses.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, _engine_run_backward

from vpipe.runtime.crossing import run_backward
from vpipe.runtime.split.products import MatrixProduct, NodeTensors, OwnFunction
from vpipe.runtime.split.structure import Analysis, Product, Reading

CarriedGradients = list[tuple[GradientEdge, Tensor]]
"""Gradients that autograd takes on from an edge."""


def accumulate(parameter: Tensor, gradient: Tensor) -> None:
    """What autograd does with a gradient of a leaf."""
    if gradient.dtype is not parameter.dtype:
        gradient = gradient.to(parameter.dtype)
    if parameter.grad is not None:
        parameter.grad.add_(gradient)
        return
    if parameter.layout is gradient.layout is torch.strided and gradient.stride() != parameter.stride():
        gradient = torch.empty_like(parameter, requires_grad=False).copy_(gradient)
    parameter.grad = gradient


class Promise:
    """The products that a graph's I leaves to W."""

    def __init__(self, analysis: Analysis, reading: Reading, weights: Sequence[Tensor]) -> None:
        self.analysis = analysis
        self._nodes = reading.nodes
        self._weights = weights
        self._products: list[Linear | General] = []
        self._taken: list[tuple[int, Tensor | None, int]] = []
        """(product, dy, version of dy) in the order of the backward."""
        self._handles: list[Any] = []
        self._input_gradients: dict[int, Tensor | None] = {}

    def prepare(self, rehearsal: bool = False) -> Collection[int]:
        """Take what the products need, and be ready for their dy; the weights for which that cannot be."""
        for index, product in enumerate(self.analysis.products):
            node = self._nodes[product.node]
            handle = node.register_hook(self._rehearsing(index, node) if rehearsal else self._taking(index))
            self._handles.append(handle)
            found = Linear.of(product, node, self._weights) or General.of(product, node, self._weights, rehearsal)
            is_watched = len(handle.hooks_dict_ref()) > 1  # a foreign hook wants to see all gradients of the node
            if found is None or is_watched:
                self.withdraw()
                return product.weights
            self._products.append(found)
        return ()

    def _taking(self, index: int) -> Callable[..., None]:
        taken = self._taken

        def take(_: Any, gradients: Sequence[Tensor | None]) -> None:
            dy = gradients[0]
            taken.append((index, dy, 0 if dy is None else dy._version))

        return take

    def _rehearsing(self, index: int, node: Any) -> Callable[..., None]:
        take = self._taking(index)

        def rehearse(inputs: Sequence[Tensor | None], gradients: Sequence[Tensor | None]) -> None:
            take(inputs, gradients)
            self._input_gradients[index] = inputs[0]
            product = self._products[index]
            if isinstance(product, General) and isinstance(product.kind, OwnFunction):
                node.defer = product.saved.rest.append
                node._forward_cls.backward(node, *gradients)

        return rehearse

    def withdraw(self) -> None:
        """Leave the nodes as they were found."""
        for handle, product in zip(self._handles, self.analysis.products, strict=False):
            handle.remove()
            if isinstance(product.kind, OwnFunction):
                vars(self._nodes[product.node]).pop("defer", None)
        self._handles.clear()

    def inputs(self) -> list[GradientEdge]:
        """What I runs for."""
        nodes = self._nodes
        return [GradientEdge(nodes[place], 0) for place in self.analysis.inputs]

    def seal(self) -> None:
        """I is over; only what W needs stays."""
        if len(self._taken) != len(self._products):
            raise RuntimeError(
                f"{len(self._products)} products wait for W, but {len(self._taken)} came by in I; please report this"
            )
        self._nodes = []
        self._handles.clear()

    def run(self) -> None:
        """Add what was left to W."""
        carried: CarriedGradients = []
        for index, dy, version in self._taken:
            product = self._products[index]
            if dy is None:
                continue
            _check(dy, version)
            for weight, gradient in product.gradients(dy, carried):
                accumulate(weight, gradient)
        if carried:
            run_backward([edge for edge, _ in carried], [gradient for _, gradient in carried])

    def totals(self) -> dict[int, Tensor]:
        """id of a weight → what W would add; it is added nowhere."""
        carried: CarriedGradients = []
        found: dict[int, Tensor] = {}
        for index, dy, version in self._taken:
            if dy is not None:
                _check(dy, version)
                found |= {id(weight): grad for weight, grad in self._products[index].gradients(dy, carried)}
        if carried:
            ends = [self._nodes[place] for place in self.analysis.accumulators]
            roots, gradients = zip(*carried, strict=True)
            inputs = tuple(GradientEdge(end, 0) for end in ends)
            options = {"allow_unreachable": True, "accumulate_grad": False}
            made = _engine_run_backward(roots, gradients, True, False, inputs, **options)
            found |= {id(end.variable): grad for end, grad in zip(ends, made, strict=True) if grad is not None}
        return found

    def wrong_inputs(self) -> set[int]:
        """The weights of products whose input gradient changes if the others are left out."""
        found: set[int] = set()
        for index, dy, _ in self._taken:
            product, expected = self._products[index], self._input_gradients[index]
            if dy is None or expected is None or isinstance(product, Linear):
                continue
            ours = product.kind.input_gradient(product.saved, dy)
            if ours is not None and not same(expected, ours):
                found |= self.analysis.products[index].weights
        return found


class Linear:
    """``x @ weight.t() + bias``, the product that nearly all weights are in."""

    __slots__ = ("_bias", "_version", "_weight", "_x")

    def __init__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        self._x, self._version, self._weight, self._bias = x, x._version, weight, bias

    @classmethod
    def of(cls, product: Product, node: Any, weights: Sequence[Tensor]) -> Linear | None:
        if product.linear is None or not isinstance(product.kind, MatrixProduct):
            return None
        weight, bias = product.linear
        x = product.kind.of_linear(node)
        if x is None or (bias >= 0 and weights[bias].dim() != 1) or (bias >= 0 and weights[bias].shape[0] == 1):
            return None
        return cls(x, weights[weight], weights[bias] if bias >= 0 else None)

    def gradients(self, dy: Tensor, carried: CarriedGradients) -> Iterable[tuple[Tensor, Tensor]]:
        _check(self._x, self._version)
        yield self._weight, dy.t().mm(self._x)
        if self._bias is not None:
            yield self._bias, dy.sum(0)


class General:
    """Any other product."""

    def __init__(
        self, product: Product, saved: NodeTensors, edges: list[GradientEdge | None], weights: Sequence[Tensor]
    ):
        self.kind, self.saved = product.kind, saved
        self._slots = product.slots
        self._versions = [tensor._version for tensor in saved.tensors]
        self._targets = [
            (edge, None if edge is not None else weights[number])
            for edge, number in zip(edges, product.direct, strict=True)
        ]

    @classmethod
    def of(cls, product: Product, node: Any, weights: Sequence[Tensor], rehearsal: bool) -> General | None:
        saved = product.kind.save(node, product.slots)
        if saved is None:
            return None
        if rehearsal and isinstance(product.kind, OwnFunction):
            del node.defer  # for now: the backward that is rehearsed is the plain one
        behind = node.next_functions
        edges = [
            GradientEdge(*behind[slot]) if number < 0 else None
            for slot, number in zip(product.slots, product.direct, strict=True)
        ]
        return cls(product, saved, edges, weights)

    def gradients(self, dy: Tensor, carried: CarriedGradients) -> Iterable[tuple[Tensor, Tensor]]:
        """(weight, gradient); what autograd has to carry goes to ``carried``."""
        for tensor, version in zip(self.saved.tensors, self._versions, strict=True):
            _check(tensor, version)
        found = self.kind.gradients(self.saved, dy, self._slots)
        for gradient, (edge, weight) in zip(found, self._targets, strict=True):
            if gradient is None:
                continue
            if edge is not None:
                carried.append((edge, gradient))
            elif weight is not None:
                fitted = gradient if gradient.shape == weight.shape else gradient.sum_to_size(weight.shape)
                yield weight, fitted.clone() if fitted is dy else fitted


def _check(tensor: Tensor, version: int) -> None:
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"a tensor of shape {tuple(tensor.shape)} is at version {tensor._version}, but W needs version {version}; "
            "let the layer compute a new tensor"
        )


def same(one: Tensor, other: Tensor) -> bool:
    """Whether two gradients are the same numbers."""
    if one.shape != other.shape or one.is_sparse or other.is_sparse:
        return False
    if other.dtype != one.dtype:
        other = other.to(one.dtype)
    return torch.equal(one, other) or torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
