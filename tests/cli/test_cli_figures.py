"""``vpipe draw -o``: the ending says the form, and each form is what its readers take."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from vpipe.schedule import build

DRAW = ("draw", "1f1b", "-p", "3", "-m", "4")


def drawn(vpipe: Any, path: Path, *options: str) -> Path:
    done = vpipe(*DRAW, "-o", str(path), *options)
    assert done.returncode == 0, done.stderr
    return path


def test_svg_for_paper_has_a_width_a_font_and_no_dark_switch(vpipe: Any, tmp_path: Path) -> None:
    text = drawn(vpipe, tmp_path / "a.svg", "--width", "8.5", "--no-title", "--font", "Times").read_text()
    root = ElementTree.fromstring(text)
    assert root.get("width") == "8.5cm"
    assert "prefers-color-scheme" not in text
    assert "font-family:'Times'" in text
    assert "microbatches" not in text
    assert "prefers-color-scheme" in vpipe(*DRAW, "--format", "svg").stdout


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("-o", "a.svgg"), "did you mean 'svg'"),
        (("-o", "a.svg", "--format", "csv"), "ends with .svg, but --format is csv"),
        (("--width", "8"), "are for figures"),
        (("-o", "a.pdf"), "no form .pdf; give text, svg, csv"),
    ],
)
def test_refusals(vpipe: Any, words: tuple[str, ...], sentence: str, tmp_path: Path) -> None:
    given = [str(tmp_path / word) if word.startswith("a.") else word for word in words]
    done = vpipe(*DRAW, *given)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_notebook_shows_the_picture_of_a_program() -> None:
    program = build("zb-h1", 2, 4)
    picture = program._repr_svg_()
    assert picture is not None
    assert picture.startswith("<svg ")
    broken = program.with_rows([row[::-1] for row in program.rows])
    assert broken._repr_svg_() is None


def test_names_are_listed() -> None:
    import vpipe
    import vpipe.schedule

    assert {"Pipeline", "Layer"} <= set(dir(vpipe))
    assert {"build", "Program"} <= set(dir(vpipe.schedule))
