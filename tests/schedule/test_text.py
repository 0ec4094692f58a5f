"""Reading CSV files: what is taken, and one sentence with file, row and column for what is not."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as some

from vpipe.errors import UserError
from vpipe.schedule.authors.authoring import Entry
from vpipe.schedule.catalog import build, entries
from vpipe.schedule.lower import lower
from vpipe.schedule.placement import replicated
from vpipe.schedule.program import cells, from_csv, read_csv, to_csv


@pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry.name)
def test_exact_round_trip(entry: Entry) -> None:
    for p, m in ((2 if entry.two_ways else 1, 1), (2, 3), (4, 8)):
        program = entry.build(p, m)
        if entry.two_ways and m == 1:
            continue  # a file shows who holds a stage by who runs its units
        stages = range(program.num_stages)
        for each in (program, lower(program), lower(program, recompute_stages=stages, swap_stages=stages)):
            again = from_csv(to_csv(each), versions=each.versions)
            assert again == each
            assert to_csv(again) == to_csv(each)


def test_replicas_are_found_in_the_turns_of_the_units() -> None:
    program = build("pipedream", 4, 12, replicas=[2, 1, 1])
    assert from_csv(to_csv(lower(program))).placement == replicated([2, 1, 1])


def test_what_torch_writes_and_we_do_not() -> None:
    program = from_csv(
        "0UNSHARD,0F0,0WAIT_SEND_F0,(0F1;0B0)OVERLAP_F_B,0B1,0REDUCE_GRAD,0WAIT_REDUCE_GRAD,0RESHARD\r\n1F0,1B0, 1F1 ,1B1,1REDUCE_GRAD0\r\n"
    )
    assert str(program) == "0F0 0F1 0B0 0B1 0REDUCE\n1F0 1B0 1F1 1B1 1REDUCE"
    assert [column for column, _ in cells("0F0,,(0F1;0B0)OVERLAP_F_B,0B1\n")[0]] == [1, 3, 3, 4]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"bad.csv holds no action"),
        (b"\n,,\n", r"bad.csv holds no action"),
        (b"\x7fELF\x02\x01\x00\x00", r"bad.csv is not text \(byte 6\)"),
        (b"0F0,\xff", r"bad.csv is not text \(byte 4\)"),
        ("0F0".encode("utf-16"), r"bad.csv is not text \(byte 0\)"),
        (b"0F0,0X1\n", r"bad.csv, row 1, column 2: '0X1' is not an action such as 0F3"),
        (b"0F0\n1F0,1STEP4\n", r"bad.csv, row 2, column 2: '1STEP4' is not an action: STEP takes no microbatch"),
        (b"0F0\n1F\n", r"bad.csv, row 2, column 1: '1F' is not an action: F takes a microbatch"),
        (b"0F0,(0F1;oops)OVERLAP_F_B\n", r"bad.csv, row 1, column 2: 'oops' is not an action"),
        (b"0F0,0B0\n\n2F0,2B0\n", r"bad.csv, row 2: rank 1 does nothing"),
        (b"0F0,0B0\n2F0,2B0\n", r"bad.csv: stage 1 is on no rank, though stage 2 is; is a row missing\?"),
        (b"0F0,0B0\n0F1,0B0,0F0,0B1\n", r"bad.csv, row 1: rank 0 holds no stage of its own"),
        (b"0F0,0F777\n", r"row 1, column 2: 0F777 is of microbatch 777, but there are only 2 actions"),
        (b"0F0,999999F0\n", r"row 1, column 2: 999999F0 is of stage 999999, but there are only 2 actions"),
        (b"0F0,0F" + b"9" * 5000, r"row 1, column 2: '0F9{38}' is not an action"),
        (b'"' + b"x" * 200000, r"bad.csv, row 1"),
    ],
)
def test_bad_files_in_one_sentence(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "bad.csv").write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        read_csv(tmp_path / "bad.csv")
    assert "\n" not in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.csv does not exist"):
        read_csv(tmp_path / "none.csv")
    with pytest.raises(UserError, match="cannot be read: Is a directory"):
        read_csv(tmp_path)


@given(some.text(alphabet="0123456789FBIWRSTEPOUND_,;()\n \"'é\0", max_size=60))
def test_no_text_is_a_crash(text: str) -> None:
    with suppress(UserError):
        from_csv(text)
