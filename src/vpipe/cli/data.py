"""``vpipe data build``: real data sets, made from text that is on this machine."""

from __future__ import annotations

from pathlib import Path

import click

from vpipe.cli.bar import bar
from vpipe.data import build
from vpipe.data.builders import BUILDERS


@click.group()
def command() -> None:
    """Build a data set from text on this machine; nothing is downloaded."""


@command.command("build")
@click.argument("name", metavar=f"[{'|'.join(BUILDERS)}]")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="The directory to make.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Decides the split and the masking.")
@click.option("--limit", type=click.IntRange(1), help="Stop after this many documents.")
@click.option(
    "--source", type=click.Path(path_type=Path), help="A folder of text to use instead of what the machine has."
)
@click.option("--language", help="For translation: the target language, such as de, fr or zh_CN.")
@click.option("--json", "as_json", is_flag=True, help="Print the manifest as JSON.")
def build_command(
    name: str, out: Path, seed: int, limit: int | None, source: Path | None, language: str | None, as_json: bool
) -> None:
    """Build a data set.

    \b
    code          documented functions of the Python standard library, in CodeSearchNet's fields
    bert          pre-training shards in NVIDIA's HDF5 format, with a WordPiece vocabulary
    translation   sentence pairs from the gettext catalogues of installed programs
    text          plain text documents
    """
    with bar(f"building {name}", hidden=as_json) as progress:
        manifest = build(name, out, seed=seed, limit=limit, source=source, language=language, progress=progress)
    if as_json:
        click.echo((out / "manifest.json").read_text(), nl=False)
        return
    counts = ", ".join(f"{count:,} {what}" for what, count in manifest.counts.items())
    click.echo(f"built {out}: {counts}")
