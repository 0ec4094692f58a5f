"""``vpipe doctor``: what this machine has, and how to mend what it lacks."""

from __future__ import annotations

import json
from dataclasses import asdict

import click

MARKS = {"found": ("ok", "green"), "missing": ("--", "red"), "note": ("! ", "yellow")}


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="One JSON object and nothing else.")
@click.option("--devices", is_flag=True, help="Run every schedule on several accelerators and on one: equal or not.")
def command(as_json: bool, devices: bool) -> int:
    """Look at this machine: torch, cores, memory, disk, network, SLURM, ssh, containers, accelerators, extras.

    Exit 1 only where vpipe cannot train at all; what else is missing is told with its remedy.
    """
    if devices:
        return _prove(as_json)
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


def _prove(as_json: bool) -> int:
    """A line for each schedule as it is done."""
    from vpipe.train.proof.device import accelerator, facts, overlap, prove, reach
    from vpipe.train.proof.device_suite import SUITE, in_processes, in_threads

    found = []
    kind = accelerator()
    known = facts(kind)
    if not as_json:
        click.echo("  ".join(f"{name} {value}" for name, value in known.items()))
    for proof in prove():
        found.append(proof)
        if not as_json:
            verdict = click.style("equal", fg="green") if proof.equal else click.style("DIFFERS", fg="red")
            what = f"{proof.schedule:<16} {proof.num_ranks} devices  {proof.options:<14}"
            click.echo(f"{what} {verdict}  {proof.seconds:5.1f} s  {proof.detail}".rstrip())
    suites = {"threads": in_threads(kind)}
    if known["backend"] != "none":
        suites["processes"] = in_processes(kind)
    ways, beside = reach(kind), overlap(kind)
    equal = all(proof.equal for proof in found) and not any(suites.values()) and not ways.broken
    if as_json:
        told = {"facts": known, "equal": equal, "proofs": [proof._asdict() for proof in found]}
        told |= {"broken_promises": suites, "reach": ways._asdict(), "overlap": beside._asdict()}
        click.echo(json.dumps(told))
    else:
        for where, broken in suites.items():
            said = click.style("BROKEN", fg="red") + ": " + "; ".join(broken) if broken else "kept"
            click.echo(f"messages         {len(SUITE)} promises between {where}: {said}")
        state = click.style("BROKEN", fg="red") + f": {', '.join(ways.broken)}" if ways.broken else "all work"
        rates = f"{ways.slowest / 1e9:.2f} to {ways.fastest / 1e9:.2f} GB/s"
        click.echo(f"reach            {ways.num_ways} ways between devices, {rates}: {state}")
        click.echo(
            f"overlap          products {beside.compute * 1e3:.1f} ms, copy {beside.copy * 1e3:.1f} ms, both "
            f"{beside.together * 1e3:.1f} ms: {beside.hidden:.0%} hidden"
        )
        number = sum(proof.equal for proof in found)
        click.echo(f"{number} of {len(found)} schedules are equal on several devices and on one")
    return int(not equal)
