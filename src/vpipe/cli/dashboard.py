"""``vpipe dashboard``: a run as a live page."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("dashboard")
@click.argument("run", type=click.Path())
@click.option("--port", type=click.IntRange(0, 65535), default=0, show_default=True, help="0 takes a free one.")
def command(run: str, port: int) -> None:
    """Serve a run as a live page on this machine: verdict, timeline, bubbles, loss, and a what-if panel.

    A run that has ended is shown as it was. A directory of runs is a list: open any, lay any two side by side. From
    another machine, forward the port: ssh -L 8000:127.0.0.1:8000 host

    \b
      vpipe dashboard runs/2026-11-16T10-00-00 --port 8000
      vpipe dashboard runs/
    """
    from vpipe.observe.dashboard import Dashboard
    from vpipe.observe.gallery import runs
    from vpipe.rundir.reader import open_run

    if not runs(Path(run)):
        open_run(run)  # says in one sentence what is missing
    with Dashboard(run, port) as page:
        click.echo(f"open {page.url}  (Ctrl-C ends)")
        page.wait()
