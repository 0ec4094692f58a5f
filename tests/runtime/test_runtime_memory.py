"""What stays alive: counted, not timed."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from runtime_models import CLASSES, build
from runtime_support import Case, pipeline
from torch import Tensor, nn

from vpipe import Pipeline
from vpipe.runtime.engine import Engine
from vpipe.runtime.memory.live import LiveBytes

WIDE = 64


@pytest.fixture(autouse=True)
def quick_collections() -> None:
    """Garbage is looked for in what a test makes, not in what others have imported."""
    gc.collect()
    gc.freeze()


def _peaks(num_microbatches: int, schedule: str, recompute: float = 0.0) -> int:
    """The most live bytes of a step on all ranks together, the batch itself not counted."""
    torch.manual_seed(0)
    layers = [nn.Linear(WIDE, WIDE) for _ in range(8)]
    pipe = Pipeline(
        layers,
        nn.functional.mse_loss,
        schedule=schedule,
        num_microbatches=num_microbatches,
        num_ranks=2,
        optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1),
        recompute=recompute,
    )
    x, y = torch.randn(32 * num_microbatches, WIDE), torch.randn(32 * num_microbatches, WIDE)
    tracker = LiveBytes()
    run = Engine.run

    def counted(self: Engine, *arguments: Any) -> Any:
        with tracker:  # modes belong to a thread: each rank enters it
            return run(self, *arguments)

    pipe.train_step(x, y)
    Engine.run = counted  # type: ignore[method-assign]
    try:
        gc.collect()
        pipe.train_step(x, y)
    finally:
        Engine.run = run  # type: ignore[method-assign]
    return tracker.peak


def test_gpipe_holds_no_terms_of_a_loss() -> None:
    """The number that mse_loss returns lies in memory of the size of the output; every unit's was kept to the end."""
    unit = 32 * WIDE * 4
    per_unit = (_peaks(40, "gpipe") - _peaks(8, "gpipe")) / (40 - 8)
    assert per_unit < 8.5 * unit  # 3 inputs of layers on the first rank; 4 inputs and the output on the second


@pytest.mark.parametrize("recompute", [0.0, 1.0])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-v", "pipedream"])
def test_1f1b_and_its_kin_do_not_grow_with_m(schedule: str, recompute: float) -> None:
    """Both ranks are counted together: where their peaks coincide it is twice that of one, and no more however many units
    come (eight times as many here)."""
    assert _peaks(64, schedule, recompute) <= 2 * _peaks(8, schedule, recompute)


def test_gpipe_does_and_the_counter_sees_it() -> None:
    assert _peaks(64, "gpipe") > 3 * _peaks(8, "gpipe")


def test_recompute_keeps_less() -> None:
    assert _peaks(8, "gpipe", 1.0) < 0.7 * _peaks(8, "gpipe")


def _refs(kept: list[weakref.ref[Tensor]]) -> list[Tensor]:
    gc.collect()
    return [tensor for ref in kept if (tensor := ref()) is not None]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1", "zb-v", "pipedream"])
def test_logits_are_not_kept(schedule: str) -> None:
    """When a unit's loss is known, its logits live only as long as its own backward needs them."""
    model = build("plain", 10)
    seen: list[weakref.ref[Tensor]] = []
    most = 0

    def loss(output: Tensor, target: Tensor) -> Tensor:
        nonlocal most
        assert output.shape[1] == CLASSES
        most = max(most, len(_refs(seen)))
        seen.append(weakref.ref(output))
        return output.sum() * 0 + output.square().mean()

    pipe = Pipeline(
        model.layers,
        loss,
        schedule=schedule,
        num_microbatches=6,
        num_ranks=2,
        optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1),
    )
    pipe.train_step(*model.data(12, 0))
    assert len(seen) == pipe.programs.num_units
    assert not _refs(seen)
    if schedule in ("1f1b", "pipedream"):
        assert most <= 1


def test_an_output_is_dropped_after_its_send() -> None:
    """A stage whose last operation does not need its result keeps only the gradient edge."""

    class Ends(nn.Module):
        """Adds: autograd saves neither the sum nor its parts."""

        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(WIDE))

        def forward(self, x: Tensor) -> Tensor:
            y = x + self.bias
            given.append(weakref.ref(y))
            return y

    given: list[weakref.ref[Tensor]] = []
    alive: list[int] = []
    send = Engine._send_outputs

    def counted(self: Engine, *arguments: Any) -> None:
        send(self, *arguments)
        if self.rank == 0:
            alive.append(len(_refs(given)))

    Engine._send_outputs = counted  # type: ignore[method-assign]
    try:
        pipe = Pipeline(
            [Ends(), nn.Linear(WIDE, WIDE)], nn.functional.mse_loss, schedule="gpipe", num_microbatches=4, num_ranks=2
        )
        pipe.train_step(torch.randn(8, WIDE), torch.randn(8, WIDE), update=False)
    finally:
        Engine._send_outputs = send  # type: ignore[method-assign]
    assert alive == [0, 0, 0, 0]


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v", "1f1b", "pipedream"])
def test_gradients_carry_no_graph(schedule: str) -> None:
    """A weight gradient that is computed outside of a backward must not remember how."""
    model = build("plain", 10)
    pipe = pipeline(Case(schedule, "plain", 2, 4), model, 2)
    kept: list[Tensor] = []
    for engine in pipe.engines:
        for optimizer in engine.updater.optimizers.values():
            optimizer.register_step_pre_hook(
                lambda o, *_: kept.extend(p.grad for group in o.param_groups for p in group["params"])
            )
    pipe.train_step(*model.data(8, 0))
    assert kept
    assert not any(gradient.requires_grad for gradient in kept)


def test_nothing_is_left_after_a_step() -> None:
    model = build("skips", 10)
    pipe = pipeline(Case("zb-v", "skips", 2, 4, recompute=0.5), model, 2)
    pipe.train_step(*model.data(8, 0))
    assert len(pipe._compiled) == 2
    assert all(h.payload is None for each in pipe._compiled.values() for h in each.tasks._hops.values())
    for engine in pipe.engines:
        for stage in engine.stages.values():
            assert not stage.units
            assert stage.queue is not None
            assert not stage.queue._waiting
    assert not pipe.engines[0].transport.hub.mail  # type: ignore[attr-defined]


def test_nothing_is_left_after_a_step_that_failed() -> None:
    class Tired(nn.Linear):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            if self.calls == 3:
                raise RuntimeError("no more")
            return super().forward(x)

    layers = [nn.Linear(4, 4), nn.Linear(4, 4), Tired(4, 4), nn.Linear(4, 4)]
    pipe = Pipeline(layers, nn.functional.mse_loss, schedule="zb-v", num_microbatches=4, num_ranks=2)
    batch = torch.randn(8, 4)
    with pytest.raises(RuntimeError, match="no more"):
        pipe.train_step(batch, batch, update=False)
    assert all(h.payload is None for each in pipe._compiled.values() for h in each.tasks._hops.values())
    assert not any(stage.units for engine in pipe.engines for stage in engine.stages.values())


def test_live_bytes_are_what_operations_make() -> None:
    weight, x = torch.randn(8, 8), torch.randn(4, 8)
    with LiveBytes() as live:
        y = x @ weight.detach().t()  # views of what existed count nothing
        assert live.now == live.peak == 4 * 8 * 4
        z = y + 1
        del y
    assert (live.now, live.peak) == (z.nbytes, 2 * z.nbytes)
