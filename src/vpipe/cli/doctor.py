"""``vpipe doctor``: what this machine has, and how to mend what it lacks."""

from __future__ import annotations

import json
from dataclasses import asdict
from time import monotonic

import click

MINUTES, SMALL = 15.0, 5
"""How long ``--gpu`` may take, and below how many minutes its models are small."""
MARKS = {"found": ("ok", "green"), "missing": ("--", "red"), "note": ("! ", "yellow")}


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="One JSON object and nothing else.")
@click.option(
    "--gpu",
    is_flag=False,
    flag_value="",
    metavar="[TRIALS|MINUTES]",
    help="Try this machine's accelerators for a quarter of an hour (less than 5 minutes: small models), or the trials "
    "with these words in their names: a report to send back.",
)
def command(as_json: bool, gpu: str | None) -> int:
    """Look at this machine: torch, cores, memory, disk, network, SLURM, ssh, containers, accelerators, extras.

    Exit 1 only where vpipe cannot train at all; what else is missing is told with its remedy.
    """
    if gpu is not None:
        timed = gpu.replace(".", "", 1).isdigit()
        return _accept(as_json, float(gpu) if timed else MINUTES, "" if timed else gpu)
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


def _accept(as_json: bool, minutes: float, only: str) -> int:
    """A line for each trial as it is done, then what to send back."""
    from vpipe.cli.acceptance import LIMIT, TrialPlan, TrialResult, accept, facts

    known = facts()
    begin, found = monotonic(), list[TrialResult]()
    if not as_json:
        for name, value in known.items():
            lines = [f"{key}={each}" for key, each in value.items()] if isinstance(value, dict) else value
            click.echo(f"{name:<12} " + (f"\n{'':<13}".join(lines) if isinstance(lines, list) else str(lines)))

    def tell(result: TrialResult) -> None:
        found.append(result)
        if not as_json:
            verdict = click.style(f"{result.verdict:<9}", fg="green" if result.sound else "red")
            click.echo(
                f"{len(found):>4}  {result.name:<44} {verdict} {result.seconds:5.1f} s  {result.detail}".rstrip()
            )

    plan = TrialPlan(known["kind"], known["number"], 64 if minutes < SMALL else 512, LIMIT)
    left = accept(plan, minutes, only, tell)
    wrong = [result for result in found if not result.sound]
    told = {"sound": not wrong, "left_out": left, "seconds": monotonic() - begin, "facts": known}
    if as_json:
        click.echo(json.dumps(told | {"trials": [result._asdict() for result in found]}))
        return int(bool(wrong))
    click.echo(f"{len(found) - len(wrong)} of {len(found)} trials are sound, {left} were left out for want of time")
    for result in wrong:
        click.echo(f"{click.style(result.verdict, fg='red')}  {result.name}: {result.detail}")
    return int(bool(wrong))
