"""``vpipe doctor``: what this machine has, and how to mend what it lacks."""

from __future__ import annotations

import json
from dataclasses import asdict

import click

MARKS = {"found": ("ok", "green"), "missing": ("--", "red"), "note": ("! ", "yellow")}


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="One JSON object and nothing else.")
def command(as_json: bool) -> int:
    """Look at this machine: torch, cores, memory, disk, network, SLURM, ssh, containers, GPUs, extras.

    Exit 1 only where vpipe cannot train at all; what else is missing is told with its remedy.
    """
    from vpipe.launch.doctor import examine

    findings = examine()
    lacking = any(each.status == "missing" and each.topic in ("torch", "disk") for each in findings)
    if as_json:
        click.echo(json.dumps({"can_train": not lacking, "findings": [asdict(each) for each in findings]}))
        return int(lacking)
    width = max(len(each.topic) for each in findings)
    before = ""
    for each in findings:
        mark, color = MARKS[each.status]
        topic = each.topic if each.topic != before else ""
        before = each.topic
        click.echo(f"{click.style(mark, fg=color)}  {topic:<{width}}  {each.detail}")
        if each.mend:
            click.echo(f"    {'':<{width}}  → {each.mend}")
    return int(lacking)
