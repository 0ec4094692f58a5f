"""The page ``docs/schedules.md`` and its pictures, written from the catalogue so that they cannot disagree with it.

    python docs/schedules_page.py

A test compares the files with what this script writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from vpipe.schedule.authors.authoring import Entry
from vpipe.schedule.catalog import entries
from vpipe.schedule.choose import RankedSchedule, rank
from vpipe.schedule.simulate import Simulation, simulate
from vpipe.schedule.svg import svg

RANKS, MICROBATCHES = 4, 8
MANY = 16
"""Microbatches of the comparison of networks."""
LATENCIES = (0.0, 0.25, 1.0)
HEAD = """# Schedules

Written by `python docs/schedules_page.py` from the catalogue; do not edit by hand.

p ranks, m microbatches, v stages per rank. F, I, W: the time of one rank's whole share of a microbatch for the forward,
the input gradient and the weight gradient; a stage costs 1/v of it. T = F + I + W, ideal = m·T.

- **makespan**: first start to last end over all ranks. **maxspan**: the longest single rank's span, which counts where
  ranks may update their weights at different times.
- **peak activations**: in microbatches on one rank's share, from the start of F to the end of B or W.
- Pictures and figures are for p = {p}, m = {m}, F = I = W = 1 and no latency. `vpipe draw NAME -p {p} -m {m}` draws
  them in the terminal, `vpipe simulate NAME -p {p} -m {m}` prints the figures.
- In Python, build, verify, simulate and draw: [a notebook](../examples/schedules.ipynb).
- In the pictures a number is a microbatch, a line an update, and paler boxes are later stages of a rank.

Unless a section says otherwise, a schedule takes any p and m, holds one copy of the weights, and updates once per
batch, after a flush.
"""

NETWORKS = """## Slow links turn the ranking over

Time of {m} microbatches on {p} ranks, and the place in the ranking, for a latency of 0, a quarter and the whole of a
forward. Schedules with many small stages win on a fast network and lose on a slow one; those that run further ahead
hide the latency. `vpipe schedules --rank -p {p} -m {m} --latency 1` prints it for your numbers, with `--memory K` for
what fits. An asynchronous schedule counts by its steady state.

"""


@cache
def _simulation(entry: Entry) -> Simulation:
    return simulate(entry.build(RANKS, MICROBATCHES), blocking=entry.blocking)


def pages() -> dict[str, str]:
    """Path below ``docs`` → content."""
    found = {"schedules.md": page()}
    for entry in entries():
        title = f"{entry.name}, {RANKS} ranks, {MICROBATCHES} microbatches"
        found[f"pictures/{entry.name}.svg"] = svg(_simulation(entry), title)
    return found


def page() -> str:
    """All schedules: one table, one section each, and what slow links do."""
    parts = [HEAD.format(p=RANKS, m=MICROBATCHES), _overview(), *map(_section, entries())]
    return "\n".join([*parts, _networks()])


def _overview() -> str:
    rows = [("schedule", "makespan", "maxspan", "bubble", "peak activations, per rank", "weight versions")]
    for entry in entries():
        found = _simulation(entry)
        peaks = " ".join(f"{peak:g}" for peak in found.peak_activations)
        name = f"[{entry.name}](#{entry.name})"
        spans = (f"{found.makespan:g}", f"{found.maxspan:g}", f"{found.bubble:.1%}")
        rows.append((name, *spans, peaks, str(max(found.weight_versions))))
    note = "pipedream and pipedream-2bw do not flush: their makespan here contains one filling and one draining."
    return f"## All of them\n\n{_table(rows)}\n{note}\n"


def _section(entry: Entry) -> str:
    rows = [
        ("", ""),
        ("makespan beyond the ideal", entry.bubble),
        ("peak activations", entry.memory),
        ("weight copies", "" if entry.weight_copies == "1" else entry.weight_copies),
        ("needs", entry.needs.removeprefix("any p and m").removeprefix("; ")),
        ("updates", "in flight, without a flush" if entry.asynchronous else ""),
    ]
    rows = [row for row in rows if row[1] or not row[0]]
    if entry.any_stages_per_rank:
        rows.append(("stages per rank", f"`-v`, {entry.stages_per_rank} unless given"))
    if entry.options:
        rows.append(("options", ", ".join(f"`{name}`" for name in entry.options)))
    if entry.aliases:
        rows.append(("also called", ", ".join(f"`{alias}`" for alias in entry.aliases)))
    names_another = entry.summary.split()[0] in {each.name for each in entries()}
    summary = entry.summary if names_another else entry.summary[0].upper() + entry.summary[1:]
    return f"## {entry.name}\n\n{summary}.\n\n![{entry.name}](pictures/{entry.name}.svg)\n\n{_table(rows)}"


def _networks() -> str:
    """The ranking at several latencies: on slow links it turns over."""
    found = {latency: rank(RANKS, MANY, {"latency": latency}) for latency in LATENCIES}
    times = {latency: {each.name: each for each in choices} for latency, choices in found.items()}
    heads = ("schedule", *(f"latency {latency:g}" for latency in LATENCIES), "peak activations (latency 0)")
    rows = [heads, *(_places(each, times) for each in found[LATENCIES[0]] if not each.refused)]
    return NETWORKS.format(p=RANKS, m=MANY) + _table(rows)


def _places(choice: RankedSchedule, times: dict[float, dict[str, RankedSchedule]]) -> Sequence[str]:
    cells = [choice.name + (" (steady state)" if choice.asynchronous else "")]
    for latency in LATENCIES:
        quicker = sum(other.time < times[latency][choice.name].time - 1e-9 for other in times[latency].values())
        cells.append(f"{times[latency][choice.name].time:g} ({quicker + 1})")
    return [*cells, f"{choice.peak_activations:g}"]


def _table(rows: Sequence[Sequence[str]]) -> str:
    def lines() -> Iterator[str]:
        for number, row in enumerate(rows):
            yield "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"
            if number == 0:
                yield "|" + " --- |" * len(row)

    return "\n".join(lines()) + "\n"


def write(folder: Path) -> None:
    """Write the page and the pictures into ``folder``."""
    for name, content in pages().items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")


if __name__ == "__main__":
    write(Path(__file__).parent)
