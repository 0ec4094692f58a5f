"""Copies in memory: two generations, and a torn one never counts."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from train_runs import Run, tiny

from vpipe import Pipeline
from vpipe.rundir.lineage import Line
from vpipe.rundir.manifest import Standing, checkpoints
from vpipe.train.checkpoints.checkpoint import Checkpoint
from vpipe.train.copies import Copier, CopyShelf, Part, newest

Pair = list[int]


@pytest.fixture
def memory() -> Iterator[list[Pair]]:
    """Of two slots."""
    made = [[os.memfd_create("test") for _ in range(2)] for _ in range(2)]
    yield made
    for pair in made:
        for descriptor in pair:
            os.close(descriptor)


def standing(iteration: int) -> Standing:
    return Standing(
        iteration,
        0,
        iteration,
        ((0, 8 * iteration),),
        8 * iteration,
        4 * iteration,
        iteration,
        1.0,
        0,
        0,
        "adam",
        "model",
    )


def layer(value: float) -> dict[str, Tensor]:
    return {"param/weight": torch.full((3, 5), value), "optimizer/weight/step": torch.tensor(value)}


def write(shelf: CopyShelf, slot: int, iteration: int, epoch: int = 1, num_parts: int = 2) -> None:
    shelf.write(standing(iteration), Part(epoch, slot, num_parts), {slot: layer(iteration + slot / 10)})


def shelves(memory: list[Pair]) -> list[CopyShelf]:
    """As another process sees them."""
    return [CopyShelf(pair) for pair in memory]


def test_the_newest_generation_that_all_have_is_found(memory: list[Pair]) -> None:
    first, second = shelves(memory)
    assert newest(shelves(memory)) == []
    write(first, 0, 1)
    assert newest(shelves(memory)) == []
    write(second, 1, 1)
    write(first, 0, 2)
    found = newest(shelves(memory))
    assert [copy.iteration for copy in found] == [1, 1]
    for slot, copy in enumerate(found):
        assert copy.standing == standing(1)
        read = copy.read(slot)
        assert all(torch.equal(read[name], tensor) for name, tensor in layer(1 + slot / 10).items())


@pytest.mark.parametrize("place", [0, 9, 60, 4400, -1], ids=["magic", "iteration", "table", "padding", "tensors"])
def test_one_flipped_bit_makes_a_copy_none(memory: list[Pair], place: int) -> None:
    first, second = shelves(memory)
    for iteration in (1, 2):
        write(first, 0, iteration)
        write(second, 1, iteration)
    newer = max(memory[1], key=lambda each: os.pread(each, 16, 0)[8])
    where = place % os.fstat(newer).st_size if place >= 0 else os.fstat(newer).st_size - 64
    byte = os.pread(newer, 1, where)[0]
    os.pwrite(newer, bytes([byte ^ 16]), where)
    assert [copy.iteration for copy in newest(shelves(memory))] == [1, 1]


def test_a_writer_that_dies_on_the_way_leaves_the_generation_before(memory: list[Pair]) -> None:
    class Died(Exception):
        pass

    class Deadly(dict[str, Tensor]):
        def items(self):  # type: ignore[no-untyped-def]
            yield from list(super().items())[:1]
            if died[0]:
                raise Died

    died = [False]
    first, second = shelves(memory)
    for iteration in (1, 2):
        write(first, 0, iteration)
        second.write(standing(iteration), Part(1, 1, 2), {1: Deadly(layer(iteration))})
    write(first, 0, 3)
    died[0] = True
    with pytest.raises(Died):
        second.write(standing(3), Part(1, 1, 2), {1: Deadly(layer(3))})
    assert [copy.iteration for copy in newest(shelves(memory))] == [2, 2]


def test_the_copy_that_a_run_went_on_from_is_overwritten_last(memory: list[Pair]) -> None:
    """A rank that was ahead of a lost one has a newer copy, which it must overwrite instead."""
    first, second = shelves(memory)
    for iteration in (1, 2):
        write(first, 0, iteration)
        write(second, 1, iteration)
    write(first, 0, 3)  # and the second rank is killed
    again = shelves(memory)
    found = newest(again)
    assert found[0].iteration == 2
    for shelf in again:
        shelf.keep(found[0].iteration, found[0].part.epoch)
    write(again[0], 0, 3, epoch=2)  # and the second is killed before it has its third
    assert [copy.iteration for copy in newest(shelves(memory))] == [2, 2]
    write(again[1], 1, 3, epoch=2)
    assert [(copy.iteration, copy.part.epoch) for copy in newest(shelves(memory))] == [(3, 2), (3, 2)]


def test_what_is_frozen_is_copied_where_it_has_changed(memory: list[Pair]) -> None:
    """Weights that were frozen when both pieces were written, and trained in between, kept their old values; so did a
    teacher, which a forward writes."""
    shelf, weight = CopyShelf(memory[0]), torch.arange(4.0)
    tensors = {0: {"param/weight": weight, "optimizer/weight/step": torch.tensor(1.0)}}

    def write(n: int, is_frozen: bool = True) -> int:
        return shelf.write(standing(n), Part(1, 0, 1), tensors, {(0, "param/weight")} if is_frozen else ())

    assert [write(n) for n in range(1, 5)] == [20, 20, 4, 4]
    changes: list[tuple[bool, Callable[[], object]]] = [
        (True, lambda: weight.add_(1)),
        (True, lambda: weight.data.add_(1)),
        (True, lambda: weight.copy_(weight[[1, 0, 3, 2]])),  # their sum is the same
        (False, lambda: weight.add_(1)),  # trained until now
        (True, lambda: tensors[0].update({"param/weight": weight + 1})),
    ]
    for n, (is_frozen, change) in enumerate(changes):
        change()
        first = 4 * n + 5
        assert [write(first, is_frozen), *map(write, range(first + 1, first + 4))] == [
            20,
            20,
            4 if is_frozen else 20,
            4,
        ]
        (found,) = newest([CopyShelf(memory[0])])
        assert torch.equal(found.read(0)["param/weight"], tensors[0]["param/weight"])


def test_a_copy_is_none_where_a_forward_has_changed_weights_meanwhile(memory: list[Pair]) -> None:
    """The one before stays, and what is changed in this way is copied at once from then on."""
    shelf, weight = CopyShelf(memory[0]), torch.zeros(3)
    tensors = {0: {"param/weight": weight}}
    for n, whole in ((1, 1), (2, 1), (3, 3), (4, 4)):
        finish = shelf.begin(standing(n), Part(1, 0, 1), tensors)
        if n > 1:
            weight += 1  # by the next forward
        finish()
        (found,) = newest([CopyShelf(memory[0])])
        assert found.iteration == whole
        assert torch.equal(found.read(0)["param/weight"], torch.full((3,), max(0.0, whole - 2)))


def test_optimizer_state_that_appears_later_finds_room(memory: list[Pair]) -> None:
    shelf = CopyShelf(memory[0])
    shelf.write(standing(1), Part(1, 0, 1), {0: {"param/weight": torch.ones(3)}})
    grown = {0: {"param/weight": torch.ones(3), "optimizer/weight/exp_avg": torch.rand(100_000)}}
    for iteration in (2, 3):
        shelf.write(standing(iteration), Part(1, 0, 1), grown)
    (found,) = newest([CopyShelf(memory[0])])
    assert torch.equal(found.read(0)["optimizer/weight/exp_avg"], grown[0]["optimizer/weight/exp_avg"])


def test_buffers_are_copied_at_once_and_weights_by_the_call_that_ends_the_copy(memory: list[Pair]) -> None:
    shelf = CopyShelf(memory[0])
    tensors = {0: {"param/weight": torch.zeros(3), "buffer/mean": torch.zeros(2)}}
    finish = shelf.begin(standing(1), Part(1, 0, 1), tensors)
    tensors[0]["buffer/mean"].fill_(7.0)  # by the next forward
    assert newest([CopyShelf(memory[0])]) == []
    finish()
    (found,) = newest([CopyShelf(memory[0])])
    assert torch.equal(found.read(0)["buffer/mean"], torch.zeros(2))


@pytest.mark.parametrize("guarded", [True, False], ids=["waits", "negative-control"])
@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_an_update_waits_for_the_copy_that_reads_its_weights(schedule: str, guarded: bool) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4) for _ in range(4)]
    pipe = Pipeline(layers, nn.functional.mse_loss, schedule=schedule, num_ranks=2, optimizer=torch.optim.Adam)
    batch = torch.randn(8, 4), torch.randn(8, 4)
    pipe.train_step(*batch)
    copier, updated, seen = Copier(), threading.Event(), list[bool]()
    if guarded:
        pipe.each_engine(copier.watch)
    for optimizer in pipe.optimizers.values():
        optimizer.register_step_post_hook(lambda *_: updated.set())
    copier.begin(lambda: seen.append(updated.wait(0.3 if guarded else 60)))
    pipe.train_step(*batch)
    copier.settle()
    assert updated.is_set()
    assert seen == [not guarded]
    pipe.close()


def test_a_copy_that_fails_is_told_where_it_is_awaited() -> None:
    copier = Copier()
    copier.begin(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        copier.settle()
    copier.settle()


def test_copies_of_several_machines_become_one_generation_on_the_disk(memory: list[Pair], tmp_path: Path) -> None:
    """Each leaves what it has; a part that both have is written once, and one that is torn does not count."""
    first, second = shelves(memory)
    write(first, 0, 1)
    write(second, 1, 1)
    write(second, 1, 2)
    first.leave(tmp_path)
    assert newest(on_disk(tmp_path)) == []
    for _ in range(2):
        second.leave(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1-1-0.copy", "1-1-1.copy", "2-1-1.copy"]
    found = newest(on_disk(tmp_path))
    assert [copy.iteration for copy in found] == [1, 1]
    assert torch.equal(found[1].read(1)["param/weight"], layer(1.1)["param/weight"])
    torn = tmp_path / "1-1-0.copy"
    torn.write_bytes(torn.read_bytes()[:-1] + b"?")
    assert newest(on_disk(tmp_path)) == []


def on_disk(folder: Path) -> list[CopyShelf]:
    return [CopyShelf([os.open(path, os.O_RDWR)]) for path in sorted(folder.glob("*.copy"))]


@pytest.mark.parametrize(
    ("whole", "at", "interval", "accumulation", "saves"),
    [
        ([4, 8], 10, 4, 1, None), ([4], 10, 4, 1, 10), ([4], 8, 4, 1, 8), ([4, 8], 8, 4, 1, None), ([], 3, 4, 1, None),
        ([4], 7, 0, 1, None), ([], 7, 0, 1, 7), ([], 6, -1, 1, None), ([], 6, 5, 2, 6), ([6], 8, 5, 2, None),
    ],
)  # fmt: skip
def test_a_checkpoint_that_was_under_way_when_a_rank_was_lost_is_made_up_for(
    whole: list[int], at: int, interval: int, accumulation: int, saves: int | None, tmp_path: Path
) -> None:
    """It was dropped without a word; the next one came an interval later."""
    config = tiny({"checkpoint.interval": interval, "training.epochs": 3, "checkpoint.keep": 9})
    config["training"]["gradient_accumulation"] = accumulation
    steps = Run(config | {"checkpoint": {"interval": 1, "keep": 99}}, tmp_path / "run").train()
    run = Run(config, tmp_path / "run")
    run.trainer.checkpoints.line = Line(steps.trainer.run_id)
    for path in checkpoints(steps.directory / "checkpoints"):
        found = Checkpoint.open(path)
        if found.manifest.standing.iteration == at:
            tensors = {layer: found.read(layer) for layer in run.trainer.session.pipeline.modules()}
            standing = found.manifest.standing
        if found.manifest.standing.iteration not in whole:
            shutil.rmtree(path)
    run.trainer.restore(standing, tensors)
    assert run.trainer._owes_checkpoint == (saves is not None)
    assert ("was lost on its way" in run.said) == (saves is not None and at not in (8, 6))
