"""PipeDream's profile text: read and written.

    node4 -- Embedding(32320, 1024) -- forward_compute_time=0.073, backward_compute_time=6.949,
             activation_size=6291456.0, parameter_size=132382720.000          (one line in the file)
    <tab>node1 -- node4

Times are milliseconds of one unit, sizes bytes. The text is a graph, a pipeline is a chain: the nodes are taken in a
topological order, and a boundary after a node carries every tensor that a later node still reads, once.
"""

from __future__ import annotations

import heapq
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vpipe.errors import UserError
from vpipe.plan.costs import LayerCost, Profile

_STAGE = re.compile(r"stage_id=(\d+)")
_KEYS = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")


@dataclass(frozen=True)
class GraphNode:
    """One line of the text. ``activation_sizes`` has several entries where the node yields several tensors."""

    id: str
    description: str
    forward_ms: float
    backward_ms: float
    activation_sizes: tuple[float, ...]
    parameter_size: float
    stage: int | None = None

    @property
    def is_input(self) -> bool:
        return self.description.startswith("Input")

    @property
    def activation_size(self) -> float:
        return sum(self.activation_sizes)

    def __str__(self) -> str:
        sizes = self.activation_sizes
        activation = f"{sizes[0]}" if len(sizes) == 1 else "[" + "; ".join(map(str, sizes)) + "]"
        stage = "" if self.stage is None else f" -- stage_id={self.stage}"
        return (
            f"{self.id} -- {self.description} -- forward_compute_time={self.forward_ms:.3f}, "
            f"backward_compute_time={self.backward_ms:.3f}, activation_size={activation}, "
            f"parameter_size={self.parameter_size:.3f}{stage}"
        )


@dataclass(frozen=True)
class Graph:
    """Nodes in the order of the text, and edges (writer, reader)."""

    nodes: tuple[GraphNode, ...]
    edges: tuple[tuple[str, str], ...]
    source: str = "graph text"

    def __str__(self) -> str:
        lines = [*map(str, self.nodes), *(f"\t{a} -- {b}" for a, b in self.edges)]
        return "\n".join(lines) + "\n"

    def order(self) -> tuple[GraphNode, ...]:
        """A topological order: of the nodes that are ready, the lowest-numbered first."""
        rank = {node.id: (_number(node.id), position) for position, node in enumerate(self.nodes)}
        of_id = {node.id: node for node in self.nodes}
        waits = dict.fromkeys(of_id, 0)
        readers: dict[str, list[str]] = {node: [] for node in of_id}
        for writer, reader in self.edges:
            waits[reader] += 1
            readers[writer].append(reader)
        ready = [(rank[node], node) for node, count in waits.items() if count == 0]
        heapq.heapify(ready)
        found: list[GraphNode] = []
        while ready:
            _, node = heapq.heappop(ready)
            found.append(of_id[node])
            for reader in readers[node]:
                waits[reader] -= 1
                if waits[reader] == 0:
                    heapq.heappush(ready, (rank[reader], reader))
        if len(found) < len(self.nodes):
            stuck = sorted((node for node, count in waits.items() if count), key=lambda node: rank[node])
            shown = ", ".join(stuck[:4]) + (", …" if len(stuck) > 4 else "")
            raise UserError(f"{self.source}: the graph has a cycle among {shown}; a pipeline needs an acyclic graph")
        return tuple(found)

    def to_profile(self, order: Sequence[GraphNode] | None = None) -> Profile:
        """The graph as a chain, in the given topological order or in ``order()``.

        An ``Input`` node is the loading of data, which is no work of a rank: its times do not count (nor do they in
        PipeDream's own optimizer).
        The text does not split the backward: a node with parameters is given half of it as weight gradient, one
        without none. It does not say what is saved either: a node is taken to save as much as it yields.
        The optimizer's state is taken to be as large as the parameters, as SGD's with momentum.
        """
        order = self.order() if order is None else order
        place = {node.id: index for index, node in enumerate(order)}
        last_read = {node.id: place[node.id] for node in order}
        for writer, reader in self.edges:
            last_read[writer] = max(last_read[writer], place[reader])
        layers = []
        for index, node in enumerate(order):
            crossing = sum(n.activation_size for n in order[: index + 1] if last_read[n.id] > index)
            forward, backward = (0.0, 0.0) if node.is_input else (node.forward_ms / 1e3, node.backward_ms / 1e3)
            weight_grad = backward / 2 if node.parameter_size else 0.0
            layers.append(
                LayerCost(
                    name=f"{node.id} {node.description.split('(')[0].strip()}",
                    forward=forward,
                    input_grad=backward - weight_grad,
                    weight_grad=weight_grad,
                    saved_bytes=round(node.activation_size),
                    boundary_bytes=round(crossing),
                    parameter_bytes=round(node.parameter_size),
                    optimizer_bytes=round(node.parameter_size),
                )
            )
        return Profile(layers=tuple(layers), model=self.source)


def load_graph(path: str | Path) -> Graph:
    """Reads PipeDream's text from a file."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such graph text") from None
    except OSError as error:
        raise UserError(f"{path}: the graph text cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not a graph text, since it is not UTF-8 ({error})") from None
    return parse_graph(text, str(path))


def load_profile(path: Path) -> Profile:
    """The chain of a graph in its own order."""
    return load_graph(path).to_profile()


def parse_graph(text: str, source: str = "graph text") -> Graph:
    """The graph that the text writes; every fault names the line."""
    nodes: list[GraphNode] = []
    edges: list[tuple[str, str]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        where = f"{source}:{number}"
        parts = line.strip().split(" -- ")
        if line.startswith("\t"):
            if len(parts) != 2:
                raise UserError(f"{where}: an edge is `<id> -- <id>`, not {line.strip()!r}")
            edges.append((parts[0], parts[1]))
        else:
            nodes.append(_parse_node(parts, where))
    known = [node.id for node in nodes]
    if not nodes:
        raise UserError(f"{source}: no node in the text; a node is `<id> -- <description> -- forward_compute_time=…`")
    for name in known:
        if known.count(name) > 1:
            raise UserError(f"{source}: node {name} is written twice")
    for edge in edges:
        for end in edge:
            if end not in known:
                raise UserError(f"{source}: edge {edge[0]} -- {edge[1]} names {end}, which is not a node of the text")
    return Graph(tuple(nodes), tuple(edges), source)


def export_graph(profile: Profile, stage_of: Sequence[int] | None = None) -> Graph:
    """A profile as a chain of PipeDream's nodes, with stages if given. What the text has no word for is lost."""
    nodes = tuple(
        GraphNode(
            id=f"node{index + 1}",
            description=layer.name,
            forward_ms=layer.forward * 1e3,
            backward_ms=(layer.input_grad + layer.weight_grad) * 1e3,
            activation_sizes=(float(layer.boundary_bytes),),
            parameter_size=float(layer.parameter_bytes),
            stage=None if stage_of is None else stage_of[index],
        )
        for index, layer in enumerate(profile.layers)
    )
    edges = tuple((a.id, b.id) for a, b in itertools.pairwise(nodes))
    return Graph(nodes, edges, profile.model or "profile")


def _parse_node(parts: list[str], where: str) -> GraphNode:
    if len(parts) not in (3, 4):
        raise UserError(f"{where}: a node has three or four parts between ` -- `, this line has {len(parts)}")
    values: dict[str, str] = {}
    for item in parts[2].split(", "):
        key, _, value = item.partition("=")
        values[key.strip()] = value
    missing = [key for key in _KEYS if key not in values]
    if missing:
        raise UserError(f"{where}: node {parts[0]} lacks {missing[0]}")
    stage = _STAGE.fullmatch(parts[3].strip()) if len(parts) == 4 else None
    if len(parts) == 4 and stage is None:
        raise UserError(f"{where}: the fourth part must be stage_id=<number>, not {parts[3]!r}")
    sizes = values["activation_size"].strip("[] ").split(";")
    return GraphNode(
        id=parts[0],
        description=parts[1],
        forward_ms=_number_of(values, "forward_compute_time", where),
        backward_ms=_number_of(values, "backward_compute_time", where),
        activation_sizes=tuple(_number_of({"activation_size": size}, "activation_size", where) for size in sizes),
        parameter_size=_number_of(values, "parameter_size", where),
        stage=int(stage[1]) if stage else None,
    )


def _number_of(values: dict[str, str], key: str, where: str) -> float:
    try:
        value = float(values[key])
    except ValueError:
        raise UserError(f"{where}: {key} is {values[key]!r}, which is no number") from None
    if not 0 <= value <= 2**53:
        raise UserError(f"{where}: {key} is {values[key].strip()[:40]}; it must be finite and zero or more")
    return value


def _number(name: str) -> int:
    digits = re.search(r"\d+$", name)
    return int(digits[0]) if digits else 0
