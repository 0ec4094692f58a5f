"""``vpipe playground``: schedules in the browser."""

from __future__ import annotations

import click


@click.command("playground")
@click.option("--port", type=click.IntRange(0, 65535), default=0, show_default=True, help="0 takes a free one.")
@click.option("--at", default="", metavar="QUERY", help="What the page's link button copied: begin there.")
def command(port: int, at: str) -> None:
    """Play with schedules in the browser: sliders for counts, costs, latency and memory, the timeline at once.

    Single actions can be moved or removed, with the verifier's words beside; the program goes out as CSV or SVG, and
    the address holds everything.

    \b
      vpipe playground --port 8001
      vpipe playground --at '?schedule=zb-v&ranks=4&microbatches=8'
    """
    from vpipe.observe.dashboard import Dashboard, require

    require()
    from vpipe.observe.playground import app

    with Dashboard(".", port, make=app) as page:
        there = "&" + at.removeprefix("?") if at else ""
        click.echo(f"open {page.url}{there}  (Ctrl-C ends)")
        page.wait()
