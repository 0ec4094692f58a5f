"""``vpipe train --json``: the summary of a run alone on standard output, whatever else is said while it runs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout

import click

from vpipe.rundir import writing
from vpipe.rundir.claim import Claim
from vpipe.rundir.layout import SUMMARY


@contextmanager
def summary_alone(wanted: bool) -> Iterator[list[Claim]]:
    """Yields a list for the run that is meant: its summary is printed at the end, also of a run that failed.

    What the run, or a print in a user's model, says in the meantime goes to standard error.
    """
    runs: list[Claim] = []
    if not wanted:
        yield runs
        return
    try:
        with redirect_stdout(sys.stderr):
            yield runs
    finally:
        for run in runs:
            found = writing.read(run.directory / SUMMARY)
            if found is not None and found.get("run") == run.run:
                click.echo(json.dumps({"directory": str(run.directory), **found}))
            else:
                click.echo(f"vpipe: {run.directory} has no summary of this run here, so there is no JSON", err=True)
