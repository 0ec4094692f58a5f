"""Features as values. A case takes one value of each and becomes a program: a pipeline and plain torch, step by step.

    python tests/pairs/cases.py schedule=zb-h1 memory=recompute inplace=view     one case; what is not named has its first value
    python tests/pairs/cases.py --print schedule=zb-h1 memory=recompute          its program, which runs alone
    python tests/pairs/cases.py --all [SEED [RANDOM]]                            all pairs, and random cases beyond them

A new feature is a line of ``FEATURES`` and its part in ``layers_of``, ``pipeline_of`` or ``step_of``; what cannot meet is a
line of ``REFUSED`` (with a part of the sentence that a user reads) or ``impossible`` (there is no such program).
"""

from __future__ import annotations

import random
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from textwrap import indent
from typing import Any

import parts
import torch
from parts import Mismatch

from vpipe.errors import UserError
from vpipe.registry import SCHEDULE_REGISTRY

STEPS, SEED = 3, 3
Case = dict[str, Any]

FEATURES: dict[str, tuple[Any, ...]] = {
    "schedule": (
        *("1f1b", "gpipe", "interleaved", "zb-h1", "zb-v", "dualpipe-v", "chimera", "hanayo", "looped-bfs", "v-min"),
        *("pipedream", "pipedream-2bw", "zb-h2", "dualpipe", "interleaved-zb", "eager-1f1b"),
        "own",
    ),
    "ranks": (2, 1, 4),
    "units": (4, 2, 5),
    "rows": ("even", "uneven", "changing"),
    "shape": ("rows", "sequences", "changing"),
    "cut": ("even", "front", "back"),
    "memory": ("keep", "recompute", "half", "swap", "both", "alternate"),
    "workers": (False, True),
    "optimizer": ("sgd", "momentum", "adam"),
    "rates": (False, True, "function"),
    "average": (None, 0.5),
    "clip": (None, 0.05),
    "scale": (None, 8.0),
    "nonfinite": (False, True),
    "autocast": (False, True, "around", "whole"),
    "accumulate": (1, 2),
    "replicas": (1, 2),
    "tie": ("none", "declared", "module", "three"),
    "loss": ("function", "module", "added", "counting"),
    "norm": ("none", "batch", "read"),
    "dropout": (False, True),
    "generator": (False, "torch", "python", "numpy"),
    "numbers": (False, True),
    "inplace": ("none", "view", "batch", "buffer", "same", "kept", "count"),
    "skip": ("none", "direct", "residual", "twice", "alias"),
    "values": ("tensor", "tuple", "dict"),
    "frozen": ("none", "first", "turns", "once"),
    "hook": ("none", "tensor", "accumulated"),
    "function": ("none", "own", "deferred", "branches", "chunks"),
    "teacher": (False, True),
    "compiled": (False, True),
    "evaluates": (False, True),
    "modes": (False, True),
    "moves": ("none", "counts", "ranks", "memory", "resume", "copies"),
    "processes": (False, True),
    "devices": (False, True),
}
"""Feature → its values, the plainest first."""

ASYNCHRONOUS = ("pipedream", "pipedream-2bw")
BOTH_WAYS = ("chimera", "dualpipe")
STAGES_PER_RANK = dict.fromkeys(
    ("interleaved", "zb-v", "dualpipe-v", "hanayo", "looped-bfs", "v-min", "interleaved-zb"), 2
)


def impossible(case: Case) -> bool:
    """Whether a case asks for nothing: its parts contradict each other, or the run that it names does not exist."""
    asynchronous = case["schedule"] in ASYNCHRONOUS
    return (
        (case["schedule"] in BOTH_WAYS and case["ranks"] == 1)
        or (case["schedule"] == "pipedream-2bw" and case["units"] < case["ranks"] - 1)
        or (case["moves"] in ("counts", "ranks") and case["ranks"] == 1)
        or (case["moves"] in ("resume", "copies") and (case["processes"] or case["hook"] != "none"))
        # A number that is an attribute is each holder's own, and no state (docs/equality.md).
        or (case["inplace"] == "count" and (case["replicas"] > 1 or case["schedule"] in BOTH_WAYS))
        or (case["inplace"] == "count" and (case["moves"] in ("resume", "copies") or case["processes"]))
        or (case["inplace"] == "count" and (asynchronous or case["compiled"]))
        or (case["rows"] != "even" and (asynchronous or case["replicas"] > 1))
        or (asynchronous and (case["replicas"] > 1 or case["hook"] != "none" or case["moves"] == "counts"))
        or (asynchronous and case["rates"] == "function")
        or (asynchronous and case["nonfinite"] and case["schedule"] == "pipedream-2bw")
        or (
            case["devices"] and any(case[name] for name in ("processes", "workers", "autocast", "generator", "dropout"))
        )
        or (case["processes"] and case["ranks"] * case["replicas"] not in (2, 4))
        # The scheduler of an optimizer that stays behind turns nothing, and a warning says so: tests/runtime/test_runtime_move.py.
        or (case["processes"] and case["rates"] is True and case["moves"] == "ranks")
        or (case["tie"] == "module" and (case["values"] != "tensor" or case["hook"] != "none"))
        or (case["frozen"] != "none" and case["tie"] != "none")
        or (
            case["skip"] == "alias" and case["values"] != "tensor"
        )  # other brackets: docs/equality.md, "what is not equal"
    )


MEMORY = {
    "keep": "",
    "recompute": "recompute=1.0",
    "half": "recompute=0.5",
    "swap": "swap=1.0",
    "both": "recompute=0.5, swap=0.5",
    "alternate": "recompute={0, 2, 4, 6}",
}
MOVED_MEMORY = {
    "keep": "recompute",
    "recompute": "swap",
    "half": "keep",
    "swap": "half",
    "both": "keep",
    "alternate": "swap",
}
"""What a move changes that to."""


def holders(case: Case) -> int:
    """Stages and ranks: where there is one of each and nothing is recomputed, forwards run as in one process."""
    return case["ranks"] * case["replicas"] * STAGES_PER_RANK.get(case["schedule"], 1)


def recomputes(case: Case) -> bool:
    moved = MOVED_MEMORY[case["memory"]] if case["moves"] == "memory" else "keep"
    return "recompute" in MEMORY[case["memory"]] + MEMORY[moved]


REFUSED: Sequence[tuple[Callable[[Case], bool], str]] = (
    (lambda c: c["tie"] != "none" and c["schedule"] in ASYNCHRONOUS, "tied"),
    (lambda c: c["accumulate"] > 1 and c["schedule"] in ASYNCHRONOUS, "accumulat|update=False"),
    (lambda c: c["numbers"] and (holders(c) > 1 or recomputes(c)), "draws from Python's or numpy's global generator"),
    (
        lambda c: c["generator"] and (c["replicas"] > 1 or c["schedule"] in BOTH_WAYS),
        "draws from a generator that replicas",
    ),
    (lambda c: c["workers"] and c["schedule"] in BOTH_WAYS and c["replicas"] > 1, "need executor='plain'"),
    (
        lambda c: c["processes"] and c["moves"] == "ranks" and c["hook"] != "none",
        "the layers stay where they are",
    ),
)
"""(which cases, a part of the sentence that refuses them)."""


def layers_of(case: Case) -> list[tuple[str, str, str]]:
    """The model, as expressions: module, names that it reads and that it writes. Each feature has its place."""
    linear = "nn.Linear(D, D)"
    inner = [linear]
    inner += {"none": [], "batch": ["Norm()"], "read": ["Norm(reads=True)"]}[case["norm"]]
    inner += ["nn.Identity()", "nn.SiLU(inplace=True)"] if case["inplace"] == "view" else []
    inner += {"buffer": ["Counter()"], "same": ["Counter(0.0)"], "count": ["Counted()"]}.get(case["inplace"], [])
    inner += ["nn.Dropout(0.3)"] if case["dropout"] else []
    inner += [f'Noise("{case["generator"]}")'] if case["generator"] else []
    inner += ["Chance()"] if case["numbers"] else []
    function = {"own": "Own()", "deferred": "Own(Deferred)", "branches": "Branches()"}
    function["chunks"] = "Apply(chunks, nn.Linear(D, 2 * D))"
    inner += [function[case["function"]]] if case["function"] != "none" else []
    inner += ["Teacher()"] if case["teacher"] else []
    inner += ["Auxiliary(add)"] if case["loss"] == "added" else []
    inner += [f"nn.Sequential({linear}, nn.Tanh())"]
    if case["compiled"]:
        inner[-1] = f'torch.compile({inner[-1]}, backend="eager")'
    if case["values"] != "tensor":
        inner = [
            f'packed("{case["values"]}")',
            *(f'Wrapped("{case["values"]}", {each})' for each in inner),
            "unpacked()",
        ]
    one = '("x",)'
    layers = [(f"Apply(in_place, {linear})" if case["inplace"] == "batch" else linear, one, one)]
    if case["skip"] == "alias":
        layers.append((f"Apply(lambda x, linear: (h := linear(x), h, h), {linear})", one, '("x", "h", "g")'))
    elif case["skip"] != "none":
        layers.append((f"Apply(lambda x, linear: (x, linear(x)), {linear})", one, '("x", "h")'))
    layers += [(each, one, one) for each in inner]
    if case["inplace"] == "kept":
        both = [("Apply(lambda x: (x, x.tanh()))", one, '("x", "k")'), ("Apply(negated)", '("x", "k")', one)]
        layers += [(linear, one, one), *both, (linear, one, one), (linear, one, one), *both]
    if case["skip"] in ("direct", "alias"):
        layers.append(("Apply(lambda x, h: x + h)", '("x", "h")', one))
    if case["skip"] == "alias":
        layers.append(("Apply(lambda x, g: x.sin() + g)", '("x", "g")', one))
    if case["skip"] == "residual":
        layers += [(f"Apply(residual, {linear})", '("x", "h")', one)] * 2
    if case["skip"] == "twice":
        both = f"Apply(lambda x, h, linear: (linear(x + h), h, h), {linear})"
        layers += [(both, '("x", "h")', '("x", "a", "b")')]
        layers += [("Apply(lambda x, a, b: x + a.tanh() + b.sin() + a.cos())", '("x", "a", "b")', one)]
    stages = case["ranks"] * STAGES_PER_RANK.get(case["schedule"], 1) * (2 if case["schedule"] == "dualpipe" else 1)
    return layers + [(linear, one, one)] * max(2, max(8, stages + 1) - len(layers))


def counts_of(case: Case, num_layers: int, cut: str) -> list[int] | None:
    """Layers per stage: one each and the rest on the first or the last stage."""
    num_stages = case["ranks"] * STAGES_PER_RANK.get(case["schedule"], 1)
    if cut == "even" or num_stages == 1:
        return None
    rest = num_layers - num_stages + 1
    return [rest, *[1] * (num_stages - 1)] if cut == "front" else [*[1] * (num_stages - 1), rest]


def ties_of(case: Case, num_layers: int) -> list[list[str]]:
    name = "parts.0.{}" if case["inplace"] == "batch" else "{}"
    if case["tie"] in ("declared", "three"):
        owners = [num_layers - 1] if case["tie"] == "declared" else [num_layers - 2, num_layers - 1]
        return [["0." + name.format("weight"), *(f"{owner}.weight" for owner in owners)]]
    if case["tie"] == "module":
        return [[f"{layer}.{kind}" for layer in (num_layers - 2, num_layers - 1)] for kind in ("weight", "bias")]
    return []


def pipeline_of(case: Case) -> list[str]:
    """The definitions of both sides."""
    layers = layers_of(case)
    ties = ties_of(case, len(layers))
    lines = ["def layers(add):", "    torch.manual_seed(1)", "    made = ["]
    lines += [f"        ({module}, {reads}, {writes})," for module, reads, writes in layers]
    lines += ["    ]"]
    if case["tie"] == "module":
        lines += ["    made[-1] = made[-2]"]
    lines += [f'    return hooked(made, "{case["hook"]}")' if case["hook"] != "none" else "    return made", ""]
    autocast = "autocast" if case["autocast"] in (True, "around") else "nullcontext"
    loss = {"module": "ScaledLoss()", "counting": "CountingLoss()"}.get(case["loss"], "loss_of")
    options = [f'schedule="{case["schedule"]}"', f"num_ranks={case['ranks'] * case['replicas']}"]
    make = f"averaging({case['optimizer']}, {case['average']})" if case["average"] else case["optimizer"]
    options += [f"num_microbatches={case['units']}", f"optimizer={make}", f"seed={SEED}"]
    options += [f"replicas={case['replicas']}"] if case["replicas"] > 1 else []
    options += [f"clip_norm={case['clip']}"] if case["clip"] else []
    options += [f"loss_scale=LossScale({case['scale']})"] if case["scale"] else []
    options += ["autocast=autocast"] if case["autocast"] is True else []
    options += ['executor="threaded"'] if case["workers"] else []
    options += ['device="emu"'] if case["devices"] else []
    if case["tie"] in ("declared", "three"):
        owners = ", ".join(f"({n.split('.')[0]}, {n.split('.', 1)[1]!r})" for n in ties[0])
        options += [f"tied=[TiedWeight(({owners}))]"]
    memory = MEMORY[case["memory"]]
    lines += ["def pipeline(partition):", f"    loss = {loss}"]
    lines += ["    made = [Layer(*each) for each in layers(add_loss)]"]
    lines += [
        f"    return Pipeline(made, loss, {', '.join([*options, *([memory] if memory else [])])}, partition=partition)"
    ]
    if case["autocast"]:
        lines += ["", "def autocast():", '    return torch.autocast("cpu", torch.bfloat16)']
    told = [f"seed={SEED}", *([f"ties={ties}"] if ties else []), *([f"clip={case['clip']}"] if case["clip"] else [])]
    told += [f"scale={case['scale']}"] if case["scale"] else []
    told += ["autocast=autocast"] if case["autocast"] is True else []
    told += [f"average={case['average']}"] if case["average"] else []
    lines += ["", f"pipe = pipeline({counts_of(case, len(layers), case['cut'])})"]
    lines += [f"plain = Plain(layers, {loss}, {case['optimizer']}, {', '.join(told)})"]
    lines += ["count = pipe.program().num_microbatches", f"around = {autocast}"]
    if case["moves"] == "copies":
        lines += ["copies = Copies()"]
    if case["rates"] == "function":
        lines += ["pipe.set_learning_rate(rate_of)"]
    elif case["rates"]:
        lines += ["rates = [rate(each) for each in (plain.optimizer, *pipe.optimizers.values())]"]
    return lines


def frozen_of(case: Case, step: int) -> list[str]:
    if case["frozen"] == "none" or (case["frozen"] == "once" and step > 0):
        return []
    first = case["frozen"] == "first"
    frozen, thawed = ([0], [2]) if first or step % 2 == 0 else ([2], [0])
    return [f"for each in (pipe.modules(), dict(enumerate(plain.modules))):\n    freeze(each, {frozen}, {thawed})"]


def step_of(case: Case, step: int) -> list[str]:
    """One update, and what comes between it and the next."""
    lines = [f"# step {step}", *frozen_of(case, step)]
    times = case["accumulate"]
    for part in range(times):
        number = step * times + part
        rows = {"even": "3 * count", "uneven": "3 * count + 1", "changing": f"{3 + number % 2} * count"}[case["rows"]]
        length = {"rows": 0, "sequences": 3, "changing": 2 + number % 2}[case["shape"]]
        told = [str(number), rows, *([str(length)] if length or case["nonfinite"] else [])]
        told += [str(step != 1)] if case["nonfinite"] else []
        lines += [f"x, y = batch({', '.join(told)})", "state = torch.get_rng_state()"]
        lines += [f"set_rate(plain.optimizer, rate_of({step}))"] if case["rates"] == "function" else []
        update = f", update={part == times - 1}, weight={1 / times}" if times > 1 else ""
        expected = f"plain.step(units(x, y, count), orders(pipe){update})"
        if case["schedule"] in ASYNCHRONOUS:
            each = 1 if case["schedule"] == "pipedream" else case["units"]
            expected = f"step_asynchronously(plain, pipe, units(x, y, count), {each})"
        numbers = "random.seed(5)\n" if case["numbers"] else ""
        inside = "with autocast():\n    " if case["autocast"] == "around" else ""
        lines += [
            f"{numbers}{inside}expected = {expected}",
            f"{numbers}{inside}loss = pipe.train_step(x.clone(), y{update})",
        ]
        lines += [f'same("loss of step {step}", loss, expected)']
        lines += ['same("random state of the caller", torch.equal(torch.get_rng_state(), state), True)']
    if case["moves"] == "copies":
        lines += ["copies.write(pipe)"]
    return lines + (between(case, step) if step < STEPS - 1 else [])


def between(case: Case, step: int) -> list[str]:
    lines = []
    if case["rates"] is True:
        lines += ["for each in rates:", "    each.step()"]
    if case["modes"]:
        lines += [f"set_modes(pipe.modules().values(), {step % 2 == 1})", f"set_modes(plain.modules, {step % 2 == 1})"]
    if case["evaluates"]:
        length = {"rows": "", "sequences": ", 3", "changing": ", 2"}[case["shape"]]
        lines += [f"x, y = batch({50 + step}, 3 * count{length})", "with around():"]
        lines += ["    loss, expected = pipe.evaluate(x.clone(), y), plain.evaluate(units(x, y, count))"]
        lines += ['same("evaluation", loss, expected)']
        if case["average"]:
            lines += ["with around(), averaged(pipe), plain.averaged():"]
            lines += ["    loss, expected = pipe.evaluate(x.clone(), y), plain.evaluate(units(x, y, count))"]
            lines += ['same("evaluation of averages", loss, expected)']
    other = counts_of(case, len(layers_of(case)), {"even": "front", "front": "back", "back": "even"}[case["cut"]])
    if case["moves"] == "counts" and step == 0:
        lines += ["counts = list(pipe.partition)", "most = counts.index(max(counts))"]
        lines += ["counts[most] -= 1", "counts[most + 1 if most + 1 < len(counts) else most - 1] += 1"]
        lines += ["pipe.move(pipe.layout.with_counts(counts))"]
    if case["moves"] == "ranks" and step == 0:
        lines += ["pipe.move(pipe.layout.with_ranks(list(reversed(range(pipe.layout.num_ranks)))))"]
    if case["moves"] == "memory" and step == 0:
        memory = MEMORY[MOVED_MEMORY[case["memory"]]]
        lines += [f"pipe.move(pipe.layout, Memory({memory}))"]
    if case["moves"] == "resume" and step == 0:
        lines += [f"pipe = go_on(pipeline({other}), pipe, kept(pipe))", *rates_again(case)]
    if case["moves"] == "copies" and step == 1:
        lines += [f"pipe = go_on(pipeline({other}), pipe, copies.read())", *rates_again(case)]
    if case["teacher"]:  # after what goes on from a copy of before
        lines += ["follow(pipe.modules().values())", "follow(plain.modules)"]
    return lines


def rates_again(case: Case) -> list[str]:
    again = {
        True: "rates[1:] = [rate(each) for each in pipe.optimizers.values()]",
        "function": "pipe.set_learning_rate(rate_of)",
    }
    return [again[case["rates"]]] if case["rates"] else []


HEAD = """import random
import sys
from contextlib import nullcontext

sys.path.insert(0, "tests/pairs")  # of a checkout
import torch
from parts import *
from plain import Plain
from sessions import *
from torch import nn

from vpipe import Layer, Pipeline, add_loss
from vpipe.layer import TiedWeight
from vpipe.runtime.memory import swap
from vpipe.runtime.options import Memory
from vpipe.runtime.updates.averages import averaged, averaging
from vpipe.runtime.updates.update import LossScale

torch.set_num_threads(1)
swap.MIN_BYTES = 64  # of what is swapped: these models are small
register_own()
"""


def program_of(case: Case) -> str:
    """The case as a script."""
    steps = [line for step in range(STEPS) for line in ["", *step_of(case, step)]]
    if case["autocast"] == "whole":
        steps = ["", "with autocast():", indent("\n".join(steps), "    ")]
    end = ["", "same_state(pipe, plain)"] + (["copies.close()"] if case["moves"] == "copies" else []) + ["pipe.close()"]
    return "\n".join([f'"""{command(case)}"""', "", HEAD, *pipeline_of(case), *steps, *end, 'print("equal")']) + "\n"


def run(program: str) -> str:
    """What went wrong in a program, in one line; empty where it is equal."""
    names: dict[str, Any] = {"__name__": "case", "print": lambda *_: None}
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            exec(compile(program, "<case>", "exec"), names)  # noqa: S102 - our own text
    except UserError as error:
        return f"refused: {error.sentence}"
    except Mismatch as error:
        return f"WRONG: {error}"
    except Exception as error:
        return f"raw error: {type(error).__name__}: {' '.join(str(error).split())}"
    finally:
        SCHEDULE_REGISTRY._entries.pop("own", None)
        torch._dynamo.reset() if "torch.compile" in program else None
        if "pipe" in names:
            names["pipe"].close()
    return next((f"WRONG: {each.message}" for each in warned if "do not wait for W" in str(each.message)), "")


def run_in_a_rank(program: str) -> str:
    """The same on a rank that is a process of a group."""
    parts.IN_A_PROCESS[0] = True
    parts.LATER.clear()
    return run(program) or next((f"WRONG: {text}" for text in parts.LATER), "")


RUN_IN_PROCESSES: list[Callable[[int, str], list[str]]] = []
"""Runs a program on so many ranks that are processes; what each said. Set by who has such processes."""
ELSEWHERE = ("processes", "devices")
"""Features that need more than this process."""


def check(case: Case) -> str:
    """What went wrong with a case; empty where it is equal, or refused as the table says."""
    torch.set_num_threads(1)
    program, sentence = program_of(case), expectation(case)
    if case["processes"]:
        told = RUN_IN_PROCESSES[0](case["ranks"] * case["replicas"], program)
        said = next(filter(None, sorted(told, key=lambda text: not text.startswith("WRONG"))), "")
    else:
        said = run(program)
    if sentence is None:
        return said
    if not said:
        return f"not refused, though the table says {sentence!r}"
    return "" if said.startswith("refused") and re.search(sentence, said) else f"not refused by {sentence!r}: {said}"


def expectation(case: Case) -> str | None:
    """A part of the sentence that refuses a case, of any of several; ``None`` where it trains."""
    return "|".join(sentence for refuses, sentence in REFUSED if refuses(case)) or None


def complete(chosen: Case, dice: random.Random | None = None) -> Case:
    """A case with these values; the others are the plainest, or drawn."""
    return {name: chosen.get(name, dice.choice(values) if dice else values[0]) for name, values in FEATURES.items()}


def valid(case: Case) -> bool:
    return not impossible(case) and expectation(case) is None


def pairs() -> set[tuple[tuple[str, Any], tuple[str, Any]]]:
    """Every two values of two features that can meet at all."""
    return {
        ((a, x), (b, y))
        for a, b in combinations(FEATURES, 2)
        for x in FEATURES[a]
        for y in FEATURES[b]
        if valid(complete({a: x, b: y}))
    }


def covering(seed: int, elsewhere: Sequence[str] = (), candidates: int = 30) -> Iterator[Case]:
    """Few cases in which all pairs meet: each begins with a pair that is left, and is the best of some draws. Of features
    that need more than this process only those in ``elsewhere``."""
    dice = random.Random(seed)
    without = {name: False for name in ELSEWHERE if name not in elsewhere}
    left = {pair for pair in pairs() if not any((name, True) in pair for name in without)}

    def met(case: Case) -> set[Any]:
        return left.intersection(combinations(case.items(), 2))

    while left:
        begin = dict(min(left, key=repr))
        begin |= without
        drawn = [case for case in (complete(begin, dice) for _ in range(200)) if valid(case)][:candidates]
        best = max(drawn, key=lambda case: len(met(case))) if drawn else complete(begin)
        left -= met(best) | set(combinations(begin.items(), 2))
        yield best


def drawn(dice: random.Random) -> Case:
    """A random case: three features that are not the plainest, or all of them."""
    while True:
        names = dice.sample(list(FEATURES), 3 if dice.random() < 0.5 else len(FEATURES))
        case = complete({name: dice.choice(FEATURES[name]) for name in names})
        if not impossible(case) and not any(case[name] for name in ELSEWHERE):
            return case


def shrunk(case: Case) -> Case:
    """The same kind of failure with as few features as can be."""
    kind = check(case).partition(":")[0]
    changed = True
    while changed:
        changed = False
        for name, values in FEATURES.items():
            for value in values[: values.index(case[name])]:
                smaller = {**case, name: value}
                if not impossible(smaller) and check(smaller).partition(":")[0] == kind:
                    case, changed = smaller, True
                    break
    return case


def command(case: Case) -> str:
    words = [f"{name}={value}" for name, value in case.items() if value != FEATURES[name][0]]
    return " ".join(["python tests/pairs/cases.py", *words])


def parsed(words: Sequence[str]) -> Case:
    texts = dict(word.split("=", 1) for word in words)
    return complete({name: next(v for v in FEATURES[name] if str(v) == text) for name, text in texts.items()})


def told(case: Case) -> str:
    """A failing case as its smallest program, and what that says."""
    small = shrunk(case)
    said = check(small)
    return f"{command(small)}\n    {said[:300]}\n\n{program_of(small)}"


def session(chosen: Sequence[Case]) -> int:
    """Run cases and print every kind of failure once; how many went wrong."""
    wrong, seen = 0, set()
    for case in chosen:
        if check(case):
            wrong += 1
            text = told(case)
            if (head := text.partition("\n")[0]) not in seen:
                seen.add(head)
                print(text if len(seen) <= 3 else text[: text.index("\n\n")], flush=True)
    return wrong


def main(words: Sequence[str]) -> int:
    if "--all" in words:
        seed, beyond = (int(word) for word in [*words[words.index("--all") + 1 :], "0", "0"][:2])
        dice = random.Random(seed)
        chosen = [*covering(seed), *(drawn(dice) for _ in range(beyond))]
        print(f"{len(FEATURES)} features, {len(pairs())} pairs, {len(chosen)} runs in this process", flush=True)
        wrong = session(chosen)
        print(f"{wrong} of {len(chosen)} wrong")
        return bool(wrong)
    case = parsed([word for word in words if not word.startswith("--")])
    if "--print" in words:
        print(program_of(case))
        return 0
    said = check(case)
    print(said or "equal, or refused as expected")
    return bool(said)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
