"""``vpipe report``: a run directory as one HTML file, and its trace beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from vpipe.errors import UserError
from vpipe.observe import page_html, trace
from vpipe.observe.measured import Measured
from vpipe.observe.payload import payload, recorded, unstarted
from vpipe.rundir import writing
from vpipe.rundir.layout import REPORT, TRACE
from vpipe.rundir.reader import NotStarted, open_run

MAX_BYTES = 2 * 10**6


class Written(NamedTuple):
    """What was written, and what a reader should know about it."""

    report: Path
    trace: Path | None
    notes: list[str]


def write_report(run_directory: str | Path, output: str | Path | None = None) -> Written:
    """Write ``report.html`` (or ``output``) and ``trace.json.gz`` beside it."""
    path = Path(run_directory)
    target = Path(output) if output is not None else path / REPORT
    steps, data = _data(path)
    page = page_html.page("run", data)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        writing.put(target, page.encode())
    except OSError as error:
        raise UserError(f"{target} cannot be written: {error.strerror}") from None
    beside = target.with_name(TRACE) if steps else None
    if beside is not None:
        trace.write(beside, steps, {"run": str(path), "schedule": data["facts"].get("schedule", "?")})
    return Written(target, beside, list(data["notes"]))


def _data(path: Path) -> tuple[list[Measured], dict[str, Any]]:
    """The recorded steps and the page's data; a run that failed before it started has its story to tell."""
    try:
        run = open_run(path)
    except NotStarted:
        return [], unstarted(path)
    steps = recorded(run)
    return steps, payload(run, steps)
