"""Mutants: each wait of a stream, each recorded use of memory, each host's wait is left out once, two sends change places;
every one must be caught, within a process and between processes."""

from __future__ import annotations

import ast
import importlib
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from device_cases import Outcome, assert_equal, plain, trained
from emulated_ranks import on_ranks
from safetensors.torch import load_file

import vpipe
from vpipe.runtime.device_times import DeviceTimes
from vpipe.runtime.transport import device as device_transport
from vpipe.runtime.transport.wire import Envelope

SOURCE = Path(vpipe.__file__).parent
FILES = {
    "handover": "runtime/transport/handover",
    "prefetch": "runtime/prefetch",
    "swap_device": "runtime/memory/swap_device",
    "departures": "runtime/departures",
    "writer": "train/checkpoints/writer",
    "elastic": "train/elastic",
}
ORDERS = {"wait_event", "wait_stream", "share", "landed"}
"""A statement that is a call of one of these orders two streams, keeps memory, or waits for what the host reads."""
HOSTS_WAIT = {"departures": "synchronize"}
"""Where the host waits for pinned memory."""
ELSEWHERE = {
    "runtime/device": "record_stream is what 'share' is; each call of that is a mutant",
    "runtime/memory/swap_device": "synchronize: after a failure, when no number is used",
    "runtime/ranks/device_groups": "synchronize: after an abort, when no number is used",
    "plan/transfer": "synchronize: a measurement ends",
    "train/proof/trials": "synchronize: a measurement ends",
}
"""Modules with waits that no mutant here leaves out, and why. (Waits between processes: ``BETWEEN``.)"""


def waits_of(file: str) -> list[int]:
    """The lines of a module on which it waits for a stream, or shares memory with one."""
    names = ORDERS | {HOSTS_WAIT.get(file, "")}
    return [line for name, line in calls_of(SOURCE / f"{FILES[file]}.py") if name in names]


def calls_of(path: Path) -> list[tuple[str, int]]:
    """Statements of a module that are calls: name and line."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            called = node.value.func
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            found.append((name, node.lineno))
    return sorted(found, key=lambda call: call[1])


MUTANTS = [(file, line) for file in FILES for line in waits_of(file)]


def test_every_wait_of_the_source_is_on_the_list() -> None:
    """A wait that somebody adds gets a mutant, or a reason."""
    known = set(FILES.values())
    for path in sorted(path for path in SOURCE.rglob("*.py") if "models" not in path.parts):
        module = path.relative_to(SOURCE).with_suffix("").as_posix()
        waits = {name for name, _ in calls_of(path)} & {*ORDERS, "record_stream", "synchronize"}
        if waits - (ORDERS if module in known else set()):
            mutated = [file for file, name in HOSTS_WAIT.items() if FILES[file] == module and name in waits]
            assert mutated or module in ELSEWHERE, f"{module} has {waits}, which no mutant leaves out"


@contextmanager
def without(file: str, line: int) -> Iterator[None]:
    """The module without the statement on this line, in every module that has taken something from it."""
    module = importlib.import_module(f"vpipe.{FILES[file].replace('/', '.')}")
    tree = ast.parse((SOURCE / f"{FILES[file]}.py").read_text())
    for node in ast.walk(tree):
        for body in (getattr(node, "body", None), getattr(node, "orelse", None)):
            for place, statement in enumerate(body if isinstance(body, list) else ()):
                if statement.lineno == line and isinstance(statement, ast.Expr):
                    body[place] = ast.copy_location(ast.Pass(), statement)  # type: ignore[index]
    before = dict(vars(module))
    exec(compile(tree, f"{file} without line {line}", "exec"), vars(module))  # noqa: S102 - our own source, less a line
    changed = {id(old): getattr(module, name) for name, old in before.items() if getattr(module, name) is not old}
    patched = []
    for other in [m for name, m in sys.modules.items() if name.startswith("vpipe.") and m is not module]:
        for name, value in list(vars(other).items()):
            if id(value) in changed and callable(value):
                patched.append((other, name, value))
                setattr(other, name, changed[id(value)])
    try:
        yield
    finally:
        vars(module).update(before)
        for other, name, value in patched:
            setattr(other, name, value)


PROGRAMS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "handover": (4, "1f1b", {"num_ranks": 2, "num_microbatches": 6}),
    "prefetch": (2, "gpipe", {"num_ranks": 1, "num_microbatches": 12}),
    "departures": (1, "gpipe", {"num_ranks": 1, "num_microbatches": 1}),
    "writer": (1, "gpipe", {"num_ranks": 1, "num_microbatches": 1}),
    "elastic": (1, "gpipe", {"num_ranks": 1, "num_microbatches": 1}),
    "swap_device": (6, "1f1b", {"num_ranks": 3, "num_microbatches": 8, "swap": 1.0}),
}
"""(layers, schedule, options) that need every wait of a module."""
TRIES = 6
"""A race is lost by chance: how often each way of running may fail to show a missing wait."""
HARD: list[dict[str, float]] = [
    {"lazy": 1},
    {"jitter_us": 300, "seed": 7},
    {"op_us": 500},
    {"copy_bytes_per_us": 4},
    {"copy_bytes_per_us": 4, "lazy": 1},
    {"copy_bytes_per_us": 20, "poison": 0},
]
"""Ways of running streams in which a forgotten wait shows; the last ones make copies or kernels slow."""


def swapped_directly(emulated: Any) -> list[float]:
    """Five storages go out and come back early, while kernels that read the ones before are still queued; then others
    take their pinned memory. (What the first version of this lane got wrong in two ways.)"""
    from vpipe.runtime.memory.swap import Swappable

    module = importlib.import_module("vpipe.runtime.memory.swap_device")
    device, size = torch.device("emu:0"), 8192
    lane = module.DeviceSwapper(device, DeviceTimes(device))
    slots = [Swappable(torch.full((size,), value + 1.0, device="emu:0").untyped_storage()) for value in range(5)]
    for number, slot in enumerate(slots):
        lane.out([slot], f"unit {number}")
    moves = [lane.fetch([slot], "back") for slot in slots[:3]]
    others = [Swappable(torch.full((size,), -1.0, device="emu:0").untyped_storage()) for _ in range(3)]
    for slot in others:
        lane.out([slot], "another")
    moves += [lane.fetch([slot], "back") for slot in slots[3:]]
    found = []
    for slot, move in zip(slots, moves, strict=True):
        move.wait()
        emulated.native.sleep(3000)
        found.append(torch.empty(0, device="emu:0").set_(slot.full(), 0, (size,), (1,)) * 1)  # the backward
        slot.empty()
    values = [float(tensor.mean()) for tensor in found]
    lane.abandon()
    lane.close()
    return values


def departed_directly(emulated: Any) -> list[float]:
    """A weight that is still being computed leaves for the host, and is changed at once by the next kernel."""
    module = importlib.import_module("vpipe.runtime.departures")
    found = []
    for value in (1.0, 2.0, 3.0):
        weight, place = torch.zeros(8192, device="emu:0"), torch.zeros(8192, pin_memory=True)
        emulated.native.sleep(3000)
        weight.fill_(value)
        copies = module.Departures()
        copies.copy(place, weight)
        arrivals = copies.arrivals()
        weight.fill_(-1.0)
        if value == 3.0:
            torch.accelerator.current_stream(torch.device("emu:0")).synchronize()  # what comes next may come first
        module.landed(arrivals)
        found.append(float(place.mean()))
        torch.accelerator.synchronize(0)
    return found


def written_directly(emulated: Any) -> list[float]:
    """A checkpoint's thread reads pinned memory that a copy still fills."""
    module = importlib.import_module("vpipe.train.checkpoints.writer")
    found: list[float] = []
    directory = Path(tempfile.mkdtemp())
    # The second of two processes: it writes its part and commits nothing.
    saver, staging = module.Saver(module.CheckpointPlace(directory, 1, 2, 1)), module.Staging()
    for iteration, value in enumerate((1.0, 2.0)):
        weight = torch.zeros(8192, device="emu:0")
        emulated.native.sleep(3000)
        weight.fill_(value)
        copied, arrivals = staging.copy({0: {"weight": weight}})
        save = module.Save(SimpleNamespace(iteration=iteration), module.Line("a" * 12), {})
        beside = threading.Thread(target=saver._beside, args=(save, copied, arrivals))  # it makes itself less urgent
        beside.start()
        beside.join()
        found += [float(load_file(file)["weight"].mean()) for file in saver._partial(save).glob("*.safetensors")]
    shutil.rmtree(directory)
    return found


def kept_directly(emulated: Any) -> list[float]:
    """An elastic rank's copy is of the weights after the update, which a device still computes."""
    from vpipe.runtime.departures import Staging

    module = importlib.import_module("vpipe.train.elastic")
    seen = SimpleNamespace(unchanged=lambda layers, frozen: set())
    rank = SimpleNamespace(_staging=Staging(), _seen=seen)
    found: list[float] = []
    shelf = SimpleNamespace(write=lambda standing, part, layers, frozen: found.append(float(layers[0]["w"].mean())))
    for value in (1.0, 2.0):
        weight = torch.zeros(8192, device="emu:0")
        emulated.native.sleep(3000)
        weight.fill_(value)
        module.Rank._begun(rank, shelf, None, None, {0: {"w": weight}}, ())()
        torch.accelerator.synchronize(0)
    return found


DIRECT: dict[str, tuple[Callable[[Any], list[float]], list[float]]] = {
    "swap_device": (swapped_directly, [1.0, 2.0, 3.0, 4.0, 5.0]),
    "departures": (departed_directly, [1.0, 2.0, 3.0]),
    "writer": (written_directly, [1.0, 2.0]),
    "elastic": (kept_directly, [1.0, 2.0]),
}
"""Module → what it is asked beside a pipeline, and the right answer."""


def right_directly(file: str, emulated: Any) -> bool:
    ask, answer = DIRECT.get(file, (lambda _: [], []))
    return ask(emulated) == answer


def differs(train: Callable[[], Outcome], expected: Outcome) -> bool:
    try:
        assert_equal(train(), expected)
    except (AssertionError, RuntimeError):  # also events that nobody has waited for when they are read
        return True
    return False


@pytest.mark.slow
@pytest.mark.parametrize(("file", "line"), MUTANTS, ids=[f"{file}:{line}" for file, line in MUTANTS])
def test_no_wait_can_be_left_out(file: str, line: int, emulated: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vpipe.runtime.memory.swap.MIN_BYTES", 64)
    layers, schedule, options = PROGRAMS[file]
    expected = trained(plain(layers), "cpu", schedule, steps=1, **options)
    caught = []
    with without(file, line):
        for settings in HARD * TRIES:
            emulated.reset()
            emulated.settings(**settings)
            if differs(partial(trained, plain(layers), "emu", schedule, steps=1, **options), expected):
                caught.append(settings)
                break
            if not right_directly(file, emulated):
                caught.append(settings)
                break
    assert caught, f"{file}.py works without its line {line}: the wait is not needed, or no program needs it"


@pytest.mark.slow
@pytest.mark.rotates(4)
@pytest.mark.parametrize("file", FILES)
def test_with_all_waits_the_same_programs_are_right(file: str, emulated: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vpipe.runtime.memory.swap.MIN_BYTES", 64)
    layers, schedule, options = PROGRAMS[file]
    expected = trained(plain(layers), "cpu", schedule, steps=1, **options)
    for settings in HARD:
        emulated.reset()
        emulated.settings(**settings)
        assert_equal(trained(plain(layers), "emu", schedule, steps=1, **options), expected)
        assert right_directly(file, emulated)


BETWEEN = {
    "the stream's wait for a message": (
        "        for work in works:\n            work.wait()\n        here",
        "        here",
    ),
    "the hold on what leaves": (
        "leaving.append((self._transfer(dist.isend, memory, route, target_rank), memory))",
        "self._transfer(dist.isend, memory, route, target_rank)",
    ),
    "the stream's wait for what leaves": ("                work.wait()\n", "                pass\n"),
    "the snapshot": (
        "[snapshot(tensor, fact) for tensor, fact in zip(moving, form.moving, strict=True)]",
        "[tensor.detach().view(torch.uint8) for tensor in moving]",
    ),
    "the stream's wait for a gathering": (
        "dist.all_gather(blocks, mine,",
        "dist.all_gather(blocks, mine, async_op=True,",
    ),
    "the stream's wait for a sum": ("dist.all_reduce(value,", "dist.all_reduce(value, async_op=True,"),
    "the order of two sends": ("", ""),
}
"""What is left out of the transport between processes: its text, and what stands there instead."""
NUMBER = 6
RIGHT = [[1000.0 * k for k in range(NUMBER)], [2.0, 1.0], [3.0]]


def in_haste(transport: Any, device: torch.device, first_step: int, order: list[int]) -> list[list[float]]:
    """Rank 0 sends one tensor again and again, each time with another content, while its first messages still wait for
    a slow link; then both gather and add up. Twice: the first time messages are described, the second time not."""
    rank = transport.rank
    for step in (first_step, first_step + 1):
        transport.begin_program("in haste", lambda: "data of one form")
        transport.begin_step(step)
        x, found = torch.zeros(1000, device=device), []
        for k in range(NUMBER) if rank else (order if step > first_step else range(NUMBER)):
            envelope = Envelope(step, 0, 1, k, 0)
            if rank:
                transport.post(envelope, 0)
            else:
                transport.send(envelope, 1, x.fill_(k))
        x.fill_(-1.0)
        if rank:
            found = [transport.take(Envelope(step, 0, 1, k, 0)).sum() for k in range(NUMBER)]
        mine = torch.full((1,), 2.0 - rank, device=device)
        gathered = [block * 1 for block in transport.all_gather(mine, [0, 1], [1, 1])]
        torch.accelerator.synchronize(device)  # one mutant at a time
        transport.all_reduce(mine, [0, 1])
        total = mine * 1
        transport.end_step()
        torch.accelerator.synchronize(device)
        told = [[float(each) for each in some] for some in (found, gathered, [total])]
        transport.barrier()
    return told


def with_mutants(rank: int, mutants: list[str]) -> dict[str, list[list[float]]]:
    import emulated_device as emulated

    from vpipe.runtime.assembly import between_processes
    from vpipe.runtime.transport.routes import Route

    emulated.settings(link_latency_us=20_000)
    found, device = {}, torch.device("emu", rank)
    source = Path(device_transport.__file__).read_text()
    host = between_processes("auto", blocking=False, timeout=120.0)
    for number, name in enumerate(mutants):
        old, new = BETWEEN.get(name, ("", ""))
        code = compile(source.replace(old, new) if old else source, name, "exec")
        exec(code, vars(device_transport))  # noqa: S102 - our own source, less a wait
        transport = device_transport.DeviceTransport(host, device, direct=True)
        transport.prepare_routes([Route(0, 1)])
        transport.prepare_groups([[0, 1]])
        order = [0, 2, 1, *range(3, NUMBER)] if name == "the order of two sends" else list(range(NUMBER))
        found[name] = in_haste(transport, device, 2 * number, order)
    host.close()
    return found


@pytest.mark.slow
def test_nothing_can_be_left_out_between_processes() -> None:
    source = Path(device_transport.__file__).read_text()
    assert all(source.count(old) == 1 for old, _ in BETWEEN.values() if old), "the list is of the code as it is"
    ranks = on_ranks(with_mutants, 2, ["nothing", *BETWEEN], timeout=120)
    assert not any(isinstance(found, str) for found in ranks), ranks
    assert [found["nothing"] for found in ranks] == [[[], *RIGHT[1:]], RIGHT]
    survived = [name for name in BETWEEN if [found[name] for found in ranks] == [[[], *RIGHT[1:]], RIGHT]]
    assert not survived, f"the transport works without {survived}"
