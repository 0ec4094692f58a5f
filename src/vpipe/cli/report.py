"""``vpipe report``: a run as one HTML page."""

from __future__ import annotations

import click


@click.command("report")
@click.argument("run", type=click.Path())
@click.option("-o", "--output", type=click.Path(dir_okay=False), help="The page; by default report.html in RUN.")
def command(run: str, output: str | None) -> None:
    """Write a run as one HTML file that opens anywhere, offline, and its trace for Perfetto beside it.

    \b
      vpipe report runs/2026-11-16T10-00-00
      vpipe report runs/latest -o pipeline.html
    """
    from vpipe.observe.report import write_report

    written = write_report(run, output)
    for note in written.notes:
        click.echo(f"note: {note}", err=True)
    click.echo(f"{written.report}  ({written.report.stat().st_size / 1000:.0f} kB)")
    if written.trace is not None:
        click.echo(f"{written.trace}  (open it in https://ui.perfetto.dev or chrome://tracing)")
