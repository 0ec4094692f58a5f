"""The results of a sweep as a table, a CSV and a page; and whether synchronous schedules computed the same.

Synchronous schedules must give the same losses to the bit (semantics, rule 5). That is checked here for every pair of
runs with the same model and number of microbatches, over all schedules and repeats: a comparison of speeds between
runs that compute different things is worth nothing. Asynchronous schedules differ by design; they are shown with their
staleness and with the loss that they reach, against the synchronous one.
"""

from __future__ import annotations

import csv
import io
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median, stdev
from typing import Any

from vpipe.errors import UserError
from vpipe.observe import page_html
from vpipe.rundir import writing
from vpipe.rundir.layout import REPORT

ResultDocument = Mapping[str, Any]

COLUMNS = (
    "name", "model", "schedule", "mode", "num_microbatches", "repeat", "status", "reason", "num_ranks", "num_stages",
    "iterations", "updates", "time_per_iteration_seconds", "throughput_tokens_per_second", "samples_per_second", "mfu",
    "bubble", "step_seconds", "simulation_error", "peak_memory", "tensor_memory", "peak_activations", "weight_versions",
    "staleness",
    "final_loss", "evaluation_loss", "losses_equal", "wall_seconds", "device_name", "dtype", "partition", "code",
    "directory",
)  # fmt: skip

MEDIANS = {name: name for name in ("iterations", "updates", "mfu", "bubble", "final_loss", "evaluation_loss")} | {
    "seconds": "time_per_iteration_seconds",
    "memory": "tensor_memory",
    "process_memory": "peak_memory",
}
"""Figure of a group → key of its runs."""


def equality(results: Sequence[ResultDocument]) -> dict[str, str]:
    """Run → ``equal``, or where it first differs from its group's first run; only synchronous runs have a verdict."""
    groups: dict[tuple[str, int], list[ResultDocument]] = defaultdict(list)
    for result in results:
        if result.get("status") == "done" and result.get("mode") == "bsp":
            groups[str(result.get("model")), int(result["num_microbatches"])].append(result)
    said: dict[str, str] = {}
    for group in groups.values():
        first = group[0]
        said[first["name"]] = "reference"
        for other in group[1:]:
            said[other["name"]] = _compare(first, other)
    return said


def _compare(first: ResultDocument, other: ResultDocument) -> str:
    if len(first["losses"]) != len(other["losses"]):
        return f"{len(other['losses'])} iterations, {first['name']} has {len(first['losses'])}"
    for (iteration, expected), (_, loss) in zip(first["losses"], other["losses"], strict=True):
        if loss != expected:
            return f"differs from {first['name']} at iteration {iteration}: {loss!r}, not {expected!r}"
    return "equal"


def rows(results: Sequence[ResultDocument]) -> list[dict[str, Any]]:
    """One line per run, for the CSV."""
    same = equality(results)
    found = []
    for result in results:
        line = {column: result.get(column) for column in COLUMNS}
        line["model"] = result.get("model") or result.get("model_name")
        line["losses_equal"] = same.get(str(result.get("name")))
        found.append(line)
    return found


def to_csv(results: Sequence[ResultDocument]) -> str:
    """Ready for a spreadsheet: a cell that begins like a formula is marked as text."""
    out = io.StringIO(newline="")
    writer = csv.writer(out)
    writer.writerow(COLUMNS)
    for line in rows(results):
        writer.writerow([_cell(line[column]) for column in COLUMNS])
    return out.getvalue()


def _cell(value: Any) -> Any:
    if value is None:
        return ""
    if isinstance(value, list | tuple):
        return " ".join(str(each) for each in value)
    if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r"):
        return "'" + value
    return value


def groups(results: Sequence[ResultDocument]) -> list[dict[str, Any]]:
    """Repeats together: medians, and the spread of the throughput."""
    same = equality(results)
    together: dict[tuple[str, str, int], list[ResultDocument]] = {}
    for result in results:
        key = (str(result.get("model") or ""), str(result["schedule"]), int(result["num_microbatches"]))
        together.setdefault(key, []).append(result)
    found = []
    for (model, schedule, count), members in together.items():
        done = [each for each in members if each.get("status") == "done"]
        first = done[0] if done else members[0]
        rates = _numbers(done, "throughput_tokens_per_second")
        verdicts = [same[each["name"]] for each in done if each["name"] in same]
        wrong = [verdict for verdict in verdicts if verdict not in ("equal", "reference")]
        found.append(
            {
                "model": model or first.get("model_name") or "",
                "schedule": schedule,
                "num_microbatches": count,
                "mode": first.get("mode"),
                "runs": len(members),
                "failed": [str(each.get("reason")) for each in members if each.get("status") != "done"],
                "throughput": median(rates) if rates else None,
                "spread": stdev(rates) if len(rates) > 1 else None,
                **{name: _median(done, key) for name, key in MEDIANS.items()},
                **{name: first.get(name) for name in ("staleness", "weight_versions", "idle_by_cause")},
                "equal": wrong[0] if wrong else ("equal" if verdicts else None),
                "curve": first.get("curve") or [],
            }
        )
    return found


def _numbers(results: Sequence[ResultDocument], key: str) -> list[float]:
    return [float(each[key]) for each in results if isinstance(each.get(key), int | float)]


def _median(results: Sequence[ResultDocument], key: str) -> float | None:
    values = _numbers(results, key)
    return median(values) if values else None


NOISE = 0.1


def caveats(results: Sequence[ResultDocument], found: Sequence[Mapping[str, Any]]) -> list[str]:
    """What keeps the figures from being compared as they stand, in sentences."""
    said = []
    if len({result.get("code") for result in results}) > 1:
        said.append("The code changed during the sweep: the runs are not one experiment.")
    noisy = [each["schedule"] for each in found if each["spread"] and each["spread"] > NOISE * each["throughput"]]
    if noisy:
        said.append(
            f"Repeats of {', '.join(dict.fromkeys(noisy))} differ by more than {NOISE:.0%}: the machine was not quiet, "
            "so do not rank schedules by these throughputs."
        )
    if found and all(each["runs"] < 2 for each in found):
        said.append("One run each: nothing is known about the spread.")
    if len({each["updates"] for each in found if each["updates"]}) > 1:
        said.append(
            "Schedules made different numbers of updates in the same iterations (asynchronous ones update after every "
            "unit): a lower loss at the same iteration is not a better schedule."
        )
    return said


def write(output: Path, results: Sequence[ResultDocument], about: Mapping[str, Any]) -> tuple[Path, Path]:
    """``results.csv`` and ``report.html`` of a sweep."""
    found = groups(results)
    title = about.get("title", output.resolve().name)
    data = {"title": title, "about": dict(about), "groups": found, "caveats": caveats(results, found)}
    table, page = output / "results.csv", output / REPORT
    try:
        for path, text in ((table, to_csv(results)), (page, page_html.page("comparison", data))):
            writing.put(path, text.encode())
    except OSError as error:
        raise UserError(f"{output} cannot be written: {error.strerror}") from None
    return table, page
