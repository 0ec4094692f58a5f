"""The house stays as drawn: which room may import which, who may print, and what may load torch.

The table is that of docs/architecture.md. A new room gets a line here before it gets a file.
"""

from __future__ import annotations

import ast
import gc
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import click
import pytest

from house_lines import code_lines

ROOT = Path(__file__).parents[1]
HOUSE = ROOT / "src" / "vpipe"

ROOMS = {
    "schedule": set(),
    "config": set(),
    "models": set(),
    "data": set(),
    "plan": {"schedule", "runtime", "models"},
    "runtime": {"schedule"},
    "rundir": {"config", "schedule"},
    "observe": {"schedule", "config", "plan", "rundir"},
    "launch": {"config", "rundir"},
    "train": {"runtime", "schedule", "plan", "models", "data", "config", "observe", "rundir"},
    "cli": {"schedule", "config", "models", "data", "plan", "runtime", "observe", "launch", "train", "rundir"},
    "compat": {"schedule", "config", "plan", "runtime", "rundir", "cli"},
}
"""Room → the other rooms it may import. The modules of the hall (errors, registry, layer, …) are open to all. Nothing
imports ``compat``: ``registry.FORM_REGISTRY`` loads what is asked for."""

WITHOUT_TORCH = {"schedule", "config", "launch", "observe", "rundir"}
TORCH_IN_PLAN = {"profile", "sharding", "transfer"}
"""Modules of ``plan`` that may import torch, and runtime and models with it: they measure."""

NUMPY_IN_SCHEDULE = {
    "communication",
    "flat",
    "graph",
    "updates",
    "timeline",
    "simulate",
    "verify",
}
"""The rest of ``schedule`` is standard library."""


HALL: dict[str, set[str]] = {
    "__init__": {"errors", "layer", "runtime"},
    "__main__": {"cli"},
    "door": {"errors"},
    "errors": set(),
    "interfaces": {"errors", "layer", "registry", "models", "data"},
    "layer": {"errors"},
    "network": {"errors"},
    "process": {"records"},
    "records": {"errors"},
    "registry": {"errors"},
    "remote_copies": {"door"},
    "store": {"door"},
}
"""Module of the hall → what of the house it imports. Everybody passes the hall, so it holds little and knows few."""

ALIKE = {"models"}
"""Rooms in which neighbours are parallel: each model has an Attention of its own."""

GLOSSARY = "docs/glossary.md"

CODE_LINES = 38_999
"""Lines of code in src, as ``benchmarks/house/walk.py`` counts them. The number may only get smaller."""
OPTIONS = 139
LINES, FUNCTION = 400, 60
LONG: set[str] = set()
"""The functions of more than ``FUNCTION`` lines. The list may only get shorter."""


@cache
def modules() -> tuple[tuple[str, Path, ast.Module], ...]:
    """(room, path, tree) of every module; the room of a module of the hall is an empty string."""
    paths = [(path, path.relative_to(HOUSE).parts) for path in sorted(HOUSE.rglob("*.py"))]
    gc.disable()
    found = tuple(
        (parts[0] if len(parts) > 1 else "", path, ast.parse(path.read_text(encoding="utf-8"))) for path, parts in paths
    )
    gc.freeze()  # a million of objects stay to the end: nobody looks for garbage among them
    gc.enable()
    return found


@cache
def nodes(tree: ast.Module) -> tuple[ast.AST, ...]:
    """Every node of a module."""
    return tuple(ast.walk(tree))


@cache
def imports(tree: ast.Module) -> tuple[str, ...]:
    """Every imported module, also inside functions; what is imported for types alone does not count."""
    return tuple(_imports(tree))


def _imports(tree: ast.Module) -> Iterator[str]:
    skipped = {
        id(inner)
        for node in nodes(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        for inner in ast.walk(node)
    }
    for node in nodes(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: import by the full name"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_every_folder_is_a_room_of_the_table() -> None:
    rooms = {path.name for path in HOUSE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert rooms <= set(ROOMS)


def test_rooms_import_only_what_the_table_allows() -> None:
    wrong = []
    for room, path, tree in modules():
        for name in imports(tree):
            parts = name.split(".")
            if parts[0] != "vpipe" or len(parts) < 2 or parts[1] not in ROOMS or parts[1] == room or not room:
                continue
            measuring = room == "plan" and parts[1] in ("runtime", "models") and path.stem not in TORCH_IN_PLAN
            if parts[1] not in ROOMS[room] or measuring:
                wrong.append(f"{path.relative_to(HOUSE)} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_the_hall_knows_few() -> None:
    found = {
        path.stem: {name.split(".")[1] for name in imports(tree) if name.split(".")[0] == "vpipe"}
        for room, path, tree in modules()
        if not room
    }
    assert found.keys() == HALL.keys(), "a module of the hall gets a line in HALL"
    wrong = [f"{module} imports {more}" for module in HALL if (more := found[module] - HALL[module])]
    assert not wrong, wrong


def test_the_house_does_not_grow() -> None:
    lines = sum(code_lines(path.read_text(encoding="utf-8")) for _, path, _ in modules())
    assert lines <= CODE_LINES, f"src has {lines} lines of code: what is added is paid for with an old line"


def test_the_command_line_does_not_grow() -> None:
    from vpipe.cli.main import cli

    context = click.Context(cli)
    commands = [cli.get_command(context, name) for name in cli.list_commands(context)]
    options = [each for command in commands if command for each in command.params if isinstance(each, click.Option)]
    assert len(options) <= OPTIONS, f"there are {len(options)} options: say a new one by --set, --option or --with"


def test_files_and_functions_are_short() -> None:
    long = [str(path.relative_to(HOUSE)) for _, path, _ in modules() if len(path.read_text().splitlines()) > LINES]
    assert not long, f"a file of more than {LINES} lines hides two ideas: {long}"
    functions = {
        f"{path.relative_to(HOUSE)}: {node.name}"
        for _, path, tree in modules()
        for node in nodes(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (node.end_lineno or 0) - node.lineno >= FUNCTION
    }
    assert functions == LONG, (
        f"a function of more than {FUNCTION} lines hides a name: {functions - LONG}; no longer long: {LONG - functions}"
    )


def type_names(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """(name, what it is) of the classes and type aliases of a module. An alias is what it says, wherever it says so; a type
    variable stands for anything."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            yield node.name, ""
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            value = ast.unparse(node.value).replace("npt.", "")
            if isinstance(target, ast.Name) and re.fullmatch(r"[A-Z]\w*[a-z]\w*", target.id) and "TypeVar" not in value:
                yield target.id, value


def test_the_name_of_a_type_stands_for_one_thing() -> None:
    places: dict[str, dict[str, list[str]]] = {}
    for room, path, tree in modules():
        for name, said in type_names(tree) if room not in ALIKE else ():
            where = str(path.relative_to(HOUSE))
            places.setdefault(name, {}).setdefault(said or where, []).append(where)
        borrowed = [
            (alias.asname or alias.name, node.module or "")
            for node in nodes(tree)
            if isinstance(node, ast.ImportFrom) and node.module in ("pathlib", "typing", "torch")
            for alias in node.names
        ]
        for name, module in borrowed:
            places.setdefault(name, {}).setdefault(module, [module])
    twice = {name: where for name, where in places.items() if len(where) > 1 and not name.startswith("_")}
    assert not twice, f"one of the two wants another name: {twice}"


def test_the_index_of_a_step_is_called_microbatch() -> None:
    """``unit`` is the thing, or its number over the whole run (``surroundings``, ``Run.unit``): docs/glossary.md."""
    wrong = []
    for room, path, tree in modules():
        if room not in ("runtime", "train", "schedule") or path.stem == "surroundings":
            continue
        for node in nodes(tree):
            index = isinstance(node, ast.arg) and node.arg == "unit" and ast.unparse(node.annotation or node) == "int"
            counted = (
                isinstance(node, ast.For | ast.comprehension)
                and ast.unparse(node.target) == "unit"
                and ast.unparse(node.iter).startswith("range(")
            )
            if index or counted or _names_an_index(node):
                wrong.append(f"{path.relative_to(HOUSE)}: {ast.unparse(node)[:60]}")
    assert not wrong, wrong


def _names_an_index(node: ast.AST) -> bool:
    """Whether ``unit`` is bound beside a stage or a kind, as a part of an action, or to a whole number."""
    if isinstance(node, ast.For | ast.comprehension):
        names = {each.id for each in ast.walk(node.target) if isinstance(each, ast.Name)}
        return "unit" in names and bool(names & {"stage", "kind"})
    if not isinstance(node, ast.Assign):
        return False
    pairs = [(target, node.value) for target in node.targets]
    for target in node.targets:
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            pairs += zip(target.elts, node.value.elts, strict=False)
    whole = [ast.unparse(value) for target, value in pairs if ast.unparse(target) == "unit"]
    return any(value.isdigit() or value.startswith("int(") or "microbatch," in value for value in whole)


def test_every_module_is_imported_by_somebody() -> None:
    """Or named in a string by which it is started: ``vpipe.launch.zygote``, ``vpipe.train.worker:train``;
    or called by an old command at the root or a line of the docs."""
    texts = {path: path.read_text(encoding="utf-8") for path in HOUSE.rglob("*.py")}
    outside = [each.read_text(encoding="utf-8") for each in (*ROOT.glob("*.py"), *ROOT.glob("docs/*.md"))]
    alone = []
    for path in texts:
        name = ".".join(path.relative_to(HOUSE.parent).with_suffix("").parts)
        if path.stem in ("__init__", "__main__"):
            continue
        room, _, module = name.rpartition(".")
        spelled = re.compile(rf"{re.escape(name)}\b|from {re.escape(room)} import [^\n]*\b{module}\b")
        by_name = f'"{module}"' if room in ("vpipe.cli", "vpipe.data.builders") else "\0"
        others = [text for other, text in texts.items() if other != path]
        if not any(module in text and (spelled.search(text) or by_name in text) for text in (*others, *outside)):
            alone.append(name)
    assert not alone


def test_the_names_in_a_run_directory_are_stated_once() -> None:
    """``rundir/layout.py`` has them. (A config map of Kubernetes and an exported model have a config.yaml of
    their own, and data a tokenizer.json.)"""
    own = {"launch/kubernetes.py", "train/checkpoints/export.py", "data/tokenizer.py"}
    layout = HOUSE / "rundir" / "layout.py"
    names = set(re.findall(r'^[A-Z]+ = "([a-z]+\.[a-z.]+)"', layout.read_text(encoding="utf-8"), re.MULTILINE))
    assert "metrics.jsonl" in names
    wrong = [
        f"{path.relative_to(HOUSE)}:{node.lineno} {node.value}"
        for _, path, tree in modules()
        for node in nodes(tree)
        if isinstance(node, ast.Constant) and str(node.value).rpartition("/")[2] in names and path != layout
        if str(path.relative_to(HOUSE)) not in own
    ]
    assert not wrong, wrong


def test_a_file_is_put_in_its_place_by_one_function() -> None:
    """``rundir/writing.py`` has it, for whoever may ask that room; data sets have forms of their own."""
    own = {"rundir/writing.py", "data/token_cache.py", "data/manifest.py"}
    own |= {"rundir/recorder.py"}  # the older half of a file moves away
    found = {
        str(path.relative_to(HOUSE))
        for _, path, tree in modules()
        for node in nodes(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        if (node.value.id, node.attr) == ("os", "replace")
    }
    assert found <= own, f"ask writing.put or writing.replace: {sorted(found - own)}"


def test_torch_and_numpy_stay_where_they_belong() -> None:
    wrong = []
    for room, path, tree in modules():
        loaded = {name.split(".")[0] for name in imports(tree)}
        without_torch = room in WITHOUT_TORCH or (room == "plan" and path.stem not in TORCH_IN_PLAN)
        if without_torch and "torch" in loaded:
            wrong.append(f"{path.relative_to(HOUSE)} imports torch")
        if room == "schedule" and "numpy" in loaded and path.stem not in NUMPY_IN_SCHEDULE:
            wrong.append(f"{path.relative_to(HOUSE)} imports numpy")
    assert not wrong, "\n".join(wrong)


def test_only_the_command_line_prints() -> None:
    wrong = [
        f"{path.relative_to(HOUSE)}:{node.lineno}"
        for room, path, tree in modules()
        for node in nodes(tree)
        if room != "cli" and path != HOUSE / "compat" / "commands.py"
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("print", "click.echo", "pprint")
    ]
    assert not wrong, wrong


def loaded_by(code: str) -> set[str]:
    """The modules that a fresh interpreter has loaded after ``code``."""
    ask = f"import sys\n{code}\nsys.stdout.flush()\nprint('\\n' + ' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split())


def call(*args: str) -> str:
    run = f"try:\n    main({list(args)})\nexcept SystemExit as end:\n    assert not end.code"
    return f"from vpipe.cli.main import main\n{run}"


WRITE_GRAPH = """
import os, tempfile
os.chdir(tempfile.mkdtemp())
line = "{} -- X() -- forward_compute_time=1, backward_compute_time=1, activation_size=1.0, parameter_size=1\\n"
open("graph.txt", "w").write(line.format("a") + line.format("b") + "\\ta -- b\\n")
"""


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("import vpipe", {"torch", "numpy", "click"}),
        ("import vpipe.schedule", {"torch", "numpy"}),
        ("import vpipe.schedule.catalog; vpipe.schedule.catalog.entries()", {"torch"}),
        ("import vpipe.schedule.verify", {"torch"}),
        (call("--help"), {"torch", "numpy"}),
        (call("schedules"), {"torch"}),
        (call("schedules", "--rank", "-p", "2", "-m", "4"), {"torch"}),
        (call("draw", "1f1b", "-p", "2", "-m", "4"), {"torch"}),
        (call("simulate", "1f1b", "-p", "2", "-m", "4"), {"torch"}),
        (call("verify", "1f1b", "-p", "2", "-m", "4"), {"torch"}),
        (f"{WRITE_GRAPH}\n{call('plan', 'graph.txt', '-p', '2', '-m', '4')}", {"torch"}),
    ],
    ids=lambda value: value.splitlines()[-3].strip() if isinstance(value, str) and "main(" in value else None,
)
def test_answers_load_no_torch(code: str, absent: set[str]) -> None:
    assert not absent & loaded_by(code)


def test_a_reader_of_a_room_finds_the_glossary() -> None:
    """Each room's docstring names the page; so do the values that a reader begins with."""
    silent = [
        str(path.relative_to(HOUSE))
        for _, path, tree in modules()
        if path.stem == "__init__" and GLOSSARY not in (ast.get_docstring(tree) or "")
    ]
    assert not silent, f"without a line that names {GLOSSARY}: {silent}"
    starts = {"Pipeline", "Layout", "Entry"}
    told = {
        node.name
        for _, _, tree in modules()
        for node in tree.body
        if isinstance(node, ast.ClassDef) and GLOSSARY in (ast.get_docstring(node) or "")
    }
    assert starts <= told, starts - told


@pytest.mark.parametrize("page", [GLOSSARY, "docs/who-talks-to-whom.md"])
def test_the_pages_of_words_name_places_that_exist(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    places = set(re.findall(r"`([a-z_]+/[a-z_/]*(?:\.py)?|[a-z_]+\.py)`", text))
    assert len(places) > (20 if page == GLOSSARY else 1)
    assert not [place for place in places if not (HOUSE / place).exists()]
    terms = re.findall(r"^\| \*\*(.+?)\*\*", text, re.MULTILINE)
    assert len(terms) == len(set(terms)), "a term stands once"
