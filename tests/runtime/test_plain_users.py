"""What a user of plain torch expects of weights, modes and numbers, and gets: against plain torch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from runtime_gloo import Worlds
from runtime_plain import D, accumulate, batch, gradients, linears, mse, run, same, seeded, sgd, weights
from torch import Tensor, nn

from vpipe import Layer, Pipeline, UserError
from vpipe.layer import TiedWeight
from vpipe.runtime.microbatches import Microbatches


class Scaled(nn.Module):
    """A loss that learns."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((D,), 0.5))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return (output * self.scale - target).pow(2).mean()


@pytest.mark.parametrize("options", [{}, {"recompute": 1.0}, {"swap": 1.0}, {"schedule": "zb-h1"}])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_parameters_of_the_loss_are_trained(num_ranks: int, options: dict[str, Any]) -> None:
    x, y = batch()
    plain = [*linears(4), Scaled()]
    loss = Scaled()
    pipe = Pipeline(linears(4), loss, num_ranks=num_ranks, optimizer=sgd, clip_norm=0.1, **options)
    everything = [p for module in plain for p in module.parameters()]
    optimizer = sgd(everything)
    for _ in range(2):
        expected = accumulate(plain[:4], plain[4], x, y, 4)
        nn.utils.clip_grad_norm_(everything, 0.1)
        optimizer.step()
        optimizer.zero_grad()
        assert pipe.train_step(x, y) == expected
        same(pipe.state_dict(), weights(plain))
    assert pipe.modules()[4] is loss
    assert not torch.equal(loss.scale, torch.full((D,), 0.5))


def test_parameters_of_the_loss_are_trained_under_pipedream_and_in_replicas() -> None:
    x, y = batch()
    pipe = Pipeline(linears(2), Scaled(), schedule="pipedream", num_ranks=2, optimizer=sgd)
    pipe.train_step(x, y)
    plain, loss = linears(2), Scaled()
    old = [copy.deepcopy(plain[0])]
    for unit, (part, goal) in enumerate(zip(x.chunk(4), y.chunk(4), strict=True)):
        first = old[max(0, unit - 1)]
        first.zero_grad()
        loss(plain[1](first(part)), goal).backward()
        for parameter, stale in zip(plain[0].parameters(), first.parameters(), strict=True):
            parameter.grad = stale.grad
        for module in (*plain, loss):
            sgd(module.parameters()).step()
            module.zero_grad()
        old.append(copy.deepcopy(plain[0]))
    same(pipe.state_dict(), weights([*plain, loss]))
    replicas = Pipeline(linears(2), Scaled(), num_ranks=4, replicas=2, optimizer=sgd)
    replicas.train_step(x, y)
    states = [stage.owned[2].scale for e in replicas.engines for s, stage in e.stages.items() if s == 1]
    assert states[0] is not states[1]
    assert torch.equal(states[0], states[1])


class Statistics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(D, D), nn.BatchNorm1d(D)

    def forward(self, x: Tensor) -> Any:
        return self.norm(self.linear(x))


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_eval_mode_of_a_part_is_kept(num_ranks: int) -> None:
    x, y = batch()
    plain, layers = (seeded(lambda: [Statistics(), Statistics()]) for _ in range(2))
    plain[0].norm.eval()
    layers[0].norm.eval()
    pipe = Pipeline(layers, mse, num_ranks=num_ranks)
    for _ in range(2):
        assert pipe.train_step(x, y, update=False) == accumulate(plain, mse, x, y, 4)
        pipe.evaluate(x, y)
        pipe.forward(x)
    same(pipe.gradients(), gradients(plain))
    same(pipe.state_dict(), weights(plain))
    assert [layer.norm.training for layer in layers] == [False, True]


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_parameter_that_is_unfrozen_later_trains(schedule: str, num_ranks: int) -> None:
    x, y = batch()
    plain, layers = linears(2), linears(2)
    optimizer = torch.optim.Adam([p for module in plain for p in module.parameters()], lr=0.1)
    for module in (plain[0], layers[0]):
        module.requires_grad_(False)
    pipe = Pipeline(
        layers, mse, schedule=schedule, num_ranks=num_ranks, optimizer=lambda ps: torch.optim.Adam(ps, lr=0.1)
    )
    for step in range(4):
        if step == 2:
            plain[0].weight.requires_grad_()
            layers[0].weight.requires_grad_()
        assert pipe.train_step(x, y) == accumulate(plain, mse, x, y, 4)
        optimizer.step()
        optimizer.zero_grad()
        same(pipe.state_dict(), weights(plain))


def test_replicas_follow_what_the_user_freezes_and_switches() -> None:
    pipe = Pipeline(seeded(lambda: [Statistics(), Statistics()]), mse, num_ranks=4, replicas=2, optimizer=sgd)
    pipe.modules()[0].norm.eval()
    pipe.modules()[0].linear.requires_grad_(False)
    before = pipe.modules()[0].linear.weight.clone()
    pipe.train_step(*batch(16))
    copies = [stage.modules[0] for engine in pipe.engines for stage in engine.stages.values() if 0 in stage.modules]
    assert [part.norm.training for part in copies] == [False, False]
    assert all(torch.equal(part.linear.weight, before) for part in copies)


@pytest.mark.parametrize("layer", [nn.Linear(D, D).requires_grad_(False), nn.Tanh()])
def test_the_optimizer_of_a_frozen_stage_takes_a_learning_rate_schedule(layer: nn.Module) -> None:
    x, y = batch()
    pipe = Pipeline([copy.deepcopy(layer), nn.Linear(D, D)], mse, num_ranks=2, optimizer=sgd)
    schedules = [torch.optim.lr_scheduler.StepLR(made, 1, 0.5) for made in pipe.optimizers.values()]
    for _ in range(2):
        pipe.train_step(x, y)
        for each in schedules:
            each.step()
    assert [made.param_groups[0]["lr"] for made in pipe.optimizers.values()] == [0.025, 0.025]


def _statistics_of_replicas(_: int = 0) -> list[Tensor]:
    pipe = Pipeline(seeded(lambda: [Statistics(), Statistics()]), mse, num_microbatches=4, replicas=2, optimizer=sgd)
    pipe.train_step(*batch(16))
    return [pipe.state_dict()[f"{layer}.norm.running_mean"] for layer in pipe.modules()]


def test_statistics_of_replicas_are_those_of_the_first() -> None:
    layers = seeded(lambda: [Statistics(), Statistics()])
    plain = copy.deepcopy(layers)
    pipe = Pipeline(layers, mse, num_microbatches=4, num_ranks=4, replicas=2, optimizer=sgd)
    x, y = batch(16)
    pipe.train_step(x, y)
    for part in x.chunk(8)[::2]:  # each replica has four units; those of replica 0 are even
        run(plain, part)
    found = [stage.modules for engine in pipe.engines for stage in engine.stages.values()]
    for layer in (0, 1):
        norms = [modules[layer].norm for modules in found if layer in modules]
        assert torch.equal(norms[0].running_mean, plain[layer].norm.running_mean)
        assert torch.equal(norms[0].running_mean, norms[1].running_mean)


@pytest.mark.slow
def test_statistics_of_replicas_between_processes(worlds: Worlds) -> None:
    plain = seeded(lambda: [Statistics(), Statistics()])
    for part in batch(16)[0].chunk(8)[::2]:
        run(plain, part)
    answers = worlds.run(4, _statistics_of_replicas, 0)
    means = [layer.norm.running_mean for layer in plain]
    for (mine,) in answers:
        assert any(torch.equal(mine, mean) for mean in means)


class Noise(nn.Module):
    """Random in every mode."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Any:
        return self.linear(nn.functional.dropout(x, 0.5, training=True))


def test_evaluation_with_random_layers_is_seeded() -> None:
    x, y = batch()
    found = []
    for num_ranks in (1, 2, 4):
        pipe = Pipeline(seeded(lambda: [Noise() for _ in range(4)]), mse, num_ranks=num_ranks, optimizer=sgd, seed=3)
        torch.manual_seed(num_ranks)
        state = torch.get_rng_state()
        found += [pipe.evaluate(x, y), pipe.evaluate(x, y)]
        assert torch.equal(torch.get_rng_state(), state)
    assert len(set(found)) == 1
    other = Pipeline(seeded(lambda: [Noise() for _ in range(4)]), mse, seed=4)
    assert other.evaluate(x, y) != found[0]
    assert pipe.train_step(x, y) != found[0], "other numbers than in training"


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_a_finite_gradient_whose_norm_overflows_updates(schedule: str) -> None:
    x = torch.randn(4, D) * 1e10
    for number, updates in ((1e12, True), (1e38, False)):
        layers = [nn.Linear(D, D, bias=False)]
        before = layers[0].weight.clone()
        pipe = Pipeline(
            layers, lambda output, _, number=number: (output * number).sum(), schedule=schedule, num_ranks=1,
            num_microbatches=1, optimizer=lambda ps: torch.optim.SGD(ps, lr=1e-22),
        )  # fmt: skip
        pipe.train_step(x, x)
        assert torch.equal(layers[0].weight, before) is not updates
        assert pipe.engines[0].updater.num_skipped == (0 if updates else 1)


def test_clipping_a_norm_that_overflows_is_torchs() -> None:
    x = torch.randn(4, D) * 1e10
    plain, layers = linears(1), linears(1)
    (run(plain, x) * 1e12).sum().backward()
    nn.utils.clip_grad_norm_(plain[0].parameters(), 1.0)
    torch.optim.SGD(plain[0].parameters(), lr=0.1, weight_decay=0.5).step()
    pipe = Pipeline(
        layers, lambda output, _: (output * 1e12).sum(), num_microbatches=1, num_ranks=1, clip_norm=1.0,
        optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1, weight_decay=0.5),
    )  # fmt: skip
    pipe.train_step(x, x)
    same(pipe.state_dict(), weights(plain))


class Of(nn.Module):
    """A product in another number format, whose weight may be complex."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(D, D, dtype=dtype)), nn.Parameter(torch.zeros(D))

    def forward(self, x: Tensor) -> Any:
        return (x.to(self.weight.dtype) @ self.weight).abs().float() + self.bias


@pytest.mark.parametrize("others", [torch.complex64, torch.float64, torch.complex128])
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_clipping_adds_norms_of_several_number_formats_as_torch_does(others: torch.dtype, num_ranks: int) -> None:
    x, y = batch()
    for seed in range(8):
        torch.manual_seed(seed)
        plain = [Of(others), Of(torch.float32), Of(others), Of(torch.bfloat16), Of(others), Of(torch.float32)]
        pipe = Pipeline(copy.deepcopy(plain), mse, num_ranks=num_ranks, clip_norm=0.1, optimizer=sgd)
        assert pipe.train_step(x, y) == accumulate(plain, mse, x, y, 4)
        everything = [p for module in plain for p in module.parameters()]
        nn.utils.clip_grad_norm_(everything, 0.1)
        sgd(everything).step()
        same(pipe.state_dict(), weights(plain))


def test_counts_and_weights_that_mean_nothing_are_refused() -> None:
    x, y = batch()
    pipe = Pipeline(linears(2), mse, num_ranks=2, optimizer=sgd)
    before = {name: tensor.clone() for name, tensor in pipe.state_dict().items()}
    for number in (0, -1):
        with pytest.raises(UserError, match=f"num_microbatches is {number}; give at least 1"):
            pipe.train_step(x, y, num_microbatches=number)
        with pytest.raises(UserError, match="num_microbatches"):
            Pipeline(linears(2), mse, num_ranks=2, num_microbatches=number)
    for weight in (float("nan"), float("inf")):
        with pytest.raises(UserError, match=f"weight of a batch is {weight}; give a finite number"):
            pipe.train_step(x, y, weight=weight)
    units = [x[at : at + 2] for at in range(0, 8, 2)]
    for bad in ([0.5, 0.5], [0.25, 0.25, 0.25, float("nan")]):
        with pytest.raises(UserError, match=r"weights .*give 4 finite numbers"):
            pipe.train_step(Microbatches(units.__getitem__, bad), Microbatches(units.__getitem__, bad))
    same(pipe.state_dict(), before)


class Fails(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.left = nn.Linear(D, D), 1 << 30

    def forward(self, x: Tensor) -> Any:
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("out of coffee")
        return self.linear(x)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_pipedream_after_a_failure_is_loaded_before_it_goes_on(num_ranks: int) -> None:
    x, y = batch()
    layers = seeded(lambda: [nn.Linear(D, D), Fails()])
    pipe = Pipeline(layers, mse, schedule="pipedream", num_ranks=num_ranks, optimizer=sgd)
    twin = Pipeline(
        seeded(lambda: [nn.Linear(D, D), Fails()]), mse, schedule="pipedream", num_ranks=num_ranks, optimizer=sgd
    )
    pipe.train_step(x, y)
    twin.train_step(x, y)
    state = {name: tensor.clone() for name, tensor in pipe.state_dict().items()}
    layers[1].left = 2
    with pytest.raises(RuntimeError, match="out of coffee"):
        pipe.train_step(x, y)
    layers[1].left = 1 << 30
    for call in (lambda: pipe.train_step(x, y), lambda: pipe.evaluate(x, y), lambda: pipe.forward(x)):
        with pytest.raises(UserError, match=r"step 1 failed after some of its updates .*load_state_dict"):
            call()
    pipe.load_state_dict(state)
    rates: list[int] = []
    pipe.set_learning_rate(lambda update: rates.append(update) or 0.1)  # type: ignore[func-returns-value]
    assert pipe.train_step(x, y) == twin.train_step(x, y)
    assert sorted(rates)[:num_ranks] == [4] * num_ranks
    same(pipe.state_dict(), twin.state_dict())


def test_one_module_at_two_places() -> None:
    """One parameter, one sum: with one microbatch to the bit, with several but for the order of additions."""

    def make() -> list[nn.Module]:
        torch.manual_seed(1)
        shared, wrapped = nn.Linear(D, D), nn.Linear(D, D)
        return [shared, nn.Sequential(wrapped, nn.Tanh()), shared, nn.Sequential(wrapped), shared]

    x, y = batch()
    for num_ranks in (1, 2, 5):
        for units in (1, 4):
            plain, layers = make(), make()
            pipe = Pipeline(layers, mse, num_ranks=num_ranks, num_microbatches=units, optimizer=sgd)
            assert pipe.train_step(x, y) == accumulate(plain, mse, x, y, units)
            sgd(nn.ModuleList(plain).parameters()).step()
            state = pipe.state_dict()
            for name, tensor in weights(plain).items():
                assert torch.equal(state[name], tensor) if units == 1 else torch.allclose(state[name], tensor), name
            assert torch.equal(state["0.weight"], state["2.weight"])
            assert torch.equal(state["1.0.bias"], state["3.0.bias"])
            assert [pipe.modules()[layer] is layers[layer] for layer in (0, 1, 3)] == [True] * 3, "the user's own"


def test_sharing_that_cannot_be_is_refused_with_a_remedy_that_works() -> None:
    norm = nn.BatchNorm1d(D)
    with pytest.raises(UserError, match=r"layers 0 and 2 hold one module \(BatchNorm1d\), whose buffer 'running_mean'"):
        Pipeline([norm, nn.Linear(D, D), norm], mse, num_ranks=2)
    other = nn.BatchNorm1d(D)
    other.weight = norm.weight
    Pipeline([norm, nn.Linear(D, D), other], mse, num_ranks=2, optimizer=sgd).train_step(*batch())
    shared = nn.Linear(D, D)
    with pytest.raises(UserError, match=r"tied weights need a synchronous schedule \(0.weight and 1.weight are one\)"):
        Pipeline([shared, shared], mse, num_ranks=2, schedule="pipedream")
    with pytest.raises(UserError, match=r"factories of two layers return one parameter \(0.weight and 1.weight\)"):
        Pipeline([lambda: shared, lambda: shared], mse, num_ranks=2)
    both = [TiedWeight(((0, name), (1, name))) for name in ("weight", "bias")]
    pipe = Pipeline([lambda: nn.Linear(D, D)] * 2, mse, num_ranks=2, tied=both, optimizer=sgd)
    pipe.train_step(*batch())
    assert torch.equal(pipe.state_dict()["0.weight"], pipe.state_dict()["1.weight"])


class Head(nn.Module):
    """A loss that uses the weight of a layer."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return mse(output @ self.weight, target)


def test_a_loss_that_shares_a_layers_weight() -> None:
    x, y = batch()
    for num_ranks in (1, 2):
        plain, layers = linears(2), linears(2)
        pipe = Pipeline(layers, Head(layers[0].weight), num_ranks=num_ranks, num_microbatches=1, optimizer=sgd)
        head = Head(plain[0].weight)
        assert pipe.train_step(x, y) == accumulate(plain, head, x, y, 1)
        sgd(nn.ModuleList(plain).parameters()).step()
        same(pipe.state_dict(), weights([*plain, head]))


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_sparse_gradients(schedule: str, num_ranks: int) -> None:
    _, y = batch()
    x = torch.tensor([1, 3, 3, 0, 9, 1, 2, 2])
    make = lambda: seeded(lambda: [nn.Embedding(10, D, sparse=True), nn.Linear(D, D)])  # noqa: E731
    plain = make()
    pipe = Pipeline(make(), mse, schedule=schedule, num_ranks=num_ranks, optimizer=sgd)
    assert pipe.train_step(x, y) == accumulate(plain, mse, x, y, 4)
    sgd(nn.ModuleList(plain).parameters()).step()
    same(pipe.state_dict(), weights(plain))
    replicas = Pipeline(make(), mse, num_ranks=2, replicas=2, optimizer=sgd)
    with pytest.raises(UserError, match=r"sparse gradient cannot be exchanged between the replicas.*sparse=False"):
        replicas.train_step(x, y)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_model_without_parameters(num_ranks: int) -> None:
    x, y = batch()
    layers = [nn.Tanh(), nn.Softplus()]
    pipe = Pipeline(layers, mse, num_ranks=num_ranks, optimizer=sgd, clip_norm=1.0)
    expected = sum(mse(run(layers, part), goal).item() / 4 for part, goal in zip(x.chunk(4), y.chunk(4), strict=True))
    assert pipe.train_step(x, y) == pipe.evaluate(x, y) == expected
    loss = Scaled()
    Pipeline(layers, loss, num_ranks=num_ranks, optimizer=sgd).train_step(x, y)
    assert not torch.equal(loss.scale, torch.full((D,), 0.5))
    assert isinstance(Pipeline([Layer(nn.Tanh())], loss, num_ranks=1, optimizer=sgd).optimizers[0], torch.optim.SGD)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_steps_that_would_train_less_than_asked_are_refused(num_ranks: int) -> None:
    x, y = batch()
    pipe = Pipeline(linears(2), mse, num_ranks=num_ranks, optimizer=sgd)
    with torch.inference_mode(), pytest.raises(UserError, match=r"inference_mode.*call it outside"):
        pipe.train_step(x, y)
    outside = nn.Linear(D, D)
    with pytest.raises(UserError, match=r"inputs require a gradient.*make that a layer, or give inputs.detach"):
        pipe.train_step(outside(x), y)
    pipe.evaluate(outside(x), y)
    before = pipe.state_dict()["0.weight"].clone()
    with torch.no_grad():
        pipe.train_step(outside(x).detach(), y)
    assert not torch.equal(pipe.state_dict()["0.weight"], before)
