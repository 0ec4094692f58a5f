"""The example notebook says what its cells give today; run here without Jupyter."""

from __future__ import annotations

import ast
import io
import json
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = json.loads((Path(__file__).parents[2] / "examples" / "schedules.ipynb").read_text(encoding="utf-8"))
CELLS = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


def run(source: str, names: dict[str, Any]) -> tuple[str, Any]:
    """What a cell prints, and the value of its last line if that is an expression."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    said = io.StringIO()
    with redirect_stdout(said):
        exec(compile(tree, "cell", "exec"), names)  # noqa: S102
        value = eval(compile(ast.Expression(last.value), "cell", "eval"), names) if isinstance(last, ast.Expr) else None  # noqa: S307
    return said.getvalue(), value


def test_every_cell_gives_what_the_notebook_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    pictures = 0
    for cell in CELLS:
        said, value = run("".join(cell["source"]), names)
        shown = {output["output_type"]: output for output in cell["outputs"]}
        assert shown.keys() <= {"stream", "execute_result"}, "no error, no warning"
        assert said == "".join(shown.get("stream", {}).get("text", ""))
        assert (value is not None) == ("execute_result" in shown)
        if hasattr(value, "_repr_svg_"):
            assert value._repr_svg_() == "".join(shown["execute_result"]["data"]["image/svg+xml"])
            pictures += 1
    assert pictures == 1
    assert names["verify"](names["program"]) == []
    assert (tmp_path / "figure.svg").read_text(encoding="utf-8").startswith("<svg")


def test_it_was_run_from_top_to_bottom() -> None:
    assert [cell["execution_count"] for cell in CELLS] == list(range(1, len(CELLS) + 1))
