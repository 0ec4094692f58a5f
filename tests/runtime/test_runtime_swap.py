"""Swap: saved tensors and old weights leave memory and come back, and not a bit changes."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime_gloo import Worlds
from runtime_models import WIDTH, build
from runtime_support import Case, check, check_processes, pipeline, train_rank
from torch import Tensor, nn

from vpipe import Pipeline
from vpipe.errors import UserError
from vpipe.runtime.memory import swap
from vpipe.runtime.memory.swap_store import FileStore
from vpipe.runtime.options import recomputed_and_swapped
from vpipe.schedule.action import Kind
from vpipe.schedule.simulate import simulate
from vpipe.schedule.timeline import Costs, StageCosts
from vpipe.schedule.verify import verify

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "pipedream", "pipedream-2bw", "naive", "async_threaded")
MODELS = ("plain", "skips", "tied", "batch_norm", "structured", "auxiliary", "frozen")


@pytest.fixture
def everything_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensors of these tests are tiny."""
    monkeypatch.setattr(swap, "MIN_BYTES", 0)


def moved(pipe: Pipeline, kind: Kind) -> int:
    """Bytes that the last step's OUT or IN carried."""
    return sum(each.bytes for row in pipe.trace().records.values() for each in row if each.action.kind is kind)


@pytest.mark.rotates(6)
@pytest.mark.usefixtures("everything_moves")
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_swap_equals_replay(schedule: str) -> None:
    """All of a stage's layers, some of them, and some beside recomputed ones; models and treatments rotate."""
    shift = SCHEDULES.index(schedule)
    treatments: list[tuple[Any, Any]] = [(1.0, 0.0), (0.5, 0.5), ({0, 2, 3, 5, 9, 11}, {1, 4, 10})]
    for number, (swapped, recompute) in enumerate(treatments):
        model = MODELS[(number + shift) % len(MODELS)]
        if model == "tied" and schedule.startswith("pipedream"):
            model = "plain"
        case = Case(schedule, model, 3, 7, num_layers=14, recompute=recompute, more={"swap": swapped})
        pipe = check(case)
        assert moved(pipe, Kind.OUT) == moved(pipe, Kind.IN) > 0
        pipe.close()


@pytest.mark.usefixtures("everything_moves")
def test_old_weights_leave_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """W_s + 1 versions, as ever; those that only swapped units need are out, and none is left out."""
    out: list[int] = []
    empty = swap.Swappable.empty
    monkeypatch.setattr(swap.Swappable, "empty", lambda self: (out.append(self._bytes * self._same), empty(self))[1])
    for options in ({}, {"vertical_sync": True}, {"update_interval": 2}):
        out.clear()
        pipe = check(Case("pipedream", "plain", 4, 12, num_layers=12, options=options, more={"swap": 1.0}))
        assert sum(out) > 0
        for name, tensor in pipe.state_dict().items():
            assert tensor.untyped_storage().nbytes() >= tensor.numel(), name
        pipe.close()


@pytest.mark.usefixtures("everything_moves")
def test_a_state_dict_taken_before_a_step_stays_readable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first version's memory may be somebody else's: it never leaves."""
    case = Case("pipedream", "plain", 3, 9, more={"swap": 1.0})
    model = build("plain", 10)
    pipe = pipeline(case, model, 3)
    before = pipe.state_dict()
    sizes: list[int] = []
    put = FileStore.put

    def watched(self: FileStore, storage: Any) -> Any:
        sizes.append(min(tensor.untyped_storage().nbytes() for tensor in before.values()))
        return put(self, storage)

    monkeypatch.setattr(FileStore, "put", watched)
    pipe.train_step(*model.data(18, 0))
    assert sizes
    assert min(sizes) > 0


@pytest.mark.usefixtures("everything_moves")
@pytest.mark.parametrize("schedule", ["gpipe", "pipedream", "zb-h1"])
def test_a_store_that_changes_a_byte_is_noticed(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read = FileStore._read

    def corrupt(self: FileStore, view: memoryview, offset: int) -> None:
        read(self, view, offset)
        view[3] ^= 0x40

    monkeypatch.setattr(FileStore, "_read", corrupt)
    with pytest.raises(AssertionError, match=r"differ|replayed"):
        check(Case(schedule, "plain", 3, 7, more={"swap": 1.0}))


def rank_that_swaps(case: Case) -> Any:
    swap.MIN_BYTES = 0
    return train_rank(case)


@pytest.mark.parametrize("transport", ["shm", "distributed"])
def test_between_processes(worlds: Worlds, transport: str) -> None:
    case = Case("1f1b", "skips", 3, 6, num_layers=12, recompute=0.3, more={"swap": 0.5, "transport": transport})
    check_processes(lambda ranks, _, case: worlds.run(ranks, rank_that_swaps, case), case)


@pytest.mark.usefixtures("everything_moves")
def test_evaluation_between_steps_swaps_nothing() -> None:
    case = Case("gpipe", "plain", 2, 4, more={"swap": 1.0})
    model = build("plain", 10)
    pipe, plain = pipeline(case, model, 2), pipeline(Case("gpipe", "plain", 2, 4), build("plain", 10), 2)
    for step in range(2):
        assert pipe.train_step(*model.data(8, step)) == plain.train_step(*model.data(8, step))
        assert pipe.evaluate(*model.data(8, 9)) == plain.evaluate(*model.data(8, 9))


class InPlace(nn.Module):
    """Changes a tensor that its backward needs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.exp(self.linear(x))
        z = y * 2
        y.add_(1)  # exp's backward reads y
        return z


@pytest.mark.usefixtures("everything_moves")
@pytest.mark.parametrize("num_microbatches", [1, 6])
def test_a_saved_tensor_that_changes_is_an_error_as_without_swap(num_microbatches: int) -> None:
    """One microbatch has no OUT: then the backward notices, not the swap."""
    for swapped in (0.0, 1.0):
        layers = [InPlace(), nn.Linear(WIDTH, WIDTH)]
        pipe = Pipeline(
            layers, nn.functional.mse_loss, schedule="gpipe", num_microbatches=num_microbatches, num_ranks=1,
            optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1), swap=swapped,
        )  # fmt: skip
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            pipe.train_step(torch.randn(num_microbatches * 2, WIDTH), torch.randn(num_microbatches * 2, WIDTH))


def test_the_batch_weights_and_buffers_stay() -> None:
    """A unit's view of the batch must not carry the whole batch out."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(256, 256))
            self.register_buffer("mask", torch.ones(256, 256))

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(x @ (self.weight * self.mask))

    pipe = Pipeline(
        [Masked(), Masked()], nn.functional.mse_loss, schedule="gpipe", num_microbatches=8, num_ranks=1,
        optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1), swap=1.0,
    )  # fmt: skip
    rows = 64
    batch = torch.randn(8 * rows, 256)
    pipe.train_step(batch, torch.randn_like(batch))
    unit = rows * 256 * 4
    masked = 256 * 256 * 4
    outs = [each for each in pipe.trace().records[0] if each.action.kind is Kind.OUT]
    # The results of both layers, and the masked weight of the second: the first has no input gradient to compute.
    assert {each.bytes for each in outs} == {2 * unit + masked}


def wide(swapped: float = 1.0, schedule: str = "gpipe", num_ranks: int = 1) -> Pipeline:
    layers = [nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(4)]
    return Pipeline(
        layers, nn.functional.mse_loss, schedule=schedule, num_microbatches=6, num_ranks=num_ranks,
        optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1), swap=swapped,
    )  # fmt: skip


def test_the_lane_runs_beside_the_compute() -> None:
    """OUT k runs while F k+1 computes; what was executed verifies, and the simulation has the same lane."""
    pipe = wide()
    batch = torch.randn(6 * 1024, 256)
    pipe.train_step(batch, batch)
    records = pipe.trace().records[0]
    lane = [each for each in records if each.action.kind in (Kind.OUT, Kind.IN)]
    compute = [each for each in records if each.action.kind in (Kind.F, Kind.B)]
    beside = [sum(max(0, min(move.end, work.end) - max(move.ready, work.ready)) for work in compute) for move in lane]
    assert sum(beside) > 0.5 * sum(move.end - move.ready for move in lane)
    assert all(before.end <= after.ready for before, after in pairwise(lane))
    executed = pipe.trace().program()
    assert not list(verify(executed))
    timeline = simulate(executed, Costs((StageCosts(1.0, 1.0, 1.0, swap=0.5),))).timeline
    assert [timeline.flat.action(event) for event in timeline.lanes[1]] == [move.action for move in lane]


@pytest.mark.parametrize("schedule", ["gpipe", "async_threaded"])
def test_a_full_disk_is_one_sentence_and_the_next_step_works(
    schedule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    pipe = wide(schedule=schedule)
    batch = torch.randn(6 * 256, 256)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3 << 20, before[1]))
    try:
        with pytest.raises(UserError, match=rf"stage 0, microbatch \d.*{tmp_path}.*TMPDIR") as caught:
            pipe.train_step(batch, batch)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "\n" not in str(caught.value)
    assert not any("swap" in thread.name for thread in threading.enumerate())
    pipe.zero_grad()
    pipe.train_step(batch, batch)
    assert not list(tmp_path.iterdir()), "the file has no name"
    pipe.close()


def test_nothing_is_left_after_a_step_and_after_close() -> None:
    pipe = wide(num_ranks=2)
    batch = torch.randn(6 * 256, 256)
    pipe.train_step(batch, batch)
    assert not any("swap" in thread.name for thread in threading.enumerate())
    for engine in pipe.engines:
        assert isinstance(engine._swapper._store, FileStore)
        assert engine._swapper._store.end == 0
    open_files = len(os.listdir("/proc/self/fd"))
    pipe.close()
    assert len(os.listdir("/proc/self/fd")) == open_files - 2


def test_a_place_of_the_file_is_used_again() -> None:
    store, storage = FileStore(), torch.arange(10_000).untyped_storage()
    first, second = store.put(storage), store.put(storage)
    store.get(first, storage)
    assert store.put(storage) == first != second
    assert store.end == first[1] + second[1]
    store.close()


def test_which_layers_are_swapped() -> None:
    bounds = [(0, 4), (4, 10)]
    assert recomputed_and_swapped(0.5, 0.5, bounds) == ({2, 3, 7, 8, 9}, {0, 1, 4, 5, 6})
    assert recomputed_and_swapped([0.0, 0.5], [0.25, 0.2], bounds) == ({7, 8, 9}, {3, 6})
    assert recomputed_and_swapped({1}, {2, 5}, bounds) == ({1}, {2, 5})
    for recompute, swapped, words in (
        (0.5, 0.75, "must not add up"),
        ({1}, {1}, "layer 1 is both"),
        (0.0, [0.5], "swap has 1 ratios, but there are 2 stages"),
        (0.0, 1.5, "swap ratio of stage 0 is 1.5"),
    ):
        with pytest.raises(UserError, match=words):
            recomputed_and_swapped(recompute, swapped, bounds)


PEAK = """
import sys, torch
from torch import nn
from vpipe import Pipeline
torch.set_num_threads(1)
layers = [nn.Sequential(nn.LayerNorm(1024), nn.Tanh(), nn.Sigmoid()) for _ in range(4)]
pipe = Pipeline(layers, nn.functional.mse_loss, schedule="gpipe", num_microbatches=8, num_ranks=1,
                optimizer=lambda ps: torch.optim.SGD(ps, lr=0.01), swap=float(sys.argv[1]))
batch = torch.randn(8 * 512, 1024)
pipe.train_step(batch[:64], batch[:64])
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")
status = lambda name: next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name))
before = status("VmRSS")
pipe.train_step(batch, batch)
print((status("VmHWM") - before) * 1024)
"""


@pytest.mark.slow
def test_resident_memory_falls_by_what_is_out(capsys: pytest.CaptureFixture[str]) -> None:
    """Of eight units two are in memory at once: the one in use and the one on its way."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    kept, swapped = (
        int(subprocess.run([sys.executable, "-c", PEAK, part], env=environment, capture_output=True, text=True, timeout=60, check=True).stdout)
        for part in ("0.0", "1.0")
    )  # fmt: skip
    unit = 4 * 2 * 512 * 1024 * 4  # of each layer, the results of tanh and sigmoid
    with capsys.disabled():
        print(f"\npeak resident memory of a step: {kept >> 20} MiB kept, {swapped >> 20} MiB swapped")
    assert kept > 7 * unit
    assert swapped < 3.5 * unit
    assert kept - swapped > 5 * unit
