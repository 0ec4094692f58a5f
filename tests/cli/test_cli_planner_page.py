"""The samples of docs/planner.md have the form of what the commands print: the same words and columns, other figures."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from vpipe.cli.main import main
from vpipe.plan.costs import LayerCost, Profile

PAGE = (Path(__file__).parents[2] / "docs" / "planner.md").read_text()
MIB = 1 << 20
FIGURE = re.compile(r"[-+]?\d[\d.]*(-\d+)?( ?(%|µs|ms|s|[KMG]i?B|B)\b|%)?(/s)?")
BLOCK = LayerCost("block", 8e-3, 6e-3, 6e-3, 8 * MIB, MIB, 2 * MIB, 4 * MIB, update=1e-3)
LAYERS = (
    LayerCost("embedding", 1e-3, 1e-4, 1e-3, 3000, MIB, 4 * MIB, 8 * MIB, update=1e-3),
    *(replace(BLOCK, name=f"block {number}") for number in range(6)),
    LayerCost("head", 2e-3, 2e-3, 1e-3, 2 * MIB, 0, 4 * MIB, 8 * MIB, update=1e-3),
)
MACHINE = {"input_bytes": 4096, "microbatch_rows": 4, "link_latency": 1e-4, "link_bandwidth": 1e9}
PROFILE = Profile(LAYERS, **MACHINE, swap_bandwidth=1.5e9, action_overhead=1e-4, model="a model")  # type: ignore[arg-type]


def form(line: str) -> str:
    """A line without its figures and the width of its columns."""
    return " ".join("#" if word == "-" else word for word in FIGURE.sub("#", line).split())


def sample(command: str) -> list[str]:
    """The lines that the page shows behind a command."""
    after = PAGE.split(f"    $ {command}\n", 1)[1].split("\n\n", 1)[0].splitlines()
    return [form(line) for line in after if not line.startswith("    $ ")]


def test_the_profile() -> None:
    shown = sample("vpipe profile configs/default.yaml -o profile.json")
    assert shown == [form(line) for line in PROFILE.table().splitlines()]


def test_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Every line in its order; where the page leaves lines out it says so."""
    monkeypatch.chdir(tmp_path)
    blocks = [replace(BLOCK, forward=(5 + i % 7) * 1e-3, saved_bytes=(4 + i % 5) * MIB) for i in range(20)]
    replace(PROFILE, layers=(LAYERS[0], *blocks, LAYERS[-1]), swap_bandwidth=6e8).save("profile.json")
    asked = ["--memory", "150MiB", "--scheduler", "zb-h1", "-o", "plan.json"]
    with pytest.raises(SystemExit) as end:
        main(["plan", "profile.json", "-p", "4", "-m", "8", *asked])
    assert not end.value.code
    printed = [form(line) for line in capfd.readouterr().out.splitlines()]
    wanted = sample("vpipe plan configs/gpt_small.yaml -p 4 --profile small.json --memory 250MiB -o plan.json")
    place, skips = 0, False
    for line in wanted:
        if line == "…":
            skips = True
            continue
        start = line.replace("configs/gpt_small.yaml", "CONFIG")
        found = next((at for at in range(place, len(printed)) if printed[at].startswith(start)), None)
        assert found is not None, (line, printed)
        assert skips or found == place, f"the page leaves out {printed[place:found]}"
        place, skips = found + 1, False
    assert place == len(printed)
