"""The parts of a training run, each against its own formula."""

from __future__ import annotations

import functools
import json
import math
import operator
import socket
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from train_runs import Run, equal, run, tiny

from vpipe.config.sections import TrainingConfig
from vpipe.data import dataset
from vpipe.data.dataset import Batch, DataSet
from vpipe.models.losses import PretrainingLoss
from vpipe.models.model import run as run_model
from vpipe.train.feed import Feed
from vpipe.train.optimizers import Lamb, learning_rate, optimizer
from vpipe.train.reporting.peaks import peak_flops
from vpipe.train.reporting.run_log import Metrics

TOTAL = 100


def rates(**options: Any) -> list[float]:
    rate = learning_rate(TrainingConfig(learning_rate=2.0, **options), TOTAL)
    return [rate(update) for update in range(TOTAL)]


@pytest.mark.parametrize("degree", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("warmup", [0.0, 0.1, 0.25])
def test_polynomial_is_berts(degree: float, warmup: float) -> None:
    """p = u/total; lr·p/warmup while p < warmup, else lr·(1−p)^degree."""
    found = rates(learning_rate_policy="polynomial", learning_rate_degree=degree, warmup=warmup)
    for update, rate in enumerate(found):
        p = update / TOTAL
        assert rate == pytest.approx(2.0 * p / warmup if p < warmup else 2.0 * (1 - p) ** degree)


def test_the_other_policies() -> None:
    assert rates() == [2.0] * TOTAL
    linear = rates(learning_rate_policy="linear")
    assert linear == pytest.approx([2.0 * (TOTAL - u) / TOTAL for u in range(TOTAL)])
    cosine = rates(learning_rate_policy="cosine", warmup=20.0, minimum_learning_rate=0.5)
    assert cosine[:20] == pytest.approx([2.0 * (u + 1) / 20 for u in range(20)])
    assert cosine[20:] == pytest.approx([max(0.5, 1 + math.cos(math.pi * u / 80)) for u in range(80)])
    step = rates(learning_rate_policy="step", learning_rate_steps=(0.5, 80.0), learning_rate_factor=0.1)
    assert step == pytest.approx([2.0] * 50 + [0.2] * 30 + [0.02] * 20)
    root = rates(learning_rate_policy="inverse_sqrt", warmup=16.0)
    assert root[15] == pytest.approx(2.0)
    assert root[16:] == pytest.approx([2.0 * math.sqrt(16 / (u + 1)) for u in range(16, TOTAL)])


def test_all_stages_use_the_rate_of_the_update(tmp_path: Path) -> None:
    found = run(tiny({"training.learning_rate_policy": "linear", "parallel.scheduler": "pipedream"}), tmp_path)
    assert found.trainer.plan.num_updates == 32, "asynchronous: one update a unit"
    last = learning_rate(found.config.training, 32)(31)
    for stage in found.trainer.session.pipeline.optimizers.values():
        assert stage.param_groups[0]["lr"] == last


POLICIES = ("constant", "linear", "cosine", "polynomial", "inverse_sqrt", "step")
DOCS = Path(__file__).parents[2] / "docs" / "training.md"


@pytest.mark.parametrize("policy", POLICIES)
def test_the_rate_is_the_formula_of_the_docs_and_never_above_its_peak(policy: str) -> None:
    """For each total, every warm-up, whole or a share."""
    source = DOCS.read_text().split("```python\ndef rate(")[1].split("```")[0]
    names: dict[str, Any] = {}
    exec(f"from math import *\ndef rate({source}", names)  # noqa: S102  (the page's own code)
    for total in (1, 2, 7, 20, 33.5, 50, 100, 101, 400):
        for warmup in (0.0, 0.01, 0.03, 0.06, 0.07, 0.14, 0.15, 0.3, 0.5, 1.0, 3.0, 19.0):
            training = TrainingConfig(
                learning_rate=0.01,
                learning_rate_policy=policy,
                warmup=warmup,
                minimum_learning_rate=1e-4,
                learning_rate_steps=(0.07, 0.5),
            )
            made = learning_rate(training, total)
            for update in range(ceil(total)):
                found = made(update)
                assert max(found, made(update + 0.5)) <= 0.01
                assert found == pytest.approx(names["rate"](update / total, total, training, max)), (total, warmup)


def stage_rates(found: Run) -> dict[int, list[float]]:
    """Stage → the rates of its updates."""
    rates: dict[int, list[float]] = {}
    for stage, made in found.trainer.session.pipeline.optimizers.items():
        mine = rates[stage] = []
        made.register_step_pre_hook(lambda o, *_, mine=mine: mine.append(o.param_groups[0]["lr"]))
    found.train()
    return rates


LINEAR = {"training.learning_rate_policy": "linear", "parallel.scheduler": "pipedream"}


@pytest.mark.parametrize(
    ("changes", "counts"),
    [
        ({"parallel.replicas": [2, 1]}, [16, 32]),
        ({"parallel.schedule_options": {"update_interval": 8}}, [4, 4]),
        ({"parallel.data_parallel_size": 2}, [16, 16]),
        ({"parallel.scheduler": "pipedream-2bw"}, [8, 8]),
        ({"parallel.scheduler": "1f1b", "training.gradient_accumulation": 3}, [3, 3]),
    ],
    ids=str,
)
def test_the_rate_ends_where_the_run_ends_at_every_stage(
    changes: dict[str, Any], counts: list[int], tmp_path: Path
) -> None:
    found = stage_rates(Run(tiny(LINEAR | changes), tmp_path))
    assert [len(found[stage]) for stage in sorted(found)] == counts
    for stage, count in enumerate(counts):
        steps = 8 / 3 if count == 3 else count
        assert found[stage] == pytest.approx([0.01 * (1 - n / steps) for n in range(count)], rel=1e-3), stage


@pytest.mark.parametrize("scheduler", ["pipedream", "pipedream-2bw"])
def test_what_is_observed_changes_nothing(scheduler: str, tmp_path: Path) -> None:
    job = {"parallel.scheduler": scheduler, "training.learning_rate_policy": "cosine"}
    made = [
        run(tiny(job | {f"observe.{key}": value}), tmp_path / f"{number}")
        for number, (key, value) in enumerate(
            [
                ("log_interval", 1),
                ("log_interval", 0),
                ("verbose_interval", 1),
                ("trace", True),
                ("warmup_iterations", 0),
            ]
        )
    ]
    assert all(equal(made[0].weights, each.weights) for each in made[1:])
    for each in made:
        assert [line["iteration"] for line in each.lines] == list(range(1, 9))
        assert [line["learning_rate"] for line in each.lines] == [line["learning_rate"] for line in made[0].lines]
        assert each.losses == made[0].losses


RESUMED: list[dict[str, Any]] = [
    {},
    {"training.max_iterations": 7},
    {"training.epochs": 3},
    {"training.gradient_accumulation": 2},
    {"dataset.batch_size": 4},
    {"dataset.batch_size": 16},
    {"training.num_microbatches": 2},
    {"parallel.scheduler": "pipedream"},
    {"parallel.scheduler": "pipedream-2bw"},
    {"parallel.data_parallel_size": 2, "parallel.model_parallel_size": 1},
    {"parallel.model_parallel_size": 1},
]


@pytest.mark.parametrize("policy", ["linear", "cosine"])
@pytest.mark.parametrize("changes", RESUMED, ids=str)
def test_a_resumed_run_uses_the_rate_of_its_progress(changes: dict[str, Any], policy: str, tmp_path: Path) -> None:
    """At every iteration that of the part of all planned examples that were read before its last update."""
    job = {"training.learning_rate_policy": policy, "training.warmup": 2.0}
    run(tiny(job | {"checkpoint.interval": 2, "training.max_iterations": 2}), tmp_path / "first")
    rest = run(tiny(job | changes), tmp_path / "rest", tmp_path / "first")
    config, lines = rest.config, rest.lines
    replicas, step = config.parallel.data_parallel_size, config.training.gradient_accumulation
    rows = config.dataset.batch_size * replicas
    planned = 16 + rows * len(lines)
    assert lines[-1]["iteration"] == rest.trainer.num_iterations
    asynchronous = config.parallel.scheduler == "pipedream"
    per_iteration = config.training.num_microbatches if asynchronous else 1
    rate = learning_rate(config.training, planned / rows / step * per_iteration)
    for number, line in enumerate(lines):
        before = 16 + rows * (number - number % step if step == 2 else number)
        place = before / planned * rate.total + (per_iteration - 1)
        assert line["learning_rate"] == pytest.approx(rate(place), rel=1e-3), number
    assert min(line["learning_rate"] for line in lines) > 0


def test_lamb_is_its_formula() -> None:
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(5, 3))
    weights, mean, spread = parameter.detach().clone().double(), torch.zeros(5, 3), torch.zeros(5, 3)
    lamb = Lamb([parameter], lr=0.1, betas=(0.9, 0.99), eps=1e-6, weight_decay=0.01)
    for count in range(1, 5):
        gradient = torch.randn(5, 3)
        parameter.grad = gradient.clone()
        lamb.step()
        mean, spread = 0.9 * mean + 0.1 * gradient, 0.99 * spread + 0.01 * gradient**2
        step = (mean / (1 - 0.9**count)) / ((spread / (1 - 0.99**count)).sqrt() + 1e-6) + 0.01 * weights
        weights = weights - 0.1 * (weights.norm() / step.norm()) * step
        assert torch.allclose(parameter.double(), weights, atol=1e-5)


def test_lamb_of_zero_weights_moves() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    parameter.grad = torch.ones(3)
    Lamb([parameter], lr=0.1).step()
    assert torch.allclose(parameter, torch.full((3,), -0.1), atol=1e-4)


@pytest.mark.parametrize(
    ("name", "made"),
    [("sgd", torch.optim.SGD), ("adam", torch.optim.Adam), ("adamw", torch.optim.AdamW), ("lamb", Lamb)],
)
def test_every_optimizer_gets_its_options(name: Any, made: type) -> None:
    options = {"momentum": 0.5} if name == "sgd" else {"betas": [0.1, 0.2], "eps": 0.01}
    training = TrainingConfig(optimizer=name, learning_rate=0.3, weight_decay=0.4, optimizer_options=options)
    found = optimizer(training)([nn.Parameter(torch.zeros(1))])
    assert isinstance(found, made)
    group = found.param_groups[0]
    assert (group["lr"], group["weight_decay"]) == (0.3, 0.4)
    if name == "sgd":
        assert group["momentum"] == 0.5
    else:
        assert (tuple(group["betas"]), group["eps"]) == ((0.1, 0.2), 0.01)


class Counted(DataSet):
    """Example i is the number i, with i mod 5 targets; its length is 1 + i mod 4."""

    vocab_size = 1000

    def __init__(self, count: int = 24) -> None:
        self._count = count
        self.lengths = torch.tensor([1 + i % 4 for i in range(count)]).numpy()

    def __len__(self) -> int:
        return self._count

    def batch(self, indices: Any) -> Batch:
        numbers = torch.tensor([int(i) for i in indices]).unsqueeze(1)
        return Batch(numbers, numbers)


def count(targets: torch.Tensor) -> int:
    return int((targets % 5).sum())


def seen(feed: Feed, positions: list[tuple[int, int]]) -> list[list[int]]:
    return [batch.inputs.flatten().tolist() for batch in feed.read(positions).batches]  # type: ignore[union-attr]


def test_replicas_share_an_epoch() -> None:
    feed = Feed(Counted(), count, num_microbatches=2, num_replicas=2, batch_size=4)
    assert (feed.num_batches, feed.num_examples((0, 0))) == (3, 8)
    units = [seen(feed, [(0, batch)]) for batch in range(3)]
    assert all(len(each) == 4 and all(len(unit) == 2 for unit in each) for each in units)
    assert sorted(i for each in units for unit in each for i in unit) == list(range(24))
    one = Feed(Counted(), count, num_microbatches=2, batch_size=8)
    for batch in range(3):
        both = [seen(feed, [(0, batch)])[k] for k in (0, 2, 1, 3)]
        assert functools.reduce(operator.iadd, both, []) == functools.reduce(
            operator.iadd, seen(one, [(0, batch)]), []
        ), "the same examples, dealt to two"


def test_shares_are_of_the_valid_targets() -> None:
    units = Feed(Counted(), count, num_microbatches=4, batch_size=8, shuffle=False).read([(0, 0)])
    counts = [0 + 1, 2 + 3, 4 + 0, 1 + 2]
    assert units.shares() == [count / 13 for count in counts]
    assert (*units.counts, units.part) == (13, 0, 8, 8, 0, 4, 1.0)


def test_batches_by_tokens_are_units_of_their_own() -> None:
    feed = Feed(Counted(), count, num_microbatches=2, max_tokens=8, seed=3)
    units = [unit for batch in range(feed.num_batches) for unit in seen(feed, [(0, batch)])]
    assert all(len(unit) * max(1 + i % 4 for i in unit) <= 8 for unit in units)
    assert len({len(unit) for unit in units}) > 1
    assert len(units) == feed.num_batches * 2


@pytest.mark.parametrize("options", [{"batch_size": 4}, {"max_tokens": 8}], ids=str)
def test_workers_give_the_same_batches(options: dict[str, int]) -> None:
    """Over the ends of epochs too, where the order changes."""
    alone = Feed(Counted(), count, num_microbatches=2, seed=5, **options)
    helped = Feed(Counted(), count, num_microbatches=2, seed=5, num_workers=4, **options)
    position = (0, 0)
    for _ in range(3 * alone.num_batches):
        assert seen(helped, [position]) == seen(alone, [position])
        position = alone.next(position)
    helped.close()


def test_a_synthetic_bert_counts_what_it_reads() -> None:
    data = dataset.load("synthetic", sequence_length=8, extra={"kind": "bert", "num_examples": 8})
    units = Feed(data, PretrainingLoss().count, num_microbatches=2, batch_size=4).read([(0, 0)])
    assert units.counts.num_tokens == 32
    assert 0 < units.counts.num_targets < 32


def test_accumulation_is_one_big_step(tmp_path: Path) -> None:
    """Three iterations of four units, or one of twelve: the same sums in the same order."""
    base = {"dataset.extra": {"vocab_size": 32, "num_examples": 96}, "model.extra": {"dropout": 0.1}}
    base |= {"training.epochs": 1, "training.gradient_clipping": 0.5}
    small = tiny(base | {"training.gradient_accumulation": 3})
    large = tiny(base | {"dataset.batch_size": 24, "training.num_microbatches": 12})
    many, few = run(small, tmp_path / "many"), run(large, tmp_path / "few")
    assert equal(many.weights, few.weights)
    assert (len(many.lines), many.lines[-1]["update"]) == (12, 4)
    assert few.losses[-1] == pytest.approx(sum(many.losses[-3:]) / 3)


def test_accumulation_weighs_by_valid_targets(tmp_path: Path) -> None:
    """BERT's masks differ from unit to unit: the mean is over all targets of the update."""
    model = {"name": "bert", "hidden_size": 16, "num_layers": 1, "num_heads": 2, "sequence_length": 8}
    base: dict[str, Any] = {"dataset.extra": {"kind": "bert", "vocab_size": 32, "num_examples": 24}, "model": model}
    base |= {"training.epochs": 1, "model.extra": {"dropout": 0.0}}
    many = run(tiny(base | {"training.gradient_accumulation": 3}), tmp_path / "many")
    few = run(tiny(base | {"dataset.batch_size": 24, "training.num_microbatches": 12}), tmp_path / "few")
    assert equal(many.weights, few.weights)


def test_the_last_update_takes_what_is_left(tmp_path: Path) -> None:
    found = run(tiny({"training.gradient_accumulation": 3}), tmp_path)
    assert [line["update"] for line in found.lines] == [0, 0, 1, 1, 1, 2, 2, 3]
    assert found.trainer.plan.num_updates == pytest.approx(8 / 3)


@pytest.mark.parametrize("most", [1, 3, 5])
@pytest.mark.parametrize("scheduler", ["1f1b", "pipedream"])
def test_max_iterations_is_exact(most: int, scheduler: str, tmp_path: Path) -> None:
    found = run(tiny({"training.max_iterations": most, "parallel.scheduler": scheduler}), tmp_path)
    assert found.lines[-1]["iteration"] == most
    assert found.summary["total_iterations"] == most
    assert found.trainer.session.pipeline.num_units == 4 * most


def test_evaluation_is_the_mean_over_held_out_tokens(tmp_path: Path) -> None:
    found = Run(tiny({"training.evaluation_interval": 4, "training.learning_rate": 1e-9}), tmp_path)
    session = found.trainer.session
    found.train()
    lines = [line for line in found.metrics if line["kind"] == "evaluation"]
    assert [line["iteration"] for line in lines] == [4, 8]
    assert session.data.valid is not None
    batch = session.data.valid.batch(range(16))
    from vpipe.models.model import run as plain

    modules = [module.eval() for module in session.pipeline.modules().values()]
    with torch.no_grad():
        expected = session.model.loss(plain(session.model.layers, modules, batch.inputs), batch.targets)
    assert lines[-1]["loss"] == pytest.approx(float(expected), rel=1e-5)


def test_evaluation_changes_nothing(tmp_path: Path) -> None:
    dropout = {"model.extra": {"dropout": 0.3}}
    without = run(tiny(dropout), tmp_path / "a")
    with_it = run(tiny(dropout | {"training.evaluation_interval": 1}), tmp_path / "b")
    assert equal(without.weights, with_it.weights)


@pytest.mark.parametrize("name", ["gpt", "translation", "bert"])
@pytest.mark.parametrize("count", [3, 19])
def test_an_evaluation_reads_all_that_is_held_out(name: str, count: int, tmp_path: Path) -> None:
    """The last batch, which is smaller, too; and of smoothed labels the loss without smoothing."""
    extra = {"kind": name, "vocab_size": 32, "num_examples": 32, "num_valid_examples": count}
    changes = {"training.evaluation_interval": 0, "dataset.extra": extra, "training.evaluation_batches": -1}
    found = run(tiny({"model.name": name, "training.epochs": 1} | changes), tmp_path)
    session = found.trainer.session
    (line,) = [line for line in found.metrics if line["kind"] == "evaluation"]
    inputs, targets = session.data.valid.batch(range(count))  # type: ignore[union-attr]
    assert (line["examples"], line["targets"]) == (count, session.model.count(targets))
    modules = [module.eval() for module in session.pipeline.modules().values()]
    output = run_model(session.model.layers, modules, inputs)
    pairs = zip(output, targets.values(), strict=True) if name == "bert" else [(output, targets)]
    ignored = {"gpt": -100, "translation": 1, "bert": -1}[name]
    parts = [functional.cross_entropy(a.flatten(0, -2), b.flatten(), ignore_index=ignored) for a, b in pairs]
    assert line["loss"] == pytest.approx(sum(parts).item(), rel=1e-6 if name != "bert" else 1e-3)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_trains_and_keeps_fp32_weights(precision: str, tmp_path: Path) -> None:
    found = run(tiny({"training.precision": precision}), tmp_path)
    exact = run(tiny(), tmp_path / "exact")
    assert all(weight.dtype == torch.float32 for weight in found.weights.values())
    assert found.losses != exact.losses
    assert found.losses == pytest.approx(exact.losses, rel=0.05)


def test_all_stages_agree_on_the_loss_scale(tmp_path: Path) -> None:
    """A step that overflows on one stage is skipped on all, and all halve their scale."""
    found = Run(tiny({"training.precision": "fp16", "training.max_iterations": 3}), tmp_path)
    engines = found.trainer.session.pipeline.engines
    before = found.weights
    stage = engines[1].stages[1]
    parameter = next(iter(stage.weights.parameters.values()))
    hook = parameter.register_hook(lambda gradient: gradient * float("inf"))
    found.trainer._train()
    hook.remove()
    assert equal(found.weights, before)
    assert {engine.updater.scaler.value for engine in engines} == {2.0**15}
    assert [engine.updater.num_skipped for engine in engines] == [1, 1]
    found.train()
    assert not equal(found.weights, before)
    assert [line["loss_scale"] for line in found.lines] == [2.0**15] * 3
    assert "updates skipped: a gradient was not finite" in found.said


def test_a_fixed_loss_scale_changes_nothing_but_range(tmp_path: Path) -> None:
    found = run(tiny({"training.precision": "fp16", "training.loss_scale": 64.0}), tmp_path)
    assert {line["loss_scale"] for line in found.lines} == {64.0}


def test_the_summary_leaves_out_warm_up_and_profiled_iterations() -> None:
    made = Metrics(4, "fp32", warmup_iterations=2)
    for seconds in (9.0, 9.0, 1.0, 1.0):
        made.add(seconds, 100, 8)
    made.add(9.0, 100, 8, counts=False)
    found = made.summary(10, 6.0)
    assert (found["total_iterations"], found["effective_iterations"], found["warmup_iterations"]) == (5, 2, 2)
    assert (found["total_time_seconds"], found["effective_time_seconds"]) == (29.0, 2.0)
    assert (found["total_tokens"], found["effective_tokens"]) == (500, 200)
    assert (found["throughput_tokens_per_second"], found["samples_per_second"]) == (100.0, 8.0)
    assert found["mfu"] == "n/a"


def test_mfu_from_the_dense_peak_of_the_format_used(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Metrics(4, "bf16", 0)
    made.add(1.0, 104_000, 8)
    assert made.summary(10, 3e9, "NVIDIA A100-SXM4-80GB")["mfu"] == pytest.approx(104_000 * 3e9 / (312e12 * 4))
    assert peak_flops("Tesla V100-SXM2-32GB", "bf16") is None
    assert peak_flops("NVIDIA A100", "fp32") == 19.5e12
    assert peak_flops("NVIDIA A10", "bf16") == 125e12
    assert peak_flops("NVIDIA L40S", "bf16") == 362e12
    assert peak_flops("emulated accelerator", "fp32") is None
    assert peak_flops("NVIDIA H100 80GB HBM3", "bf16") == peak_flops("NVIDIA GH200 480GB", "bf16") == 989.4e12
    assert peak_flops("NVIDIA H100 PCIe", "bf16") == 756e12
    assert peak_flops("NVIDIA H100 NVL", "bf16") == 835.5e12
    assert peak_flops("NVIDIA H20", "bf16") == 148e12
    assert peak_flops("NVIDIA RTX A6000", "bf16") == 154.8e12
    assert peak_flops("NVIDIA GB200", "bf16") == 2500e12
    assert peak_flops("AMD Instinct MI325X", "bf16") == 1307.4e12
    monkeypatch.setattr("torch.get_float32_matmul_precision", lambda: "high")
    assert peak_flops("NVIDIA A100", "fp32") == 156e12
    assert peak_flops("Tesla V100-SXM2-32GB", "fp32") == 15.7e12


def test_a_run_on_cpus_reports_them_whatever_else_the_machine_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda *_: "NVIDIA A100-SXM4-80GB")
    settings = {"parallel.device": "cpu", "training.optimizer": "sgd"}  # Adam of a CUDA build would ask the driver
    found = run(tiny(settings), tmp_path).summary
    assert (found["device_name"], found["num_gpus"], found["mfu"]) == ("cpu", 0, "n/a")


def test_hosts_are_those_of_the_ranks(tmp_path: Path) -> None:
    run(tiny(), tmp_path)
    found = json.loads((tmp_path / "run.json").read_text())
    assert found["hosts"] == [socket.gethostname()] * found["num_ranks"]
    assert found["layout"]["partition"] == found["partition"]


def test_replicas_count(tmp_path: Path) -> None:
    found = run(tiny({"parallel.data_parallel_size": 2}), tmp_path)
    assert found.summary["total_tokens"] == 2 * 2 * 16 * 8, "two epochs of two iterations"
    assert found.lines[0]["tokens"] == 128
    keys = "total_time_seconds effective_time_seconds time_per_iteration_seconds total_iterations effective_iterations"
    keys += " warmup_iterations total_tokens effective_tokens throughput_tokens_per_second samples_per_second mfu"
    keys += " model_params flops_per_token num_gpus device_name dtype"
    assert set(keys.split()) <= set(found.summary)


@pytest.mark.parametrize("replicas", [[2, 2], [1, 2], [2, 1]])
def test_replicas_per_stage(replicas: list[int], tmp_path: Path) -> None:
    found = run(tiny({"parallel.replicas": replicas, "parallel.scheduler": "pipedream"}), tmp_path)
    assert found.trainer.iteration == (4 if replicas == [2, 2] else 8)


def test_the_tensors_of_a_step_are_counted(tmp_path: Path) -> None:
    """Where a process is one rank: bytes by what they are for, the same in every run."""
    config = tiny({"parallel.model_parallel_size": 1, "observe.trace": True, "training.max_iterations": 3})
    seen = []
    for name in ("one", "two"):
        steps = (run(config, tmp_path / name).directory / "events" / "rank0.jsonl").read_text().splitlines()
        memory = [json.loads(line)["memory"] for line in steps if '"memory"' in line]
        assert "in_step" not in memory[0]
        seen.append({key: memory[-1][key] for key in ("weights", "optimizer", "in_step")})
    assert seen[0] == seen[1]
    assert seen[0]["in_step"] > seen[0]["weights"], "gradients alone are as large as the weights"
