"""Programs of the user's own as entries: files, updates that nobody wrote, orders that the author chose."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_text_torch import torch_schedule

from vpipe.cli.main import main
from vpipe.errors import UserError
from vpipe.schedule.action import Action, Kind
from vpipe.schedule.catalog import find, get, short_name, with_updates
from vpipe.schedule.lower import lower
from vpipe.schedule.program import from_csv, read_csv
from vpipe.schedule.semantics import forward_orders, update_groups
from vpipe.schedule.verify import verify
from vpipe.schedule.violation import folded

BACKWARDS = "0F0,0F1,0B1,0B0\n1F0,1F1,1B1,1B0\n"
TWO_WAYS = "0F0,1F1,0B0,1B1,0STEP,1STEP\n1F0,0F1,1B0,0B1,1STEP,0STEP\n"
"""Each rank writes its own stages' updates in its own order."""


def test_a_file_is_a_schedule(tmp_path: Path) -> None:
    file = tmp_path / "my.csv"
    file.write_text(BACKWARDS)
    entry = get(str(file))
    assert (entry.asynchronous, entry.stages_per_rank, entry.num_microbatches) == (False, 1, 2)
    program = entry.build(2, 2)
    assert [row[-1] for row in program.rows] == [Action(0, Kind.STEP), Action(1, Kind.STEP)]
    with pytest.raises(UserError, match=r"my\.csv is for 2 ranks, but there are 4; give it 2 ranks"):
        entry.build(4, 2)
    with pytest.raises(UserError, match=r"my\.csv is for 2 microbatches, but there are 8"):
        entry.build(2, 8)
    with pytest.raises(UserError, match="has no option 'depths'"):
        entry.build(2, 2, depths=[1, 0])
    file.write_text(BACKWARDS + BACKWARDS.replace("1", "x"))
    with pytest.raises(UserError, match="row 3, column 2"):
        get(str(file))
    with pytest.raises(UserError, match=r"none\.csv cannot be read: No such file"):
        get(str(tmp_path / "none.csv"))


def test_several_updates_make_it_asynchronous() -> None:
    assert find(from_csv("0F0,0B0,0STEP,0F1,0B1,0STEP")).asynchronous
    assert not find(from_csv("0F0,0B0,0F1,0B1,0STEP")).asynchronous


def test_updates_that_nobody_wrote() -> None:
    whole = with_updates(from_csv(BACKWARDS))
    assert not verify(whole)
    assert [row.count(Action(stage, Kind.STEP)) for stage, row in enumerate(whole.rows)] == [1, 1]
    assert with_updates(whole) == whole, "what has updates keeps its own"
    lowered = with_updates(lower(from_csv(TWO_WAYS.replace(",0STEP", "").replace(",1STEP", ""))))
    assert not verify(lowered)
    assert all(row.count(Action(stage, Kind.REDUCE)) == 1 for row in lowered.rows for stage in (0, 1))
    with pytest.raises(UserError, match="forwards and no backward, so it trains nothing"):
        with_updates(from_csv("0F0,0F1\n1F0,1F1\n"))


def test_replicas_meet_in_one_order_whatever_order_their_updates_have() -> None:
    """Before, rank 0 reduced stage 0 first and rank 1 stage 1: each waited for the other."""
    program = from_csv(TWO_WAYS)
    assert not verify(program)
    reduces = [[action.stage for action in row if action.kind is Kind.REDUCE] for row in lower(program).rows]
    assert reduces == [[0, 1], [0, 1]]


def test_the_order_of_units_is_the_authors(tmp_path: Path) -> None:
    program = from_csv(BACKWARDS)
    assert not verify(program)
    assert update_groups(program) == [[[1, 0]], [[1, 0]]]
    assert forward_orders(program) == [[0, 1], [0, 1]]
    torch_schedule("ScheduleLoopedBFS", 4, 8, 2)._dump_csv(tmp_path / "dump.csv", format="compute_only")
    looped = read_csv(tmp_path / "dump.csv")
    assert not verify(looped), "torch's backwards run in decreasing order"
    assert update_groups(looped) == [[list(reversed(range(8)))]] * 8


def test_where_updates_count_units_they_go_in_order() -> None:
    found = verify(from_csv("0F1,0F0,0B1,0STEP,0B0,0STEP"))
    assert {each.action for each in found} == {"0F0", "0B0"}
    assert all("where stages update several times microbatches go in increasing order" in each.reason for each in found)


def test_replicas_of_a_stage_in_their_order() -> None:
    """Stage 1's replica 0 is rank 1: its units come first in the sum."""
    program = from_csv("0F0,1F1,1F3,0F2,1B3,1B1,0B0,0B2\n1F0,1F2,0F1,0F3,1B2,1B0,0B1,0B3")
    assert program.placement.ranks_of == ((0, 1), (1, 0))
    assert update_groups(program) == [[[0, 2, 1, 3]], [[2, 0, 3, 1]]]


def test_many_violations_of_one_kind_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "none.csv"
    file.write_text("\n".join(",".join(f"{s}F{k}" for k in range(20)) + f",{s}B0" for s in range(2)))
    found = verify(read_csv(file))
    assert len(found) >= 38
    assert len(folded(found)) == 1
    with pytest.raises(SystemExit, match="1"):
        main(["verify", str(file)])
    lines = [line for line in capsys.readouterr().out.splitlines() if "must be one B" in line]
    assert len(lines) == 1
    assert lines[0].endswith(f"(and {len(found) - 1} more of this kind)")


def test_a_word_for_files() -> None:
    assert short_name("1f1b") == "1f1b"
    assert short_name("/a b/my order.csv") == "my_order"
