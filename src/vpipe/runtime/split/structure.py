"""What a graph of autograd's looks like: which weight gradients may wait, and who makes each contribution.

A weight's gradient may wait for ``W`` only if *every* edge that leads into its accumulator comes from a node that we
know how to compute later, or from nodes that pass on nothing else:

    x ── AddmmBackward0 ─┬─ AccumulateGrad (bias)                    may wait: one edge, from a known product
                         └─ TBackward0 ── AccumulateGrad (weight)    may wait: what T passes on is a known product alone
         MulBackward0 ───── AccumulateGrad (scale)                   I: no product is known

``I`` then runs for all accumulators but the waiting ones, so autograd itself leaves out exactly what ``W`` will add.
A graph is read anew for every unit, since a layer may do what it likes; equal graphs are analysed once.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge

from vpipe.runtime.split import products
from vpipe.runtime.split.products import ProductKind, Slots

ACCUMULATE: Any = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]
Signature = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Product:
    """A node whose weight gradients wait."""

    node: int
    kind: ProductKind
    slots: Slots
    direct: tuple[int, ...]
    """Of each slot, the number of the weight that it leads to by itself; -1 where autograd has to carry it, since there
    is more on the way, or since it is added to others."""
    linear: tuple[int, int] | None
    """If the product may be that of a Linear: the numbers of weight and bias, -1 for none."""
    weights: frozenset[int]
    """Numbers of all weights that it leads to."""


@dataclass(frozen=True, slots=True)
class Analysis:
    """Who makes which gradient; nodes are given by their place in the order of reading."""

    products: tuple[Product, ...]
    inputs: tuple[int, ...]
    """The nodes for which I runs: all ends of the graph but those that wait, and the products."""
    waiting: frozenset[int]
    """Numbers of the weights that wait."""
    accumulators: tuple[int, ...]
    """The nodes that add to these weights."""
    own_code: bool
    """Whether there are nodes in Python, which may add to weights unseen."""


@dataclass(frozen=True, slots=True)
class Reading:
    """A graph as it was read; ``signature`` says all that an analysis depends on."""

    nodes: list[Any]
    signature: Signature


def read(roots: Sequence[GradientEdge], weights: Mapping[int, int]) -> Reading:
    """Number all nodes from the roots on; ``weights`` gives the number of a weight by its id."""
    nodes: list[Any] = list(dict.fromkeys(root.node for root in roots))
    places = {node: place for place, node in enumerate(nodes)}
    signature: list[Any] = [len(nodes)]
    for node in nodes:  # grows
        kind = type(node)
        signature.append(kind)
        if kind is ACCUMULATE:
            signature.append(weights.get(id(node.variable), -1))
            continue
        for child, slot in node.next_functions:
            if child is None:
                signature.append(None)
                continue
            place = places.get(child)
            if place is None:
                place = places[child] = len(nodes)
                nodes.append(child)
            signature.append(place)
            signature.append(slot)
    return Reading(nodes, tuple(signature))


class Structure:
    """A graph, but for its tensors."""

    def __init__(self, signature: Signature) -> None:
        self.num_roots: int = signature[0]
        self.types: list[type] = []
        self.edges: list[list[int | None]] = []
        """Of each node, the places of the nodes behind its slots."""
        self.weights: dict[int, int] = {}
        """Accumulator → number of the weight; -1 is no weight of the stage."""
        items = iter(signature[1:])
        for item in items:
            if isinstance(item, type):
                self.types.append(item)
                self.edges.append([])
                if item is ACCUMULATE:
                    self.weights[len(self.types) - 1] = next(items)
            elif item is None:
                self.edges[-1].append(None)
            else:
                self.edges[-1].append(item)
                next(items)
        self.entering = self._entering()

    def _entering(self) -> list[list[tuple[int, int]]]:
        """Of each node, the (node, slot) that lead into it."""
        found: list[list[tuple[int, int]]] = [[] for _ in self.types]
        for place, children in enumerate(self.edges):
            for slot, child in enumerate(children):
                if child is not None:
                    found[child].append((place, slot))
        return found

    def analyse(self, left_out: Collection[int] = ()) -> Analysis:
        """Let every weight wait that may; those in ``left_out`` may not."""
        if any(_forbids_inputs(node_type) for node_type in self.types):
            return Analysis((), (), frozenset(), (), own_code=True)
        later = self._later(left_out)
        while weights := self._multiplied(later):
            left_out = {*left_out, *weights}
            later = self._later(left_out)
        found = []
        for place, kind in enumerate(_kind(node_type) for node_type in self.types):
            slots = tuple(slot for slot in self._slots(place, kind) if self.edges[place][slot] in later)
            if kind is not None and slots:
                direct = tuple(self._alone(self.edges[place][slot]) for slot in slots)
                linear = self._linear(place, kind, slots)
                found.append(Product(place, kind, slots, direct, linear, self._reached(place, slots)))
        products_at = {product.node for product in found}
        inputs = [
            place
            for place, children in enumerate(self.edges)
            if place in products_at or (place not in later and not any(child is not None for child in children))
        ]
        waiting = {place: number for place, number in self.weights.items() if place in later}
        return Analysis(
            tuple(found),
            tuple(inputs),
            frozenset(waiting.values()),
            tuple(waiting),
            any(issubclass(node_type, BackwardCFunction) for node_type in self.types),
        )

    def _later(self, left_out: Collection[int]) -> set[int]:
        """The largest set of accumulators and carriers into which only products, and each other, lead.

        Starts from all and takes away, until nothing changes, those that get something from elsewhere and those that
        pass something on to elsewhere.
        """
        later = {
            place
            for place, node_type in enumerate(self.types)
            if place >= self.num_roots
            and (
                _carries(node_type)
                if node_type is not ACCUMULATE
                else self.weights[place] >= 0 and self.weights[place] not in left_out
            )
        }
        size = -1
        while size != len(later):
            size = len(later)
            sources = self._sources(later)
            later = {
                place
                for place in later
                if all(node in later or (node, slot) in sources for node, slot in self.entering[place])
                and all(child is None or child in later for child in self.edges[place])
            }
        return later

    def _sources(self, later: set[int]) -> set[tuple[int, int]]:
        """The (node, slot) of products that may feed ``later``."""
        found: set[tuple[int, int]] = set()
        for place, node_type in enumerate(self.types):
            kind = _kind(node_type)
            slots = self._slots(place, kind)
            leading = [slot for slot in slots if self.edges[place][slot] in later]
            if kind is None or not leading:
                continue
            whole = [slot for slot in slots if self.edges[place][slot] is not None]
            if kind.together and leading != whole:
                continue
            found.update((place, slot) for slot in leading)
        return found

    def _multiplied(self, later: set[int]) -> set[int]:
        """Weights that are multiplied by weights: what is saved for the one is the other, which an update changes."""
        found: set[int] = set()
        for place, node_type in enumerate(self.types):
            kind = _kind(node_type)
            slots = [slot for slot in self._slots(place, kind) if self.edges[place][slot] in later]
            if kind is not None and kind.factors and all(slot in slots for slot in kind.factors):
                found |= self._reached(place, slots)
        return found

    def _slots(self, place: int, kind: ProductKind | None) -> list[int]:
        return [] if kind is None else [slot for slot in kind.slots if slot < len(self.edges[place])]

    def _reached(self, place: int, slots: Sequence[int]) -> frozenset[int]:
        """The weights behind these slots."""
        ahead = [self.edges[place][slot] for slot in slots]
        found: set[int] = set()
        while ahead:
            target = ahead.pop()
            if target is not None:
                found.update([self.weights[target]] if target in self.weights else [])
                ahead.extend(self.edges[target])
        return frozenset(found)

    def _alone(self, target: int | None) -> int:
        """The number of the weight whose accumulator this is, if one edge leads to it; otherwise -1."""
        if target is None or self.types[target] is not ACCUMULATE or len(self.entering[target]) > 1:
            return -1
        return self.weights[target]

    def _linear(self, place: int, kind: ProductKind, slots: Slots) -> tuple[int, int] | None:
        """The weights of ``x @ weight.t() + bias``, where nothing else is on the way."""
        if not isinstance(kind, products.MatrixProduct) or slots not in kind.linear_slots:
            return None
        transpose = self.edges[place][slots[-1]]
        assert transpose is not None, "a product leads somewhere"
        if self.types[transpose].__name__ != "TBackward0" or len(self.entering[transpose]) > 1:
            return None
        weight = self._alone(self.edges[transpose][0])
        bias = self._alone(self.edges[place][slots[0]]) if len(slots) > 1 else -1
        return None if weight < 0 or (len(slots) > 1 and bias < 0) else (weight, bias)


@cache
def _kind(node_type: type) -> ProductKind | None:
    return products.kind_of(node_type)


@cache
def _forbids_inputs(node_type: type) -> bool:
    return products.forbids_inputs(node_type)


@cache
def _carries(node_type: type) -> bool:
    return products.carries(node_type)
