"""Every schedule equals its formula: makespan, the longest rank's span, peak activations, versions, staleness.

p ranks, m microbatches, v stages per rank; F, I, W are the times of one rank's whole share, T = F+I+W, ideal = mT.
"""

from __future__ import annotations

import pytest

from vpipe.schedule.catalog import build
from vpipe.schedule.semantics import version_table
from vpipe.schedule.simulate import Simulation, simulate
from vpipe.schedule.timeline import uniform

EQUAL = (1.0, 1.0, 1.0)
UNEQUAL = [EQUAL, (2.0, 3.0, 1.0), (1.0, 2.0, 1.0), (3.0, 4.0, 2.0)]
SIZES = [(1, 3), (2, 5), (3, 9), (4, 8), (4, 13), (5, 10), (8, 17)]


def timed(name: str, p: int, m: int, v: int | None = None, times=EQUAL, latency: float = 0.0, **options) -> Simulation:
    program = build(name, p, m, v, **options)
    forward, input_grad, weight_grad = times
    return simulate(
        program,
        uniform(program.placement, forward=forward, input_grad=input_grad, weight_grad=weight_grad, latency=latency),
    )


# At F = I = W = 1, p = 4, m = 8 (ideal 24): makespan, maxspan, peak activations of each rank.
GOLDEN = [
    ("gpipe", None, 33, 33, [8, 8, 8, 8]),
    ("naive", None, 33, 33, [8, 8, 8, 8]),
    ("1f1b", None, 33, 33, [4, 3, 2, 1]),
    ("eager-1f1b", None, 33, 33, [7, 5, 3, 1]),
    ("interleaved", 2, 28.5, 28.5, [5.5, 4.5, 3.5, 2.5]),
    ("interleaved", 4, 26.25, 26.25, [4.75, 4.25, 3.75, 3.25]),
    ("looped-bfs", 2, 28.5, 28.5, [8, 8, 8, 8]),
    ("zb-h1", None, 27, 27, [4, 4, 4, 4]),
    ("zb-h2", None, 27, 24, [7, 7, 7, 7]),
    ("interleaved-zb", 2, 25.5, 25.5, [4, 4, 4, 4]),
    ("zb-v", None, 25.5, 24, [4, 4, 4, 4]),
    ("v-half", None, 26.5, 26.5, [3, 3, 3, 3]),
    ("v-min", None, 29.5, 29.5, [2, 2, 2, 2]),
    ("dualpipe-v", None, 27, 27, [4.5, 4.5, 4.5, 4.5]),
    ("chimera", None, 28, 28, [5, 5, 5, 5]),
    ("dualpipe", None, 26, 26, [5, 5, 5, 5]),
]


@pytest.mark.parametrize(("name", "v", "makespan", "maxspan", "peaks"), GOLDEN)
def test_golden_values(name, v, makespan, maxspan, peaks):
    result = timed(name, 4, 8, v)
    assert result.makespan == pytest.approx(makespan)
    assert result.maxspan == pytest.approx(maxspan)
    assert result.peak_activations == peaks
    assert result.ideal == pytest.approx(24)
    assert set(result.weight_versions) == {1}
    assert set(result.staleness) == {0}


@pytest.mark.parametrize(
    ("name", "v", "at_once", "late"),
    [
        ("1f1b", None, 57, 85),
        ("eager-1f1b", None, 57, 63),
        ("zb-v", None, 49.5, 65.5),
        ("looped-bfs", 2, 52.5, 58.5),
        ("interleaved", 4, 50.25, 114.75),
    ],
)
def test_the_ranking_turns_over_on_slow_links(name, v, at_once, late):
    assert timed(name, 4, 16, v).makespan == pytest.approx(at_once)
    assert timed(name, 4, 16, v, latency=1.0).makespan == pytest.approx(late)


def bubble_of(name: str, p: int, v: int, times) -> float:
    f, i, w = times
    t = f + i + w
    return {
        "gpipe": (p - 1) * t,
        "1f1b": (p - 1) * t,
        "eager-1f1b": (p - 1) * t,
        "interleaved": (p - 1) * t / v,
        "looped-bfs": (p - 1) * t / v,
        "zb-h1": (p - 1) * (f + i - w),
        "interleaved-zb": (p - 1) * (f + i - w) / v,
    }[name]


@pytest.mark.parametrize(
    ("name", "v"),
    [
        *((name, 1) for name in ("gpipe", "1f1b", "eager-1f1b", "zb-h1")),
        *((name, v) for name in ("interleaved", "looped-bfs", "interleaved-zb") for v in (1, 2, 3)),
    ],
)
@pytest.mark.parametrize("times", UNEQUAL)
def test_the_bubble_is_its_formula_for_unequal_times(name, v, times):
    for p, m in SIZES:
        result = timed(name, p, m, v, times)
        expected = m * sum(times) + bubble_of(name, p, v, times)
        assert result.makespan == pytest.approx(expected), (p, m)
        assert result.maxspan == pytest.approx(expected), (p, m)


@pytest.mark.parametrize("times", [*UNEQUAL, (1.0, 1.0, 2.0)])
def test_zb_h2_pauses_nowhere_if_w_is_large_enough(times):
    f, i, w = times
    for p, m in [(1, 3), (2, 5), (3, 9), (4, 8), (5, 10), (8, 17)]:
        result = timed("zb-h2", p, m, times=times)
        assert result.maxspan == pytest.approx(m * (f + i + w) + max(0.0, (p - 1) * (f + i - 2 * w))), (p, m)
        assert result.makespan >= m * (f + i + w) + (p - 1) * f - 1e-9
        assert result.peak_activations == [2 * p - 1] * p


def test_zb_v_has_no_bubble_but_its_start():
    for p, m in [(1, 4), (2, 4), (3, 6), (4, 8), (5, 11), (8, 16)]:
        result = timed("zb-v", p, m)
        assert result.maxspan == pytest.approx(3 * m)
        assert result.makespan == pytest.approx(3 * m + (p - 1) / 2)
        assert result.peak_activations == [p] * p


@pytest.mark.parametrize("times", [EQUAL, (1.0, 2.0, 1.0), (2.0, 3.0, 2.0)])
def test_dualpipe_v_is_its_formula_where_f_is_w(times):
    f, i, w = times
    for p, m in [(1, 2), (2, 4), (3, 6), (4, 8), (5, 13), (8, 16)]:
        result = timed("dualpipe-v", p, m, times=times)
        pair = f + i + w
        assert result.makespan == pytest.approx(m * pair + (p - 1) * (pair + (i + w) - 3 * w) / 2), (p, m)
        assert max(result.peak_activations) == p + 0.5


def test_deepseeks_drain_beats_the_formula_when_actions_run_one_by_one():
    assert timed("dualpipe-v", 4, 8, deepseek_drain=True).makespan == pytest.approx(25.5)
    assert max(timed("dualpipe-v", 4, 8, deepseek_drain=True).peak_activations) == 4.5


@pytest.mark.parametrize("times", [(1.0, 1.0, 1.0), (1.0, 2.0, 1.0), (0.5, 0.75, 0.5)])
def test_dualpipe_meets_its_formula(times):
    """(p/2-1)(FB+B-3W) and p + 1 microbatches, FB = F + B as actions run one by one."""
    f, i, w = times
    for p, m in [(2, 4), (4, 8), (4, 14), (6, 12), (8, 16), (8, 40)]:
        result = timed("dualpipe", p, m, times=times)
        pair = f + i + w
        assert result.makespan == pytest.approx(m * pair + (p / 2 - 1) * (pair + (i + w) - 3 * w)), (p, m)
        assert set(result.peak_activations) == {p + 1}


@pytest.mark.parametrize("times", [(1.0, 1.0, 1.0), (1.0, 2.0, 1.0), (0.5, 1.0, 0.75)])
def test_chimera_meets_its_formula(times):
    f, i, w = times
    for p in (2, 4, 6, 8, 10):
        result = timed("chimera", p, p, times=times)
        assert result.makespan == pytest.approx(p * (f + i + w) + (p - 2) * (i + w)), p
        assert max(result.peak_activations) == p
        for m in (2 * p, 3 * p, 4 * p + 2):
            longer = timed("chimera", p, m, times=times)
            assert max(longer.peak_activations) == p + 1
            assert longer.makespan < timed("1f1b", p, m, times=times).makespan


def test_v_half_on_8_ranks_is_as_quick_as_its_authors():
    for m, makespan in ((16, 56.5), (24, 80.5), (32, 104.5)):
        result = timed("v-half", 8, m)
        assert result.makespan == pytest.approx(makespan)
        assert max(result.peak_activations) == 5


@pytest.mark.parametrize(("name", "peak"), [("v-half", lambda p: (p + 2) // 2), ("v-min", lambda p: (p + 4) // 3)])
def test_v_schedules_hold_what_they_promise(name, peak):
    for p in range(1, 13):
        result = timed(name, p, 2 * p)
        assert max(result.peak_activations) == peak(p), p
        assert result.makespan < timed("1f1b", p, 2 * p).makespan or p == 1
        assert max(timed(name, p, p // 2 + 1).peak_activations) <= peak(p), p


@pytest.mark.parametrize("m", [1, 2, 3, 4, 9])
def test_peaks_of_short_and_long_batches(m):
    p = 4
    assert timed("gpipe", p, m).peak_activations == [m] * p
    assert timed("1f1b", p, m).peak_activations == [min(m, p - r) for r in range(p)]
    assert timed("eager-1f1b", p, m).peak_activations == [min(m, 2 * (p - r) - 1) for r in range(p)]
    assert timed("zb-h1", p, m).peak_activations == [min(m, p)] * p
    for v in (2, 3):
        assert timed("looped-bfs", p, m, v).peak_activations == [m] * p


def test_interleaved_holds_p_and_a_bit():
    for p, m, v in [(2, 4, 2), (4, 8, 2), (4, 16, 3), (8, 16, 4)]:
        assert max(timed("interleaved", p, m, v).peak_activations) == pytest.approx(p + (p - 1) / v)
        assert max(timed("interleaved-zb", p, m, v).peak_activations) == p


@pytest.mark.parametrize(("p", "waves"), [(2, 1), (4, 1), (4, 2), (4, 4), (8, 2), (8, 4)])
def test_hanayo_is_about_its_formula_at_m_equal_to_p(p, waves):
    result = timed("hanayo", p, p, num_waves=waves)
    assert result.bubble <= (2 * p - 2) / (3 * p * waves + p - 1) + 0.005
    assert max(result.peak_activations) == p


@pytest.mark.parametrize(("p", "waves"), [(3, 2), (4, 1), (4, 2), (8, 2)])
def test_hanayo_stays_ahead_of_1f1b_in_long_batches(p, waves):
    for m in (2 * p, 4 * p, 8 * p):
        result = timed("hanayo", p, m, num_waves=waves)
        assert result.makespan < timed("1f1b", p, m).makespan
        assert max(result.peak_activations) <= 1.5 * p


def test_pipedream_never_pauses_between_drains():
    for p in (1, 2, 4, 6):
        short, long = timed("pipedream", p, 3 * p), timed("pipedream", p, 5 * p)
        assert long.makespan - short.makespan == pytest.approx(2 * p * 3)
        assert long.peak_activations == [p - r for r in range(p)]
        assert long.weight_versions == [p - s for s in range(p)]
        assert long.staleness == [p - 1 - s for s in range(p)]


def test_pipedream_reads_version_k_minus_w():
    p, m = 4, 12
    program = build("pipedream", p, m)
    assert version_table(program) == {(s, k): max(0, k - (p - 1 - s)) for s in range(p) for k in range(m)}
    vertical = build("pipedream", p, m, vertical_sync=True)
    assert vertical.rows == program.rows
    assert version_table(vertical) == {(s, k): max(0, k - (p - 1)) for s in range(p) for k in range(m)}


@pytest.mark.parametrize("replicas", [(2, 1), (1, 2), (3, 2), (1, 3, 1), (2, 1, 2)])
def test_replicated_stages_update_once_per_round(replicas):
    num_ranks = sum(replicas)
    program = build("pipedream", num_ranks, 12, replicas=replicas)
    table = version_table(program)
    for stage, count in enumerate(replicas):
        ahead = (num_ranks - 1 - sum(replicas[:stage])) // count
        assert all(table[stage, k] == max(0, k // count - ahead) for k in range(12)), stage


def test_2bw_keeps_two_versions_and_delays_by_one():
    for p, m in [(1, 1), (2, 1), (4, 3), (4, 8)]:
        result = timed("pipedream-2bw", p, m, num_batches=4)
        table = version_table(result.program)
        assert table == {(s, k): max(0, k // m - 1) for s in range(p) for k in range(4 * m)}
        assert max(result.weight_versions) == 2
        assert max(result.staleness) == 1
        longer = timed("pipedream-2bw", p, m, num_batches=5)
        assert longer.makespan - result.makespan == pytest.approx(3 * m)
