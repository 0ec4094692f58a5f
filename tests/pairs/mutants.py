"""Sixty mutants at the seams of the runtime, which the pair table alone is to kill.

    python tests/pairs/mutants.py                 all, in scratch copies of the tree: which live, and the ratio
    python tests/pairs/mutants.py recipe          those of rates, groups, pruning, averages …: ``recipe_mutants``
    python tests/pairs/mutants.py region:3 ...    these

A mutant is a file of ``src/vpipe/runtime``, a text that stands in it once, and what stands there instead. It is killed by the
first case of the table that is not equal or not refused as expected: the one of ``KILLERS``, else one in the order of
``cases_in_order``, which is then shrunk. torch is imported once; each mutant is a fork that imports vpipe from its own copy, and
ranks that are processes are forks of that.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import recipe_mutants

Case = dict[str, Any]
FORKS = get_context("fork")
HERE = Path(__file__).parent
SOURCE = HERE.parents[1] / "src"
LIMIT = 1800.0
"""Seconds for one mutant; one that hangs is killed, and that counts."""
RANK_LIMIT = 60.0
"""Seconds for a case on ranks that are processes."""

MUTANTS: dict[str, list[tuple[str, str]]] = {
    "region": [
        ("if value in self.shared:\n                edges.append(edge_of(found))", "if False:\n                pass"),
        ("found = inside.get(id(tensor))", "found = None"),
        ("for value, edges in (*graph.roots, *taken):", "for value, edges in (*taken, *graph.roots):"),
        ("gradients.append(scalar(weight, dtype, device))", "gradients.append(scalar(1.0, dtype, device))"),
        ("seed_layer(run.seed, run.unit, layer)", "seed_layer(run.seed, run.unit, layer - self.begin)"),
        ("parts = [scalar for _, scalar in outcome.added] +", "parts = [] +"),
        ("if self.changes is None or value in self.changes]", "if self.changes is None]"),
        ("if value[1] < self.begin})", "if value[1] < self.begin - 1})"),
    ],
    "stage": [
        ("key=lambda value: -later[value])", "key=lambda value: later[value])"),
        ("unit.found = found.settle(self.changing.changing)", "unit.found = None"),
        (
            "with self.changing.kept(partial(self._roots, unit)), self._unshared(), self._watched():",
            "with self._watched():",
        ),
        ("unit.values.update(region.held(values))", "unit.values.update({v: values[v] for v in region.taken})"),
        ("_keep_apart(values, region.given, unit.values)", "pass"),
        (
            "again = Unit(unit.version, unit.run, unit.targets)",
            "again = Unit(unit.version, unit.run._replace(unit=0), unit.targets)",
        ),
        ("unit.loss = outcome.loss\n        return", "unit.loss = outcome.loss * 1.0001\n        return"),
        ("if number > 1}", "if number > 2}"),
        ("region.backward(graph, pending, unit.weight, run)", "region.backward(graph, pending, 0.25, run)"),
    ],
    "buffers": [
        ("                    keep()", "                    pass"),
        ("now._put()", "pass"),
        ("            set_state(generator, state)", "            pass"),
        ("found[part][slot] = copy if changed else buffer", "found[part][slot] = buffer"),
        ("None if changes else partial(", "None if True else partial("),
    ],
    "crossing": [
        (
            "return tensor.detach().clone().requires_grad_(tensor.requires_grad)",
            "return tensor.detach().requires_grad_(tensor.requires_grad)",
        ),
        ("gradients[index] = found[0]", "gradients[0] = found[0]"),
        ('return ("again", place)', "return TENSOR if not tensors.append(tensor) else TENSOR"),
        ("fill(copy, tensor)", "fill(copy, tensor * 1.0001)"),
        ("increment_version(tensor)", "pass"),
    ],
    "surroundings": [
        ("part.training = leader.training", "pass"),
        ("parameter.copy_(weight)", "pass"),
        ("parameter.requires_grad_(weight.requires_grad)", "pass"),
        ("parameter._backward_hooks = weight._backward_hooks", "pass"),
        ("parameter._post_accumulate_grad_hooks = weight._post_accumulate_grad_hooks", "pass"),
        ("for part, training in parts.items():", "for part, training in ():"),
        ("        torch.clear_autocast_cache()", "        pass"),
        ("torch.default_generator.set_state(state)", "pass"),
    ],
    "split/deferred": [
        ("everything = self._stashes or", "everything ="),
        ("if gradient is not None and (self._stashes or number in self._ever):", "if False:"),
        ("self._ever |= promise.analysis.waiting", "pass"),
        ("return bool(weight._backward_hooks or weight._post_accumulate_grad_hooks)", "return False"),
        (
            "for waiting in self._waiting.pop(microbatch, ()):",
            "for waiting in list(self._waiting.pop(microbatch, ()))[1:]:",
        ),
    ],
    "split/promise": [
        ("yield self._bias, dy.sum(0)", "yield self._bias, dy.mean(0)"),
        ("accumulate(weight, gradient)\n        if carried:", "weight.grad = gradient\n        if carried:"),
    ],
    "updates/update": [
        ("                clip(stage.weights.parameters.values(), factors)", "                pass"),
        ("                divide(gradients_of(stage), self.loss_scale)", "                pass"),
        ("total = total + other", "total = other + other"),
        ("elif bool(finite):\n            update()", "else:\n            update()"),
        ("forget_casts()\n\n    def _judged", "pass\n\n    def _judged"),
        ("if not self._synchronous:\n                total.div_(len(ranks))", "total.div_(len(ranks))"),
    ],
    "updates/weights": [
        ("parameter.data = parameter.data.clone()", "pass"),
        ("parameter.grad.add_(gradient)", "parameter.grad = gradient"),
        ("if version == self._installed:\n            return", "if self._installed is not None:\n            return"),
    ],
    "updates/tied_gradients": [
        ("key=lambda place: -tie.owners[place][0])", "key=lambda place: tie.owners[place][0])"),
        (
            "parameter.grad = total.clone()",
            "parameter.grad = total.clone() if parameter is parameters[0] else parameter.grad",
        ),
    ],
    "updates/replicas": [
        ("mine.copy_(theirs)", "pass"),
    ],
    "updates/agreement": [
        (
            "for tie in tied for layer, name in tie.owners[1:]}\n    return [name",
            "for tie in () for layer, name in tie.owners[1:]}\n    return [name",
        ),
        (
            "by_layer.setdefault(layer, (known[begin:at], sorts))",
            "by_layer.setdefault(-layer, (known[begin:at], sorts))",
        ),
    ],
    "moves/layer_state": [
        ("part.training = training", "pass"),
        ("parameter.requires_grad_(name not in frozen)", "pass"),
        ("module.get_submodule(owner)._buffers[slot] = tensor.to(device)", "pass"),
        ("optimizer.state[parameter] = unflatten(placed)", "pass"),
    ],
    "moves/moving": [
        ("engine.updater.go_on_from(old[engine.rank].updater, num_updates)", "pass"),
    ],
    "memory/saved_tensors": [
        (
            "self._place = (tensor.storage_offset(), tensor.shape, tensor.stride())",
            "self._place = (0, tensor.shape, tensor.stride())",
        ),
        ("self._tensor = copied(self._tensor)", "pass"),
        ("elif self._note is not None:", "elif False:"),
    ],
}
"""File → (text that stands in it once, what stands there instead)."""


KILLERS: dict[str, str] = {
    "region:0": "schedule=hanayo ranks=4 memory=recompute skip=residual",
    "region:1": "schedule=gpipe ranks=4 memory=swap skip=twice values=tuple workers=True inplace=view",
    "region:3": "rows=uneven accumulate=2 replicas=2",
    "region:4": "ranks=4 dropout=True",
    "region:5": "loss=added",
    "region:6": "memory=recompute inplace=batch",
    "region:7": "skip=direct",
    "stage:0": "ranks=4 memory=alternate skip=alias",
    "stage:1": "memory=recompute norm=batch",
    "stage:2": "norm=read",
    "stage:3": "memory=recompute inplace=batch",
    "stage:4": "ranks=1 memory=alternate inplace=kept",
    "stage:5": "memory=recompute dropout=True",
    "stage:6": "ranks=1",
    "stage:7": "schedule=hanayo ranks=4 memory=recompute skip=residual",
    "stage:8": "rows=uneven accumulate=2",
    "buffers:0": "norm=read",
    "buffers:1": "memory=recompute norm=batch",
    "buffers:2": "memory=recompute generator=torch",
    "buffers:3": "memory=recompute norm=batch",
    "buffers:4": "norm=read",
    "crossing:0": "norm=read",
    "crossing:1": "values=tuple",
    "crossing:2": "schedule=gpipe ranks=4 memory=swap skip=twice values=tuple workers=True inplace=view",
    "crossing:3": "memory=recompute inplace=batch",
    "surroundings:0": "replicas=2 dropout=True modes=True",
    "surroundings:1": "replicas=2 teacher=True",
    "surroundings:2": "replicas=2 frozen=turns",
    "surroundings:3": "replicas=2 hook=tensor",
    "surroundings:4": "replicas=2 hook=accumulated",
    "surroundings:5": "norm=batch dropout=True evaluates=True modes=True",
    "surroundings:6": "ranks=1 autocast=whole",
    "surroundings:7": "dropout=True",
    "split/deferred:0": "schedule=own hook=accumulated function=own",
    "split/deferred:1": "schedule=zb-h2 units=5 cut=back accumulate=2 function=branches",
    "split/deferred:2": "schedule=zb-h2 units=5 cut=back accumulate=2 function=branches",
    "split/deferred:3": "schedule=zb-h1 hook=accumulated",
    "split/deferred:4": "schedule=zb-h1",
    "split/promise:0": "schedule=zb-h1",
    "split/promise:1": "schedule=zb-h1",
    "updates/update:0": "clip=0.05",
    "updates/update:1": "scale=8.0",
    "updates/update:2": "replicas=2",
    "updates/update:3": "nonfinite=True",
    "updates/update:4": "ranks=1 autocast=whole",
    "updates/update:5": "replicas=2",
    "updates/weights:0": "schedule=pipedream",
    "updates/weights:1": "schedule=pipedream-2bw",
    "updates/weights:2": "schedule=pipedream",
    "updates/tied_gradients:0": "tie=three",
    "updates/tied_gradients:1": "ranks=1 tie=declared",
    "updates/replicas:0": "replicas=2 norm=read evaluates=True",
    "updates/agreement:0": "clip=0.05 tie=declared",
    "updates/agreement:1": "schedule=zb-v clip=0.05 tie=declared",
    "moves/layer_state:0": "norm=batch modes=True moves=ranks processes=True",
    "moves/layer_state:1": "frozen=once moves=ranks processes=True",
    "moves/layer_state:2": "norm=batch moves=ranks processes=True",
    "moves/layer_state:3": "optimizer=momentum moves=ranks processes=True",
    "moves/moving:0": "rates=function moves=ranks",
    "memory/saved_tensors:0": "memory=swap function=chunks",
    "memory/saved_tensors:1": "memory=swap norm=read",
    "memory/saved_tensors:2": "memory=swap inplace=buffer",
}
"""Mutant → the case that killed it when it was last looked for; it is tried first."""
EQUIVALENT: dict[str, str] = {
    "region:2": "both lists have one edge only where a layer gives on what it takes: docs/equality.md promises no brackets there",
    "crossing:4": "autograd is told of a change so that it refuses a backward, and every program of the table trains",
}
"""Mutants that live, and why."""
NONE = "none"
"""The tree as it is: it has to live, or every mutant would be killed."""


def names() -> list[str]:
    return [f"{file}:{number}" for file, found in MUTANTS.items() for number in range(len(found))]


def mutant(name: str) -> tuple[Path, str, str]:
    """Its file within vpipe, the text, and what stands there instead."""
    if name in recipe_mutants.names():
        return recipe_mutants.mutant(name)[:3]
    file, _, number = name.partition(":")
    return Path("runtime", f"{file}.py"), *MUTANTS[file][int(number)]


def mutated(name: str, folder: Path) -> None:
    """The tree in a folder with this one change."""
    shutil.copytree(SOURCE / "vpipe", folder / "vpipe", ignore=shutil.ignore_patterns("__pycache__"))
    if name == NONE:
        return
    file, old, new = mutant(name)
    path = folder / "vpipe" / file
    text = path.read_text()
    assert text.count(old) == 1, f"{name}: {old!r} stands {text.count(old)} times in {path.name}"
    path.write_text(text.replace(old, new))


def cases_in_order() -> Iterator[Case]:
    """What was once wrong, all pairs, moves between processes, values alone, some random cases."""
    import cases
    from test_pairs import ONCE_WRONG

    yield from (cases.parsed(words.split()) for words in ONCE_WRONG)
    yield from cases.covering(0)
    among = (case for case in cases.covering(0, elsewhere=["processes"]) if case["processes"])
    yield from (case for case in among if case["moves"] in ("counts", "ranks"))
    alone = (cases.complete({name: value}) for name, values in cases.FEATURES.items() for value in values[1:])
    yield from (
        case for case in alone if not cases.impossible(case) and not any(case[each] for each in cases.ELSEWHERE)
    )
    dice = random.Random(0)
    yield from (cases.drawn(dice) for _ in range(100))


def on_a_rank(rank: int, num_ranks: int, store: str, program: str, pipe: Connection) -> None:
    import cases
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks)
    pipe.send(cases.run_in_a_rank(program))
    os._exit(0)


def on_ranks(num_ranks: int, program: str) -> list[str]:
    """What each of so many ranks says that are processes."""
    with tempfile.TemporaryDirectory(prefix="vpipe-ranks-") as folder:
        pipes, ranks = [], []
        for rank in range(num_ranks):
            here, there = FORKS.Pipe(duplex=False)
            ranks.append(FORKS.Process(target=on_a_rank, args=(rank, num_ranks, f"{folder}/store", program, there)))
            ranks[-1].start()
            there.close()
            pipes.append(here)
        try:
            return [pipe.recv() if pipe.poll(RANK_LIMIT) else "WRONG: a rank hangs" for pipe in pipes]
        except EOFError:
            return ["WRONG: a rank died"]
        finally:
            for each in ranks:
                each.kill()
                each.join()


def hunt(folder: str, chosen: list[Case], pipe: Connection) -> None:
    """Tell the first case that notices the change, as small as it can be; nothing where none does."""
    sys.path[:0] = [folder, str(HERE)]
    import cases

    import vpipe

    assert vpipe.__file__.startswith(folder), vpipe.__file__
    cases.RUN_IN_PROCESSES[:] = [on_ranks]
    warnings.simplefilter("ignore")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    for case in chosen:
        if cases.check(case):
            small = case if chosen[0] is case else cases.shrunk(case)
            pipe.send(f"{cases.command(small)[28:]}  # {cases.check(small)[:100]}")
            break
    else:
        pipe.send("")
    pipe.close()
    os._exit(0)


def listed(folder: str, killer: str, pipe: Connection) -> None:
    """Tell all cases, or the one of these words."""
    sys.path[:0] = [folder, str(HERE)]
    import cases

    pipe.send([cases.parsed(killer.split())] if killer else list(cases_in_order()))
    os._exit(0)


def told(folder: str, chosen: Any, task: Callable[[str, Any, Connection], None]) -> Any:
    """What a fork tells; ``None`` where it dies or hangs."""
    here, there = FORKS.Pipe(duplex=False)
    process = FORKS.Process(target=task, args=(folder, chosen, there))
    process.start()
    there.close()
    try:
        return here.recv() if here.poll(LIMIT) else None
    except EOFError:
        return None
    finally:
        process.kill()
        process.join()


def fate(name: str, chosen: list[Case]) -> str:
    """What killed a mutant; empty where it lives."""
    with tempfile.TemporaryDirectory(prefix="vpipe-mutant-") as folder:
        mutated(name, Path(folder))
        of_recipe = name in recipe_mutants.names()
        said = (
            told(folder, recipe_mutants.mutant(name)[3], recipe_mutants.hunt)
            if of_recipe
            else told(folder, chosen, hunt)
        )
    return "it died or hung" if said is None else said


def main(words: list[str]) -> int:
    import torch
    import torch._dynamo

    torch.set_num_threads(1)
    words = recipe_mutants.names() if words == ["recipe"] else words
    of_runtime = not all(name.startswith("recipe/") for name in words or names())
    every, begin = told(str(SOURCE), "", listed) if of_runtime else [], time.monotonic()
    if not words and (said := fate(NONE, every)):
        print(f"the tree as it is: {said}")
        return 1
    alive, wanted = [], words or [name for name in names() if name not in EQUIVALENT]
    for name in wanted:
        killer = KILLERS.get(name, "")
        said = (fate(name, told(str(SOURCE), killer, listed)) if killer else "") or fate(name, every)
        alive += [] if said else [name]
        print(f"{name:<26} {said or 'LIVES'}", flush=True)
    killed, minutes = len(wanted) - len(alive), (time.monotonic() - begin) / 60
    print(f"{len(every)} cases; {killed} of {len(wanted)} killed in {minutes:.0f} minutes; alive: {alive}")
    return bool(alive)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
