"""Schedules that torch dumps are read, verified and simulated; ours are read by torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from vpipe.schedule.action import Kind
from vpipe.schedule.catalog import build, entries
from vpipe.schedule.lower import lower
from vpipe.schedule.program import from_csv, read_csv, to_csv
from vpipe.schedule.simulate import simulate
from vpipe.schedule.verify import verify

torch: Any = pytest.importorskip("torch")
schedules: Any = pytest.importorskip("torch.distributed.pipelining.schedules")


def torch_schedule(name: str, p: int, m: int, v: int) -> Any:
    """A schedule object of torch, without a process group: its stages know only their numbers."""

    class Stage(schedules._PipelineStageBase):  # type: ignore[misc]
        def __init__(self) -> None:
            self.num_stages, self.group_size, self.group_rank, self.group = p * v, p, 0, None
            self.submod = torch.nn.Identity()

        def _create_grad_recv_info(self, *args: object) -> tuple[()]:
            return ()

        def _prepare_forward_infra(self, n_microbatches: int) -> None: ...

        def _prepare_backward_infra(self, n_microbatches: int) -> None: ...

    return getattr(schedules, name)([Stage() for _ in range(v)], m)


MULTI = [
    ("ScheduleInterleaved1F1B", 4, 8, 2),
    ("ScheduleInterleaved1F1B", 2, 4, 3),
    ("ScheduleInterleavedZeroBubble", 4, 8, 2),
    ("ScheduleZBVZeroBubble", 4, 8, 2),
    ("ScheduleDualPipeV", 4, 10, 2),
]


@pytest.mark.parametrize(("name", "p", "m", "v"), MULTI)
def test_compute_only_dumps(name: str, p: int, m: int, v: int, tmp_path: Path) -> None:
    torch_schedule(name, p, m, v)._dump_csv(tmp_path / "dump.csv", format="compute_only")
    program = read_csv(tmp_path / "dump.csv")
    assert (program.num_ranks, program.num_stages, program.num_microbatches) == (p, p * v, m)
    assert not verify(program)
    assert simulate(program).ideal == pytest.approx(3 * m)


@pytest.mark.parametrize(("name", "p", "m", "v"), MULTI)
def test_dumps_with_communication(name: str, p: int, m: int, v: int, tmp_path: Path) -> None:
    schedule = torch_schedule(name, p, m, v)
    schedule._prepare_schedule_with_comms(schedule.pipeline_order)
    schedule._dump_csv(tmp_path / "dump.csv")
    text = (tmp_path / "dump.csv").read_text()
    assert "UNSHARD" in text
    assert "REDUCE_GRAD" in text
    program = read_csv(tmp_path / "dump.csv")
    kinds = {action.kind for _, action in program.actions()}
    assert {Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B, Kind.REDUCE} <= kinds
    assert not verify(program)


def test_dualpipe_v_dumps_compound_cells(tmp_path: Path) -> None:
    schedule = torch_schedule("ScheduleDualPipeV", 4, 10, 2)
    schedule._dump_csv(tmp_path / "dump.csv", format="compute_only")
    assert ")OVERLAP_F_B" in (tmp_path / "dump.csv").read_text()


@pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry.name)
def test_our_programs_come_back_from_torch(entry: Any, tmp_path: Path) -> None:
    """torch parses every cell of ours that it has a kind for, writes the same text, and we read the same program."""
    program = build(entry.name, 4, 8)
    authored = from_csv(to_csv(program), versions=program.versions)
    assert authored == program
    lowered = lower(program)
    assert from_csv(to_csv(lowered), versions=program.versions) == lowered
    for _, action in lowered.actions():
        if action.kind not in (Kind.STEP, Kind.REDUCE, Kind.R, Kind.OUT, Kind.IN):
            assert str(schedules._Action.from_str(str(action))) == str(action)
