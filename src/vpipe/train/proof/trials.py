"""What the ranks of ``vpipe doctor --gpu`` do: trial after trial, each told before it begins and when it has ended.

    vpipe run --nproc N -m vpipe.train.proof.trials FOLDER

FOLDER has the trials (``trials.json``, written by ``cli.acceptance``), and gets what rank 0 tells (``told.jsonl``).
Training is compared with a plain loop, or for old weights with their replay, on the device of rank 0 alone.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import permutations
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from vpipe.errors import UserError
from vpipe.layer import Layer, TiedWeight
from vpipe.models.translation import translation
from vpipe.plan.costs import Profile
from vpipe.plan.layout import PlannedLayout
from vpipe.plan.memory import Choice
from vpipe.plan.predict import Machine, Pipe, predict
from vpipe.plan.profile import Measuring, measure_layers
from vpipe.runtime import assembly
from vpipe.runtime.departures import Staging, landed
from vpipe.runtime.device import compute_stream, current, place, take_peak
from vpipe.runtime.microbatches import units_of
from vpipe.runtime.pipeline import Pipeline
from vpipe.runtime.proof.check import Recipe, one_process
from vpipe.runtime.proof.plain import PlainUnit
from vpipe.runtime.updates.update import LossScale
from vpipe.schedule import catalog
from vpipe.train.proof.parity import compare

STEPS, VOCABULARY = 3, 50
optimizer = partial(torch.optim.AdamW, lr=1e-3)
NEAR = 1e-5
"""Differences up to this are last bits, which another kernel or another order of a sum may give."""
Trial = Mapping[str, Any]
Told = dict[str, Any]


class TrialCase(NamedTuple):
    """A model, its batches, and what its pipeline is told beside."""

    layers: list[Any]
    loss: Callable[[Any, Any], Tensor]
    batches: list[tuple[Any, Any]]
    options: dict[str, Any]
    tied: tuple[TiedWeight, ...] = ()


class Block(nn.Module):
    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        grown: Tensor = self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))))
        return x + grown


class Mixed(nn.Module):
    """Takes some values and gives some, each of which depends on all."""

    def __init__(self, width: int, given: int) -> None:
        super().__init__()
        self.inner, self.given = nn.Linear(width, width), given

    def forward(self, *values: Tensor) -> Any:
        mixed = torch.tanh(self.inner(torch.stack([x * (1 + i) for i, x in enumerate(values)]).sum(0)))
        found = tuple(mixed * (0.5 + number) + values[number % len(values)] for number in range(self.given))
        return found if self.given > 1 else found[0]


CARRIED = {"two tensors": (("x", "y"), ()), "two-tensor skip": (("x",), ("s", "t"))}
"""What every message of the chain carries, and what skips from the first layer to the last."""
OPTIONS: Told = {"bfloat16": {"loss_scale": LossScale(8.0)}, "dropout": {"recompute": 0.5}, "swap": {"swap": 1.0}}
"""What the pipeline of a model is told."""


def case_of(trial: Trial) -> TrialCase:
    """The same on every rank, and every time."""
    torch.manual_seed(0)
    name, width, units = trial["model"], trial["width"], 2 * trial["ranks"]
    number = trial["ranks"] * max(2, catalog.get(trial["schedule"]).stages_per_rank)
    rows = units * width // 4
    options = {"autocast": nullcontext, "loss_scale": LossScale(), **OPTIONS.get(name, {})}
    if name == "translation":
        made = translation(vocab_size=VOCABULARY, hidden_size=width, num_layers=number, num_heads=2, sequence_length=8)
        words = torch.randint(2, VOCABULARY, (STEPS, 3, 2 * units, 8))
        texts = [({"source": source, "target_in": before}, after) for source, before, after in words]
        return TrialCase(made.layers, made.loss, texts, options, made.tied)
    batches = [(x, y) for x, y in torch.randn(STEPS, 2, rows, width)]
    if name in CARRIED:
        chain, skip = CARRIED[name]
        reads = [("x",), *[chain] * (number - 2), (*chain, *skip)]
        writes = [(*chain, *skip), *[chain] * (number - 2), ("x",)]
        pairs = zip(reads, writes, strict=True)
        mixed = [Layer(Mixed(width, len(given)), reads=taken, writes=given) for taken, given in pairs]
        return TrialCase(mixed, nn.functional.mse_loss, batches, options)
    if name == "bfloat16":
        options["autocast"] = partial(torch.autocast, torch.device(trial["device"]).type, torch.bfloat16)
    blocks = [Block(width, 0.1 if name == "dropout" else 0.0) for _ in range(number)]
    tied = (TiedWeight(((0, "up.weight"), (number - 1, "up.weight"))),) if name == "tied" else ()
    if tied:
        blocks[-1].up.weight.data.copy_(blocks[0].up.weight)
    return TrialCase(blocks, nn.functional.mse_loss, batches, options, tied)


def pipeline_of(trial: Trial, case: TrialCase) -> Pipeline:
    told = {"device": trial["device"], "timeout": trial["limit"], "num_microbatches": 2 * trial["ranks"]}
    told |= {"optimizer": optimizer, **case.options, **trial.get("options", {})}
    return Pipeline(case.layers, case.loss, schedule=trial["schedule"], tied=case.tied, **told)


def equal(trial: Trial, folder: Path) -> Told:
    """Three steps: the first tells the forms of messages, the others send them alone."""
    case = case_of(trial)
    try:
        pipe = pipeline_of(trial, case)
    except UserError as error:
        return {"verdict": "refused", "detail": str(error)}
    kept, seen = list[Tensor](), dict[str, Tensor]()
    for step, batch in enumerate(case.batches):
        seen[f"{step}/loss"] = torch.tensor(pipe.train_step(*batch), dtype=torch.float64)
        if step == 0 and "fill" in trial:
            kept = filled(pipe.devices[0], trial["fill"])
        if step == 0 and "checkpoints" in trial:
            copied(pipe, trial["checkpoints"])
    seen |= {f"{STEPS - 1}/weight/{name}": x.detach().cpu().contiguous() for name, x in pipe.state_dict().items()}
    folder.mkdir(exist_ok=True)
    save_file(seen, folder / f"rank{pipe.rank}.safetensors")
    pipe.gather("written")
    kept.clear()  # the reference is not what is tried
    found = compare(folder, expected(pipe, case_of(trial)) if pipe.is_leader else {})
    pipe.close()
    verdict = "equal" if found.equal else "near" if 0 < found.largest <= NEAR else "DIFFERS"
    return {"verdict": verdict, "detail": found.difference or f"{found.num_tensors} values"}


def expected(pipe: Pipeline, case: TrialCase) -> dict[str, Tensor]:
    """The same steps on one device, by loops that share nothing with the engine."""
    device, program = pipe.devices[0], pipe.program()
    layers = [layer if isinstance(layer, Layer) else Layer(layer) for layer in case.layers]
    modules = {number: place(layer.build(), device) for number, layer in enumerate(layers)}
    loss = place(case.loss, device) if isinstance(case.loss, nn.Module) else case.loss
    options = {"seed": pipe.seed, "tied": case.tied, "clip_norm": None, "autocast": case.options["autocast"]}
    if pipe.synchronous:
        options["scale"] = case.options["loss_scale"].value
    with current(device):
        train, loop = one_process(Recipe(pipe, program, modules, loss, optimizer, None, options), pipe.synchronous)
        seen, count = dict[str, Tensor](), program.num_microbatches
        for step, (inputs, targets) in enumerate(case.batches):
            units, goals = (units_of(value, count, True, "batch")[0] for value in (inputs, targets))
            there = partial(tree_map_only, Tensor, lambda tensor: tensor.to(device))
            parts = [PlainUnit(there(units(k)), there(goals(k)), 1 / count) for k in range(count)]
            seen[f"{step}/loss"] = torch.tensor(train(parts, True), dtype=torch.float64)
    state = loop.state_dict()
    return seen | {f"{STEPS - 1}/weight/{name}": x.detach().cpu() for name, x in state.items()}


def filled(device: torch.device, share: float) -> list[Tensor]:
    """What takes a device's memory, but for a part."""
    torch.accelerator.empty_cache()
    free, total = torch.accelerator.get_memory_info(device)
    size, kept = int(free - (1 - share) * total), list[Tensor]()
    while size >= 512:
        try:
            kept.append(torch.empty(size, dtype=torch.uint8, device=device))
        except torch.OutOfMemoryError:
            size //= 2
        else:
            size = size if share == 1 else 0
    return kept


def copied(pipe: Pipeline, times: int) -> None:
    """So many copies of the weights to the host, as checkpoints make them; then a layer moves."""
    state = {0: dict(pipe.state_dict())}
    for _ in range(times):
        landed(Staging().copy(state)[1])
    counts = list(pipe.partition)
    counts[0], counts[-1] = counts[0] - 1, counts[-1] + 1
    pipe.move(pipe.layout.with_counts(counts))


def killed(trial: Trial, folder: Path) -> Told:
    """The last rank dies in the forward of its second step; or it finds its device without memory."""
    case = case_of(trial)
    pipe = pipeline_of(trial, case)
    kept = list[Tensor]()
    for step, batch in enumerate(case.batches):
        if step == 1 and pipe.rank == trial["ranks"] - 1:
            kept = filled(pipe.devices[0], 1.0) if trial["how"] == "memory" else []
            folder.with_name("mark").touch()
            if trial["how"] == "signal":
                first = next(iter(pipe.modules().values()))
                first.register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        pipe.train_step(*batch)
    return {"verdict": "FAILS", "detail": f"all steps were made, with {len(kept)} blocks of memory taken"}


def device_of(trial: Trial) -> torch.device:
    """The device of this rank, which has joined the others."""
    (device,) = assembly.devices_here(trial["device"], assembly.join(trial["limit"]), in_process=False, threads=False)
    torch.accelerator.set_device_index(device.index)
    return device


COPY = 1 << 24
"""Bytes that go from one device to another."""
PRODUCTS = 16
"""How many keep a device busy."""


def reach(trial: Trial, folder: Path) -> Told:
    """A block goes from every device to every other one and is compared there."""
    devices = [torch.device(trial["device"], index) for index in range(torch.accelerator.device_count())]
    rates, broken = [], []
    for here, there in permutations(devices, 2):
        sent = torch.arange(COPY // 8, device=here) * (here.index + 3)
        sent.to(there)  # the first one may open the way
        torch.accelerator.synchronize(here)
        begin = perf_counter()
        found = sent.to(there)
        torch.accelerator.synchronize(there)
        rates.append(COPY / (perf_counter() - begin) / 1e9)
        broken += [] if torch.equal(found.cpu(), sent.cpu()) else [f"{here.index} → {there.index}"]
    detail = f"{len(rates)} ways, {min(rates):.2f} to {max(rates):.2f} GB/s"
    return {"verdict": "BROKEN" if broken else "all work", "detail": ", ".join([*broken, detail])}


def posted(trial: Trial, folder: Path) -> Told:
    """What products take under 0, 1, 2, 4 posted receives, and what of a message hides behind them."""
    device = device_of(trial)
    backend, rank = dist.get_default_backend_for_device(device), dist.get_rank()
    groups = [dist.new_group([0, 1], backend=backend) for _ in range(4)]
    blocks = [torch.full((trial["width"] ** 2,), float(rank), device=device) for _ in groups]
    matrix = torch.ones(trial["width"], trial["width"], device=device)

    def transfer(number: int) -> list[Any]:
        return [(dist.isend if rank else dist.irecv)(blocks[k], 1 - rank, group=groups[k]) for k in range(number)]

    def timed(products: int, works: Sequence[Any] = ()) -> float:
        begin = perf_counter()
        for _ in range(products):
            matrix @ matrix
        for work in works:
            work.wait()
        compute_stream(device).synchronize()  # not the device, on which receives may be under way
        return (perf_counter() - begin) * 1e3

    timed(PRODUCTS, transfer(len(groups)))
    busy, under = PRODUCTS * (rank == 0), {}
    for count in (0, 1, 2, 4):
        works = transfer(count) if rank == 0 else []
        under[count] = timed(busy)  # with the receives under way: a device that cannot do both stands here
        dist.barrier()
        timed(0, works or transfer(count))
    dist.barrier()
    alone = timed(0, transfer(1))
    dist.barrier()
    both = timed(busy, transfer(1))
    hidden = max(0.0, min(1.0, (under[0] + alone - both) / min(under[0], alone)))
    slower = ", ".join(f"{count}: {under[count] / under[0]:.2f}" for count in (1, 2, 4))
    detail = f"products {under[0]:.1f} ms; slower under receives {slower}; {hidden:.0%} of a message hidden"
    return {"verdict": "measured" if all(bool((block == 1).all()) for block in blocks) else "DIFFERS", "detail": detail}


def predicted(trial: Trial, folder: Path) -> Told:
    """A step and a peak as the planner predicts them, and as they are."""
    ranks, width, units = trial["ranks"], trial["width"], 2 * trial["ranks"]
    rows = 4 * width
    torch.manual_seed(0)
    layers = [Layer(Block(width)) for _ in range(2 * ranks)]
    x = torch.randn(rows * units, width)
    device = device_of(trial)
    measuring = Measuring(nn.functional.mse_loss, optimizer, repeat=3, device=device)
    costs, size = measure_layers(layers, x[:rows], x[:rows], measuring)
    profile = Profile(tuple(costs), size, rows, swap_bandwidth=1e9, device={"memory_bytes": 1e12})
    layout = PlannedLayout.of_counts([2] * ranks, [[Choice.KEEP] * 2] * ranks)
    told = predict(profile, layout, Pipe.of("1f1b", ranks, units), Machine.of(ranks, None))
    pipe = pipeline_of(trial, TrialCase(layers, nn.functional.mse_loss, [], {"skip_nonfinite": False}))
    before = torch.accelerator.memory_allocated(device)
    pipe.train_step(x, x)
    take_peak(device)
    begin = perf_counter()
    pipe.train_step(x, x)
    seconds, peak = perf_counter() - begin, (take_peak(device) or 0) - before
    pipe.close()
    memory = told.rank_memory[pipe.rank]
    verdict = "measured" if 0.5 <= peak / memory <= 2 else "FAR OFF"
    mib = f"peak {peak / 2**20:.1f} MiB, predicted {memory / 2**20:.1f}"
    return {"verdict": verdict, "detail": f"{mib}; step {seconds * 1e3:.1f} ms, predicted {told.step_time * 1e3:.1f}"}


KINDS = {kind.__name__: kind for kind in (equal, killed, reach, posted, predicted)}


def main(folder: Path) -> None:
    """All trials, one after the other."""
    torch.set_num_threads(1)

    def tell(**words: Any) -> None:
        if os.environ.get("RANK", "0") == "0":
            with open(folder / "told.jsonl", "a") as file:
                file.write(json.dumps(words) + "\n")

    for number, trial in enumerate(json.loads((folder / "trials.json").read_text())):
        tell(begun=number)
        begin = perf_counter()
        found = KINDS[trial["kind"]](trial, folder / str(number))
        tell(ended=number, seconds=perf_counter() - begin, **found)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
