"""Branching graphs: in which order their nodes form the chain that is cut.

A cut of a chain is a set of nodes that contains, with a node, all that it reads. Each topological order has only some
of these sets, and two branches side by side may be cut at places that no single order has both of. So the sets
themselves are the states, as in PipeDream's optimizer: over all of them a dynamic program finds the ones between which
the slowest stage is quickest,

    best(set, s stages) = min over subsets of  max( best(subset, s-1),  work(set - subset),  messages at the subset )

and the order that passes through these sets is planned beside the graph's own. The simulated step decides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from vpipe.compat.graph_text import Graph, GraphNode, load_graph
from vpipe.plan.answer import Plan
from vpipe.plan.costs import Profile

MOST_SETS = 4_000
"""Sets that are looked at; a graph with more keeps its own order."""


def plan_file(
    path: Path, num_stages: int, made: Callable[[Profile], Plan], fastest: float = 1.0
) -> tuple[Profile, Plan]:
    """``plan_graph`` of the graph in a file."""
    return plan_graph(load_graph(path), num_stages, made, fastest)


def plan_graph(
    graph: Graph, num_stages: int, made: Callable[[Profile], Plan], fastest: float = 1.0
) -> tuple[Profile, Plan]:
    """The best plan over the orders of a graph, and the chain that it is a plan of.

    What is proven for one order says nothing of the others, so the bound of a graph with branches is one that knows no
    order: all work on all ranks, each as fast as the ``fastest``, and one unit on its way through all layers.
    """
    own = graph.to_profile()
    best = own, made(own)
    nodes = graph.order()
    if all((a.id, b.id) in set(graph.edges) for a, b in pairwise(nodes)):
        return best  # a chain: this is its only order
    through = order_through(graph, num_stages)
    if through is not None:
        other = graph.to_profile(order=through)
        found = made(other)
        if found.step_time < best[1].step_time:
            best = other, found
    return best[0], replace(best[1], lower_bound=_any_order(*best, fastest))


def _any_order(profile: Profile, found: Plan, fastest: float) -> float:
    rows = found.rows / profile.microbatch_rows
    work = sum(layer.total for layer in profile.layers) * rows / found.total_ranks
    way = sum(layer.forward + layer.input_grad for layer in profile.layers)
    way *= found.microbatch_rows / profile.microbatch_rows
    return (work if found.asynchronous else max(work, way)) / fastest * (1 - 1e-9)


def order_through(graph: Graph, num_stages: int) -> list[GraphNode] | None:
    """A topological order with the cuts between which the slowest of ``num_stages`` stages is quickest."""
    nodes = graph.order()
    sets = _closed_sets(graph, nodes)
    if sets is None or num_stages < 2 or num_stages > len(nodes):
        return None
    chosen = _between(nodes, sets, num_stages)
    if chosen is None:
        return None
    found: list[GraphNode] = []
    for members in chosen:
        found += [node for index, node in enumerate(nodes) if members >> index & 1 and node not in found]
    return found


def _closed_sets(graph: Graph, nodes: tuple[GraphNode, ...]) -> list[int] | None:
    """Every set that contains, with a node, all that it reads, small ones first; as bits over ``nodes``."""
    place = {node.id: index for index, node in enumerate(nodes)}
    needs = [0] * len(nodes)
    for writer, reader in graph.edges:
        needs[place[reader]] |= 1 << place[writer]
    layer, seen = {0}, [0]
    while layer:
        layer = {
            members | 1 << index
            for members in layer
            for index in range(len(nodes))
            if not members >> index & 1 and needs[index] & members == needs[index]
        }
        seen += sorted(layer)
        if len(seen) > MOST_SETS:
            return None
    return seen


def _between(nodes: tuple[GraphNode, ...], sets: list[int], num_stages: int) -> list[int] | None:
    """The sets at which to cut, the last of all nodes included."""
    seconds = [0.0 if node.is_input else node.forward_ms + node.backward_ms for node in nodes]
    table = np.array([[members >> index & 1 for index in range(len(nodes))] for members in sets], dtype=np.float64)
    work = table @ np.array(seconds)
    sizes = table.sum(axis=1)
    inside = table.astype(bool)
    best = np.full(len(sets), np.inf)
    best[0] = 0.0
    origins = []
    for _ in range(num_stages):
        now, origin = np.full(len(sets), np.inf), np.zeros(len(sets), np.int64)
        for index in range(1, len(sets)):
            members = inside[index]
            subsets = np.flatnonzero((sizes[:index] < sizes[index]) & np.isfinite(best[:index]))
            subsets = subsets[~(inside[subsets] & ~members).any(axis=1)]
            if len(subsets):
                value = np.maximum(best[subsets], work[index] - work[subsets])
                least = int(value.argmin())
                now[index], origin[index] = value[least], subsets[least]
        best = now
        origins.append(origin)
    if not np.isfinite(best[-1]):
        return None
    place, found = len(sets) - 1, []
    for origin in reversed(origins):
        found.append(sets[place])
        place = int(origin[place])
    return found[::-1]
