"""Pictures: the drawing of a small pipeline, letter by letter, and an SVG that every reader accepts."""

from __future__ import annotations

import runpy
from pathlib import Path
from xml.etree import ElementTree

import pytest

from vpipe.schedule.catalog import build, entries
from vpipe.schedule.draw import text
from vpipe.schedule.simulate import simulate
from vpipe.schedule.svg import svg

DOCS = Path(__file__).parents[2] / "docs"
SVG = "{http://www.w3.org/2000/svg}"


def test_1f1b_letter_by_letter() -> None:
    assert text(simulate(build("1f1b", 3, 4))).splitlines() == [
        "rank 0  F0 F1 F2 ·           B0─── F3 B1─── ·  B2─── ·  B3───",
        "rank 1  ·  F0 F1 ·     B0─── F2 B1─── F3 B2─── ·  B3───",
        "rank 2  ·     F0 B0─── F1 B1─── F2 B2─── F3 B3───",
        "",
        "F forward  B backward  · idle",
        "makespan 18, bubble 33.3%, ranks busy 67%, peak activations 3",
    ]


def test_the_second_stage_of_a_rank_is_lower_case() -> None:
    first = text(simulate(build("zb-v", 2, 4))).splitlines()[0]
    assert first.startswith("rank 0  F0 F1 F2 f0 i0 w0 f1")
    assert "F0⁰" in text(simulate(build("interleaved", 2, 4, 3)))


def test_a_narrow_terminal_gets_bands() -> None:
    lines = text(simulate(build("1f1b", 3, 4)), width=40).splitlines()
    assert max(map(len, lines[:-2])) <= 40
    assert [line.split()[1] for line in lines if line.startswith("rank")] == ["0", "1", "2"] * 2


def test_colour_only_when_asked() -> None:
    simulation = simulate(build("1f1b", 2, 2))
    assert "\x1b[" not in text(simulation)
    assert "\x1b[30;44mF" in text(simulation, colour=True)


@pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry.name)
def test_svg_has_a_box_for_every_action(entry: object) -> None:
    simulation = simulate(build(entry.name, 4, 8))  # type: ignore[attr-defined]
    root = ElementTree.fromstring(svg(simulation, "a < b & c"))
    assert root.findtext(f"{SVG}title") == "a < b & c"
    boxes = [box for box in root.iter(f"{SVG}rect") if box.find(f"{SVG}title") is not None]
    assert len(boxes) == sum(span.end > span.begin for row in simulation.spans for span in row)
    width = float(root.attrib["width"])
    assert all(float(box.attrib["x"]) + float(box.attrib["width"]) <= width for box in boxes)


def test_pages_are_up_to_date() -> None:
    """Run ``python docs/schedules_page.py`` after a change of the catalogue."""
    pages = runpy.run_path(str(DOCS / "schedules_page.py"))["pages"]
    stale = [name for name, content in pages().items() if (DOCS / name).read_text(encoding="utf-8") != content]
    assert not stale
    known = {f"pictures/{entry.name}.svg" for entry in entries()}
    assert {f"pictures/{path.name}" for path in (DOCS / "pictures").glob("*.svg")} >= known
