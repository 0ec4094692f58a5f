"""Nothing in the sources runs text as code: read from the syntax trees, so that a name in a comment does no harm."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted([*(ROOT / "src").rglob("*.py"), *ROOT.glob("*.py")])

MODULES = {
    "pickle",
    "cPickle",
    "dill",
    "cloudpickle",
    "marshal",
    "shelve",
    "jsonpickle",
    "pty",
    "commands",
    "telnetlib",
}
"""Modules that unpickle, or that start shells."""

CALLS = {
    *("eval", "exec", "compile", "__import__", "os.system", "os.popen", "subprocess.getoutput"),
    *("subprocess.getstatusoutput", "asyncio.create_subprocess_shell", "yaml.load", "yaml.load_all"),
    *("yaml.full_load", "yaml.unsafe_load", "torch.load", "torch.save", "joblib.load", "tempfile.mktemp"),
    *("pandas.read_pickle", "numpy.load", "np.load"),
}
"""Functions that run text, unpickle, or leave a gap between a name and a file."""


def offences(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (f"imports {alias.name}" for alias in node.names if alias.name.split(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in MODULES:
            yield f"imports from {node.module}"
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            safe = any(word.arg == "allow_pickle" and ast.unparse(word.value) == "False" for word in node.keywords)
            if name in CALLS and not (name in ("np.load", "numpy.load") and safe):
                yield f"line {node.lineno} calls {name}"
            for word in node.keywords:
                if word.arg == "shell" and ast.unparse(word.value) != "False":
                    yield f"line {node.lineno} passes shell={ast.unparse(word.value)}"
                if word.arg == "allow_pickle" and ast.unparse(word.value) != "False":
                    yield f"line {node.lineno} allows pickle"
                if word.arg == "verify" and ast.unparse(word.value) == "False":
                    yield f"line {node.lineno} does not verify"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_source_runs_text(path: Path) -> None:
    assert list(offences(ast.parse(path.read_text(encoding="utf-8")))) == []


@pytest.mark.parametrize(
    "code",
    [
        "eval('1')",
        "exec(text)",
        "import pickle",
        "from pickle import loads",
        "import yaml; yaml.load(text, Loader=yaml.Loader)",
        "import subprocess; subprocess.run('ls', shell=True)",
        "subprocess.Popen(words, shell=flag)",
        "import os; os.system('ls')",
        "torch.load(path)",
        "np.load(path, allow_pickle=True)",
        "np.load(path)",
    ],
)
def test_the_test_itself_sees_them(code: str) -> None:
    assert list(offences(ast.parse(code)))


def test_commands_are_lists() -> None:
    """The first argument of every subprocess call is a list or a name that holds one: never a string."""
    wrong = []
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("subprocess.") and node.args:
                first = node.args[0]
                if isinstance(first, ast.JoinedStr | ast.BinOp) or (
                    isinstance(first, ast.Constant) and isinstance(first.value, str)
                ):
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not wrong
