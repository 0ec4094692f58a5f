"""Which weights a unit reads: the tables of executed steps obey the formulas, with no more copies than they need."""

from __future__ import annotations

import pytest
from runtime_models import build
from runtime_support import Case, check, pipeline

from vpipe import Pipeline
from vpipe.runtime.updates.weights import VersionedWeights
from vpipe.schedule.authors.pipedream import warm_up


def _most_versions(pipe: Pipeline) -> list[int]:
    """Per stage, the most versions that any replica held."""
    most = [0] * pipe.flow.num_stages
    for engine in pipe.engines:
        for index, stage in engine.stages.items():
            assert isinstance(stage.weights, VersionedWeights)
            most[index] = max(most[index], stage.weights.most_versions)
    return most


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_pipedream(num_ranks: int) -> None:
    """ver(s, k) = max(0, k - W_s), counted from the last drain; W_s + 1 copies; stage 0 is the stalest."""
    pipe = check(Case("pipedream", "plain", num_ranks, 9, num_steps=3))
    ahead = warm_up([1] * num_ranks)
    assert pipe.trace().versions() == {(s, k): max(0, k - ahead[s]) for s in range(num_ranks) for k in range(9)}
    assert ahead == [num_ranks - 1 - s for s in range(num_ranks)]
    assert _most_versions(pipe) == [w + 1 for w in ahead]


def test_vertical_sync() -> None:
    """Every stage reads what stage 0 read."""
    pipe = check(Case("pipedream", "plain", 3, 9, options={"vertical_sync": True}))
    assert pipe.trace().versions() == {(s, k): max(0, k - 2) for s in range(3) for k in range(9)}


def test_update_interval() -> None:
    """u units per update: ver(s, k) = max(0, k - W_s) // u."""
    pipe = check(Case("pipedream", "plain", 3, 12, options={"update_interval": 2}))
    versions = pipe.trace().versions()
    assert versions == {(s, k): max(0, k - (2 - s)) // 2 for s in range(3) for k in range(12)}
    assert max(_most_versions(pipe)) == 2


def test_2bw() -> None:
    """Batch t reads version max(0, t - 1) on all stages; two copies."""
    pipe = check(Case("pipedream-2bw", "plain", 3, 4, options={"num_batches": 4}))
    assert pipe.trace().versions() == {(s, k): max(0, k // 4 - 1) for s in range(3) for k in range(16)}
    assert max(_most_versions(pipe)) == 2


def test_replicas_count_in_rounds() -> None:
    pipe = check(Case("pipedream", "plain", 4, 8, replicas=(2, 1, 1)))
    ahead = warm_up([2, 1, 1])
    assert pipe.trace().versions() == {
        (s, k): max(0, k // r - ahead[s]) for s, r in enumerate((2, 1, 1)) for k in range(8)
    }
    assert _most_versions(pipe) == [w + 1 for w in ahead]


def test_optimizer_state_is_single_and_nothing_is_left_after_a_drain() -> None:
    case = Case("pipedream", "plain", 3, 6)
    model = build("plain", 10)
    pipe = pipeline(case, model, 3)
    pipe.train_step(*model.data(12, 0))
    for engine in pipe.engines:
        for index, stage in engine.stages.items():
            assert not stage.weights._leaves
            assert len(engine.updater.optimizers[index].state) == len(stage.weights.parameters)
            assert not stage.units
            for module in stage.modules.values():
                assert all(
                    parameter is slot for parameter, slot in zip(module.parameters(), _of(stage, module), strict=True)
                )


def _of(stage: object, module: object) -> list[object]:
    known = {id(parameter): parameter for parameter in stage.weights.parameters.values()}  # type: ignore[attr-defined]
    return [known[id(parameter)] for parameter in module.parameters()]  # type: ignore[attr-defined]
