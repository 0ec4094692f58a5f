"""``vpipe playground``: schedules in the browser."""

from __future__ import annotations

from pathlib import Path

import click

from vpipe.cli.bar import bar
from vpipe.errors import UserError


@click.command("playground")
@click.option("--port", type=click.IntRange(0, 65535), default=0, show_default=True, help="0 takes a free one.")
@click.option("--at", default="", metavar="QUERY", help="What the page's link button copied: begin there.")
@click.option("--static", is_flag=True, help="Write a page that needs no server, with -o, and stop.")
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="With --static: the page.")
def command(port: int, at: str, static: bool, output: Path | None) -> None:
    """Play with schedules in the browser: sliders for counts, costs, latency and memory, the timeline at once.

    Single actions can be moved or removed, with the verifier's words beside; the program goes out as CSV or SVG, and
    the address holds everything.

    \b
      vpipe playground --port 8001
      vpipe playground --at '?schedule=zb-v&ranks=4&microbatches=8'
      vpipe playground --static -o playground.html
    """
    if static != (output is not None):
        raise UserError("--static writes a page and -o says where; give both: vpipe playground --static -o page.html")
    if output is not None:
        write(output)
        return
    from vpipe.observe.dashboard import Dashboard, require

    require()
    from vpipe.observe.playground import app

    with Dashboard(".", port, make=app) as page:
        there = "&" + at.removeprefix("?") if at else ""
        click.echo(f"open {page.url}{there}  (Ctrl-C ends)")
        page.wait()


def write(output: Path) -> None:
    """The page with its programs inside."""
    from vpipe.observe import offline, page_html

    with bar("schedules") as progress:
        page = page_html.static_playground(offline.data(progress=progress))
    try:
        output.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{output} cannot be written: {error.strerror}") from None
    click.echo(f"wrote {output} ({len(page.encode()) / 1e3:.0f} kB): open it in a browser, no server is needed")
