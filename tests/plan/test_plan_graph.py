"""PipeDream's graph text: real profiles, branches, cycles."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from vpipe.compat.graph_orders import plan_graph
from vpipe.compat.graph_text import Graph, GraphNode, export_graph, load_graph, parse_graph
from vpipe.errors import UserError
from vpipe.plan.costs import Profile
from vpipe.plan.memory import Options
from vpipe.plan.planner import plan
from vpipe.plan.predict import Machine, Pipe, stage_facts
from vpipe.plan.shortfall import shortfall

PROFILES = Path(__file__).parents[3] / "shared" / "data" / "profiles"
NAMES = ["gnmt", "resnet50", "vgg16"]


def node(name: str, size: float = 1.0, forward: float = 1.0, parameters: float = 0.0) -> str:
    return (
        f"{name} -- Layer({name}) -- forward_compute_time={forward:.3f}, backward_compute_time={2 * forward:.3f}, "
        f"activation_size={size}, parameter_size={parameters:.3f}"
    )


#        ┌─▶ node2 ─▶ node3 ─┐
#   node1                    node5       a skip from node1 to node5 beside the chain
#        └─▶ node4 ──────────┘
BRANCHED = "\n".join(
    [*(node(f"node{i}", size=10.0**i) for i in (3, 1, 2, 5, 4))]
    + [f"\tnode{a} -- node{b}" for a, b in ((1, 2), (2, 3), (3, 5), (1, 4), (4, 5))]
)


def test_a_boundary_carries_every_tensor_that_is_still_read() -> None:
    profile = parse_graph(BRANCHED).to_profile()
    assert [layer.name.split()[0] for layer in profile.layers] == ["node1", "node2", "node3", "node4", "node5"]
    #        after node1: 1;  node2: 1 and 2;  node3: 1 and 3;  node4: 3 and 4;  node5: nothing
    assert [layer.boundary_bytes for layer in profile.layers] == [10, 110, 1010, 11000, 0]


def test_a_cycle_is_refused() -> None:
    with pytest.raises(UserError, match="cycle among node2, node3"):
        parse_graph(BRANCHED + "\n\tnode3 -- node2").order()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no node"),
        (node("a") + "\n\ta -- b", "names b, which is not a node"),
        (node("a") + "\n" + node("a"), "written twice"),
        ("a -- b", "three or four parts"),
        (node("a").replace("1.000", "nan", 1), "forward_compute_time is nan"),
        (node("a").replace("parameter_size", "parameters"), "lacks parameter_size"),
        (node("a") + " -- stage=1", "stage_id"),
    ],
)
def test_faults_name_the_line(text: str, words: str) -> None:
    with pytest.raises(UserError) as error:
        parse_graph(text, "model.txt")
    assert words in str(error.value)
    assert "model.txt" in str(error.value)


def _real(name: str) -> Profile:
    path = PROFILES / f"{name}.graph.txt"
    if not path.exists():
        pytest.skip(f"{path} is not on this machine")
    return load_graph(path).to_profile()


@pytest.mark.parametrize("name", NAMES)
def test_real_profiles_survive_the_text(name: str) -> None:
    _real(name)
    graph = load_graph(PROFILES / f"{name}.graph.txt")
    again = parse_graph(str(graph), graph.source)
    assert again == graph
    assert again.to_profile() == graph.to_profile()


@pytest.mark.parametrize("name", NAMES)
def test_a_chain_survives_the_export(name: str) -> None:
    profile = _real(name)
    stages = [min(3, 4 * i // profile.num_layers) for i in range(profile.num_layers)]
    again = parse_graph(str(export_graph(profile, stages)))
    assert [n.stage for n in again.nodes] == stages
    chain = again.to_profile()
    assert [x.boundary_bytes for x in chain.layers[:-1]] == [x.boundary_bytes for x in profile.layers[:-1]]
    for ours, theirs in zip(profile.layers, chain.layers, strict=True):
        assert theirs.total == pytest.approx(ours.total, abs=1e-6)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("num_stages", [2, 4, 8])
def test_real_profiles_are_planned_close_to_their_bounds(name: str, num_stages: int) -> None:
    profile = _real(name)
    loose = plan(profile, num_stages, num_microbatches=16)
    assert loose.gap <= 0.03
    peak = max(terms.total for terms in loose.prediction.stage_memory)
    facts = stage_facts(Pipe.of("1f1b", num_stages, 16).program, Machine.of(num_stages, 1.0))
    least = shortfall(profile, facts, Options()).missing + 1
    tight = plan(profile, num_stages, num_microbatches=16, memory=least + 0.2 * (peak - least))
    assert 0 <= tight.gap <= 0.5
    assert tight.step_time >= loose.step_time * (1 - 1e-9)


def test_cutting_a_wide_edge_costs_its_transfer() -> None:
    profile = parse_graph(BRANCHED).to_profile()
    slow = replace(profile, link_bandwidth=100_000.0)
    found = plan(slow, 2, num_microbatches=8, schedule="gpipe")
    assert found.layout.cuts == (0, 2, 5)  # the even cut after node3 would carry ten times as much


def test_loading_data_is_no_work_of_a_rank() -> None:
    """An Input node of 19 ms once got a rank of its own."""
    text = "\n".join(
        [node("node1", forward=19.0).replace("Layer(", "Input("), *(node(f"node{i}", forward=2.0) for i in range(2, 6))]
    )
    text += "".join(f"\n\tnode{i} -- node{i + 1}" for i in range(1, 5)) + "\n"
    profile = parse_graph(text).to_profile()
    assert profile.layers[0].total == 0
    assert plan(profile, 2, num_microbatches=4).layout.counts == (3, 2)


def two_branches() -> str:
    """Two branches side by side, whose heavy nodes stand at different places."""
    times = {"node1": 1.0, "node2": 6.0, "node3": 1.0, "node4": 1.0, "node5": 6.0, "node6": 1.0}
    edges = [("node1", "node2"), ("node2", "node3"), ("node1", "node4"), ("node4", "node5"), ("node3", "node6")]
    edges.append(("node5", "node6"))
    lines = [node(name, forward=time) for name, time in times.items()]
    return "\n".join([*lines, *(f"\t{a} -- {b}" for a, b in edges)]) + "\n"


def every_order(graph: Graph) -> list[list[GraphNode]]:
    """All topological orders, by trying all permutations."""
    writers = {each.id: {a for a, b in graph.edges if b == each.id} for each in graph.nodes}
    return [
        list(order)
        for order in itertools.permutations(graph.nodes)
        if all(writers[each.id] <= {before.id for before in order[:i]} for i, each in enumerate(order))
    ]


def test_orders_of_a_branching_graph_are_searched() -> None:
    graph = parse_graph(two_branches())
    for count in (2, 3):
        profile, found = plan_graph(
            graph, count, lambda one, p=count: plan(one, p, num_microbatches=8, schedule="pipedream")
        )
        best = min(
            plan(graph.to_profile(order=order), count, num_microbatches=8, schedule="pipedream").step_time
            for order in every_order(graph)
        )
        assert found.step_time == pytest.approx(best)
        assert found.lower_bound <= best
        assert sorted(layer.name for layer in profile.layers) == sorted(x.name for x in graph.to_profile().layers)


def test_resnet50_on_eight_ranks_gains_by_its_order() -> None:
    _real("resnet50")
    graph = load_graph(PROFILES / "resnet50.graph.txt")
    own = plan(graph.to_profile(), 8, num_microbatches=16, schedule="pipedream")
    _, found = plan_graph(graph, 8, lambda one: plan(one, 8, num_microbatches=16, schedule="pipedream"))
    assert found.step_time < own.step_time * 0.98
