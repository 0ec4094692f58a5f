"""Weight gradients that can be computed after the backward that needs them is over, one kind of graph node each.

A node of autograd's computes the gradients of all its inputs at once. Of the kinds below we know how to compute those
of the weights by themselves, later, from the gradient of the output and from what the node has saved:

    AddmmBackward0   y = bias + x @ weight        dweight = x.T @ dy      dbias = dy, summed to its shape

The formulas are those of torch's ``derivatives.yaml``, down to which operand is transposed, so that bits are equal.
A ``torch.autograd.Function`` takes part by naming the tensor arguments whose gradients can wait:

    class Scale(torch.autograd.Function):
        deferrable = (1,)                       # of x and weight, the weight's

        @staticmethod
        def backward(ctx, dy):
            x, weight = ctx.saved_tensors
            defer = getattr(ctx, "defer", None)          # there under a schedule that separates I and W
            if defer is None:
                return dy * weight, (dy * x).sum(0)
            defer(lambda: (None, (dy * x).sum(0)))       # called in W
            return dy * weight, None
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from vpipe.runtime.memory.saved_tensors import SavedTensor, SavedTensors

SlotGradients = Sequence[Tensor | None]
Slots = tuple[int, ...]


class NodeTensors(NamedTuple):
    """What the products of a node need of it."""

    tensors: tuple[Tensor, ...]
    """They must not change before W."""
    rest: Any


class ProductKind(ABC):
    """One kind of node. A *slot* is the position of an input among the node's inputs."""

    slots: Slots
    """The inputs whose gradient can wait."""
    together = False
    """Whether the gradients of all weights come from one call, so that either all or none of them wait."""
    factors: Slots = ()
    """The inputs that are saved for one another's gradients."""

    @abstractmethod
    def save(self, node: Any, slots: Slots) -> NodeTensors | None:
        """What the products of ``slots`` need of the node, or None where that cannot be had. Called before I."""

    @abstractmethod
    def gradients(self, saved: NodeTensors, dy: Tensor, slots: Slots) -> SlotGradients:
        """The gradients of ``slots``, as the node itself would yield them."""

    def input_gradient(self, saved: NodeTensors, dy: Tensor) -> Tensor | None:
        """The gradient of slot 0 as I computes it without those that wait, where that is another call of a kernel."""
        return None


def held(node: Any, name: str) -> Tensor | None:
    """A tensor that the node has saved, or None if it is of an unknown sort or a hook unpacks it.

    A foreign hook (``torch.utils.checkpoint``) may allow one look only, which is the node's own.
    """
    if not _KNOWS_HOOKS:
        return None
    hook = getattr(node, f"_raw_saved_{name}").unpack_hook
    if (
        hook is not None
        and hook is not SavedTensor.get
        and not isinstance(getattr(hook, "__self__", None), SavedTensors)
    ):
        return None
    tensor = getattr(node, f"_saved_{name}")
    if type(tensor) not in _PLAIN or tensor.layout is not torch.strided:
        return None
    return tensor.detach()  # type: ignore[no-any-return]


_KNOWS_HOOKS = hasattr(torch._C._autograd.SavedTensor, "unpack_hook")
"""Whether this torch tells which saved tensors have hooks; where it does not, nothing waits."""
_PLAIN = (Tensor, torch.nn.Parameter)


def _times(tensor: Tensor, factor: Any) -> Tensor:
    """Autograd's ``maybe_multiply``, conjugate included."""
    return tensor if factor == 1 else tensor * factor.conjugate()


def _conjugate(tensor: Tensor) -> Tensor:
    return tensor.conj() if tensor.is_complex() else tensor


class MatrixProduct(ProductKind):
    """``left @ right``, and ``addmm``, which has a summand in front of them.

    A weight that is stored by columns gets its gradient by columns, as autograd does it: ``weight.t()`` of a Linear is
    one, so its gradient is ``dy.t() @ x``.
    """

    def __init__(self, left: str, right: str, has_summand: bool) -> None:
        self._first = int(has_summand)
        self.slots: Slots = tuple(range(self._first + 2))
        self.linear_slots: set[Slots] = {(self._first + 1,), (0, self._first + 1)} if has_summand else {(1,)}
        self.factors: Slots = (self._first, self._first + 1)
        self._names = {self._first: (left, right), self._first + 1: (right, left)}
        self._hook = attrgetter(f"_raw_saved_{left}.unpack_hook")
        self._operands = attrgetter(f"_saved_{left}", f"_saved_{right}")
        self._shape = attrgetter(f"_saved_{right}_sym_sizes", f"_saved_{right}_sym_strides")

    def of_linear(self, node: Any) -> Tensor | None:
        """``x`` of ``x @ weight.t()``, bias or not, if the node is that of an ordinary Linear: nothing scaled, nothing
        complex, and the transpose seen to be without hooks of its own."""
        sizes, strides = self._shape(node)
        if strides != (1, sizes[0]) or (self._first and not node._saved_alpha == 1 == node._saved_beta):
            return None
        if not _KNOWS_HOOKS or self._hook(node) is not None:
            return None
        x, transpose = self._operands(node)
        if transpose is None or transpose._backward_hooks is not None or transpose.retains_grad or x.is_complex():
            return None
        plain = type(x) in _PLAIN and x.layout is torch.strided
        return x.detach() if plain else None

    def save(self, node: Any, slots: Slots) -> NodeTensors | None:
        alpha, beta = (node._saved_alpha, node._saved_beta) if self._first else (1, 1)
        tensors: list[Tensor] = []
        forms: list[tuple[int, bool, Any]] = []
        for slot in slots:
            if slot not in self._names:
                forms.append((-1, False, beta))
                continue
            own, other = self._names[slot]
            factor = held(node, other)
            if factor is None:
                return None
            rows, _ = getattr(node, f"_saved_{own}_sym_sizes")
            forms.append((len(tensors), getattr(node, f"_saved_{own}_sym_strides") == (1, rows), alpha))
            tensors.append(factor)
        return NodeTensors(tuple(tensors), forms)

    def gradients(self, saved: NodeTensors, dy: Tensor, slots: Slots) -> SlotGradients:
        return [self._gradient(saved, dy, slot, *form) for slot, form in zip(slots, saved.rest, strict=True)]

    def _gradient(self, saved: NodeTensors, dy: Tensor, slot: int, place: int, by_columns: bool, scale: Any) -> Tensor:
        if place < 0:
            return _times(dy, scale)
        factor = _conjugate(saved.tensors[place])
        if slot == self._first:
            product = factor.mm(dy.t()).t() if by_columns else dy.mm(factor.t())
        else:
            product = dy.t().mm(factor).t() if by_columns else factor.t().mm(dy)
        return _times(product, scale)


class BatchedProduct(ProductKind):
    """``bmm``: weights of several experts in one tensor, for example."""

    slots: Slots = (0, 1)
    factors: Slots = (0, 1)

    def save(self, node: Any, slots: Slots) -> NodeTensors | None:
        tensors = [held(node, "self" if slot else "mat2") for slot in slots]
        found = tuple(tensor for tensor in tensors if tensor is not None)
        return NodeTensors(found, None) if len(found) == len(slots) else None

    def gradients(self, saved: NodeTensors, dy: Tensor, slots: Slots) -> SlotGradients:
        others = [_conjugate(tensor.transpose(1, 2)) for tensor in saved.tensors]
        return [other.bmm(dy) if slot else dy.bmm(other) for slot, other in zip(slots, others, strict=True)]


class OneCall(ProductKind):
    """A node whose gradients come from one function of torch, which is told by a mask which of them to compute."""

    slots: Slots = (1, 2)
    together = True

    @abstractmethod
    def _call(self, saved: NodeTensors, dy: Tensor, mask: list[bool]) -> Any:
        """The gradients of input, weight and bias that are asked for."""

    def gradients(self, saved: NodeTensors, dy: Tensor, slots: Slots) -> SlotGradients:
        found = self._call(saved, dy, [False, 1 in slots, 2 in slots])
        return [found[slot] for slot in slots]

    def input_gradient(self, saved: NodeTensors, dy: Tensor) -> Tensor | None:
        return self._call(saved, dy, [True, False, False])[0]  # type: ignore[no-any-return]


class LayerNorm(OneCall):
    def save(self, node: Any, slots: Slots) -> NodeTensors | None:
        x, mean, rstd = (held(node, name) for name in ("input", "result1", "result2"))
        if x is None or mean is None or rstd is None:
            return None
        weights = [None if tensor is None else tensor.detach() for tensor in (node._saved_weight, node._saved_bias)]
        return NodeTensors((x, mean, rstd), (list(node._saved_normalized_shape), weights))

    def _call(self, saved: NodeTensors, dy: Tensor, mask: list[bool]) -> Any:
        (x, mean, rstd), (shape, weights) = saved
        return torch.ops.aten.native_layer_norm_backward(dy, x, shape, mean, rstd, *weights, mask)


class Convolution(OneCall):
    _form = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")

    def save(self, node: Any, slots: Slots) -> NodeTensors | None:
        x = held(node, "input")
        if x is None:
            return None
        form = [getattr(node, f"_saved_{name}") for name in self._form]
        return NodeTensors((x,), (node._saved_weight.detach(), node._saved_bias_sym_sizes_opt, form))

    def _call(self, saved: NodeTensors, dy: Tensor, mask: list[bool]) -> Any:
        (x,), (weight, bias_sizes, form) = saved
        return torch.ops.aten.convolution_backward(dy, x, weight, bias_sizes, *form, mask)


class EmbeddingProduct(ProductKind):
    slots: Slots = (0,)

    def save(self, node: Any, slots: Slots) -> NodeTensors | None:
        index = held(node, "indices")
        if index is None or node._saved_sparse:
            return None
        rows, padding = node._saved_weight_sym_argsize_0, node._saved_padding_idx
        padding = padding - (1 << 64) if padding >= 1 << 63 else padding
        return NodeTensors((index,), (rows, padding, node._saved_scale_grad_by_freq))

    def gradients(self, saved: NodeTensors, dy: Tensor, slots: Slots) -> SlotGradients:
        (index,), form = saved
        return [torch.ops.aten.embedding_dense_backward(dy, index, *form)]


class OwnFunction(ProductKind):
    """A ``Function`` with ``deferrable``."""

    together = True

    def __init__(self, slots: Slots) -> None:
        self.slots = slots

    def save(self, node: Any, slots: Slots) -> NodeTensors | None:
        if not _KNOWS_HOOKS or any(raw.unpack_hook is not None for raw in node._raw_saved_tensors or ()):
            return None  # its backward may look once, and the check has to look again
        works: list[Any] = []
        node.defer = works.append
        return NodeTensors((), works)

    def gradients(self, saved: NodeTensors, dy: Tensor, slots: Slots) -> SlotGradients:
        if len(saved.rest) != 1:
            raise RuntimeError(
                "the backward of a Function with `deferrable` must call `ctx.defer` once where it is there, "
                f"but called it {len(saved.rest)} times"
            )
        found = saved.rest[0]()
        return [found[slot] for slot in slots]


_KINDS: dict[str, ProductKind] = {
    "AddmmBackward0": MatrixProduct("mat1", "mat2", has_summand=True),
    "MmBackward0": MatrixProduct("self", "mat2", has_summand=False),
    "BmmBackward0": BatchedProduct(),
    "NativeLayerNormBackward0": LayerNorm(),
    "ConvolutionBackward0": Convolution(),
    "EmbeddingBackward0": EmbeddingProduct(),
}


def kind_of(node_type: type) -> ProductKind | None:
    """How the weight gradients of this type of node can be computed later, if we know."""
    if issubclass(node_type, BackwardCFunction):
        slots = getattr(getattr(node_type, "_forward_cls", None), "deferrable", ())
        return OwnFunction(tuple(slots)) if slots else None
    return _KINDS.get(node_type.__name__)


def forbids_inputs(node_type: type) -> bool:
    """Whether a ``Function`` refuses a backward that runs for some weights only: a checkpoint that is reentrant does,
    because what it does inside runs for all of them."""
    if not issubclass(node_type, BackwardCFunction):
        return False
    backward = inspect.unwrap(getattr(getattr(node_type, "_forward_cls", None), "backward", forbids_inputs))
    return any("is_checkpoint_valid" in name for name in getattr(getattr(backward, "__code__", None), "co_names", ()))


def carries(node_type: type) -> bool:
    """Whether a node of this type only passes on, in another form, what it gets, and saves no tensor for that: the
    transpose of a weight, its copy of lower precision."""
    return node_type.__name__ in _CARRIERS


_CARRIERS = frozenset(
    f"{name}Backward0"
    for name in (
        *("T", "Transpose", "Permute", "View", "UnsafeView", "ReshapeAlias", "ToCopy", "Alias", "Clone", "Expand"),
        *("Squeeze", "Unsqueeze", "Select", "Slice", "Split", "SplitWithSizes", "Unbind"),
    )
)
