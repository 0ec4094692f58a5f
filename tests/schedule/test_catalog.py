"""The catalogue: names and aliases, every (p, m, v), options that do something, refusals that say both numbers."""

from __future__ import annotations

import random

import pytest

from vpipe.errors import UserError
from vpipe.registry import SCHEDULE_REGISTRY
from vpipe.schedule.action import Kind
from vpipe.schedule.authors.authoring import COSTS
from vpipe.schedule.authors.gpipe import gpipe
from vpipe.schedule.catalog import Entry, build, entries, get
from vpipe.schedule.catalog_entries import CATALOG
from vpipe.schedule.replicas import replicate
from vpipe.schedule.semantics import update_groups
from vpipe.schedule.simulate import simulate
from vpipe.schedule.timeline import Costs, StageCosts
from vpipe.schedule.verify import verify

NAMES = [
    "gpipe",
    "naive",
    "1f1b",
    "eager-1f1b",
    "interleaved",
    "looped-bfs",
    "zb-h1",
    "zb-h2",
    "zb-auto",
    "interleaved-zb",
    "zb-v",
    "v-half",
    "v-min",
    "hanayo",
    "dualpipe-v",
    "chimera",
    "dualpipe",
    "pipedream",
    "pipedream-2bw",
]


def test_the_catalogue_is_complete():
    assert [entry.name for entry in CATALOG] == NAMES
    assert [entry.name for entry in entries()][: len(NAMES)] == NAMES
    for entry in entries():
        assert entry.summary
        assert entry.mode == ("asp" if entry.name.startswith("pipedream") else "bsp")


def test_names_and_aliases_are_each_taken_once():
    names = [name.lower() for entry in CATALOG for name in {entry.name, *entry.aliases}]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("async_threaded", "gpipe"),
        ("zerobubble", "zb-h1"),
        ("1F1B", "1f1b"),
        ("Hanayo", "hanayo"),
        ("ScheduleGPipe", "gpipe"),
        ("Schedule1F1B", "1f1b"),
        ("ScheduleInterleaved1F1B", "interleaved"),
        ("ScheduleLoopedBFS", "looped-bfs"),
        ("ScheduleInterleavedZeroBubble", "interleaved-zb"),
        ("ScheduleZBVZeroBubble", "zb-v"),
        ("ScheduleDualPipeV", "dualpipe-v"),
    ],
)
def test_old_names_still_work(alias, name):
    assert get(alias).name == name


@pytest.mark.parametrize("name", NAMES)
def test_every_size_works_or_says_what_it_needs(name):
    entry = get(name)
    for p in (1, 2, 3, 4, 7):
        for m in (1, 2, 3, 5, 8, 13):
            for v in (1, 2, 3, 4) if entry.any_stages_per_rank else (None,):
                odd = (name == "hanayo" and v % 2) or (name == "dualpipe" and p % 2)
                if odd or (name == "pipedream-2bw" and m < p - 1):
                    with pytest.raises(UserError, match=rf"{name}.*\d"):
                        entry.build(p, m, v)
                    continue
                program = entry.build(p, m, v)
                assert verify(program) == [], (p, m, v)
                assert program.num_ranks == p
                assert program.num_stages == p * (v or entry.stages_per_rank)


@pytest.mark.parametrize("name", NAMES)
def test_authors_write_only_compute_and_update(name):
    program = build(name, 4, 6)
    assert {action.kind for _, action in program.actions()} <= {Kind.F, Kind.B, Kind.I, Kind.W, Kind.STEP}
    if get(name).mode == "bsp":
        for row, stages in zip(program.rows, program.placement.stages_of, strict=True):
            assert [str(action) for action in row[-len(stages) :]] == [f"{stage}STEP" for stage in stages]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: build("1f2b", 4, 8), "there is no schedule '1f2b'; did you mean '1f1b'?"),
        (lambda: build("mine.cvs", 4, 8), "there is no schedule 'mine.cvs'; a file with one ends in .csv; known: 1f1b"),
        (lambda: build("zerobuble", 4, 8), "did you mean 'zerobubble'?"),
        (lambda: build("1f1b", 0, 8), "num_ranks must be a whole number of at least 1, not 0"),
        (lambda: build("1f1b", 4, -1), "num_microbatches must be a whole number of at least 1, not -1"),
        (lambda: build("1f1b", 4, True), "num_microbatches must be a whole number of at least 1, not True"),
        (lambda: build("1f1b", 4, 8, 2), "1f1b has 1 stage per rank, not 2"),
        (lambda: build("zb-v", 4, 8, 3), "zb-v has 2 stages per rank, not 3"),
        (lambda: build("interleaved", 4, 8, 0), "stages_per_rank must be a whole number of at least 1, not 0"),
        (lambda: build("gpipe", 4, 8, waves=2), "gpipe has no option 'waves'; it has none"),
        (lambda: build("hanayo", 4, 8, waves=2), "did you mean 'num_waves'?"),
        (lambda: build("hanayo", 4, 8, 3), "even number of stages per rank, two for each wave, not 3"),
        (lambda: build("hanayo", 4, 8, 4, num_waves=1), "1 waves of hanayo are 2 stages per rank, not 4"),
        (lambda: build("pipedream-2bw", 6, 4), "6 ranks then need at least 5 microbatches per batch, not 4"),
        (lambda: build("pipedream", 3, 5, replicas=(2, 1)), "5 units are not a multiple of the 2 replicas of stage 0"),
        (lambda: build("pipedream", 4, 8, replicas=(2, 1)), "add up to 3 ranks, but there are 4"),
        (lambda: build("pipedream", 3, 6, replicas=3), "replicas must be a list with one number per stage, not 3"),
        (lambda: build("pipedream", 2, 6, depths=(0, 1)), "depths[0] = 0 is too small"),
        (lambda: build("pipedream", 2, 6, depths=(1,)), "depths has 1 entries, but there are 2 stages"),
        (lambda: build("pipedream", 2, 6, depths=(1, -1)), "depths[1] must be a whole number of at least 0, not -1"),
        (lambda: build("pipedream", 2, 6, vertical_sync="no"), "vertical_sync must be true or false, not 'no'"),
        (lambda: build("zb-auto", 2, 6, memory_limit=0), "at least 1 microbatch on each rank, not 0"),
        (lambda: build("zb-auto", 2, 6, costs=[(1, 1, 1)]), "costs has 1 entries, but zb-auto on 2 ranks has 2"),
        (lambda: build("zb-auto", 1, 6, costs=[(1, -1, 1)]), "costs[0] must be three finite times"),
        (lambda: build("zb-auto", 1, 6, latency=-1), "latency must be a finite time of at least 0, not -1"),
    ],
)
def test_refusals_say_both_numbers(call, words):
    with pytest.raises(UserError) as caught:
        call()
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("hanayo", {"num_waves": 2}),
        ("dualpipe-v", {"deepseek_drain": True}),
        ("dualpipe", {"deepseek_drain": True}),
        ("pipedream", {"vertical_sync": True}),
        ("pipedream", {"update_interval": 2}),
        ("pipedream", {"replicas": (2, 2)}),
        ("pipedream", {"depths": (4, 2, 1, 0)}),
        ("pipedream-2bw", {"num_batches": 3}),
        ("zb-auto", {"costs": [(2, 2, 1), (2, 3, 2), (2, 2, 2), (2, 3, 1)]}),
        ("zb-auto", {"memory_limit": 2}),
        ("zb-auto", {"latency": 1.0}),
    ],
)
def test_every_option_does_something(name, options):
    program = build(name, 4, 8, **options)
    assert verify(program) == []
    assert program != build(name, 4, 8)


def test_every_option_of_the_catalogue_is_in_the_test_above():
    options = {(entry.name, option) for entry in CATALOG for option in entry.options}
    tried = test_every_option_does_something.pytestmark[0].args[1]
    assert options == {(name, option) for name, chosen in tried for option in chosen}


def test_pipedream_updates_after_each_interval_and_after_the_last():
    program = build("pipedream", 2, 5, update_interval=2)
    assert update_groups(program) == [[[0, 1], [2, 3], [4]]] * 2


def test_explicit_depths_are_refused_exactly_where_they_deadlock():
    """The check of pipedream knows nothing of time; the simulator, which does, agrees with it on random cases."""
    chance = random.Random(7)
    refused = 0
    for _ in range(60):
        replicas = [chance.choice((1, 1, 2, 3)) for _ in range(chance.choice((2, 3)))]
        depths = [chance.randint(0, 4) for _ in replicas]
        try:
            assert verify(build("pipedream", sum(replicas), 12, replicas=replicas, depths=depths)) == []
        except UserError:
            refused += 1
    assert 20 < refused < 55


def test_zb_auto_is_never_behind_its_family_and_keeps_its_memory():
    chance = random.Random(3)
    for p, m, limit in [(4, 8, None), (4, 8, 4), (4, 12, 2), (3, 9, 5), (1, 4, 1), (6, 12, 8)]:
        costs = [tuple(chance.choice((1.0, 2.0, 3.0)) for _ in range(3)) for _ in range(p)]
        model = Costs(tuple(StageCosts(*each) for each in costs))
        found = simulate(build("zb-auto", p, m, costs=costs, memory_limit=limit), model)
        assert limit is None or max(found.peak_activations) <= limit
        for rival in ("1f1b", "zb-h1", "zb-h2"):
            other = simulate(build(rival, p, m), model)
            if limit is None or max(other.peak_activations) <= limit:
                assert found.makespan <= other.makespan + 1e-9, rival


@pytest.mark.parametrize("name", [name for name in NAMES if get(name).mode == "bsp"])
@pytest.mark.parametrize("d", [1, 2, 3])
def test_any_synchronous_program_can_be_replicated(name, d):
    p = 4 if name == "dualpipe" else 3
    single = build(name, p, 4)
    program = replicate(single, d)
    assert verify(program) == []
    assert program.num_ranks == p * d
    assert program.num_microbatches == 4 * d
    for pipeline in range(d):
        for rank in range(p):
            units = {action.microbatch for action in program.rows[pipeline * p + rank] if action.microbatch >= 0}
            assert units == set(range(pipeline, 4 * d, d))
    assert simulate(program).makespan == pytest.approx(simulate(single).makespan)


@pytest.mark.parametrize("name", ["pipedream", "pipedream-2bw"])
def test_an_asynchronous_program_cannot_be_replicated(name):
    with pytest.raises(UserError, match="only a synchronous schedule can be replicated"):
        replicate(build(name, 2, 4), 2)


@pytest.fixture
def registered():
    """Names that a test enters and that must not outlive it."""
    before = dict(SCHEDULE_REGISTRY._entries)
    yield
    SCHEDULE_REGISTRY._entries.clear()
    SCHEDULE_REGISTRY._entries.update(before)


@pytest.mark.usefixtures("registered")
def test_a_plain_function_of_another_package_joins_the_catalogue():
    @SCHEDULE_REGISTRY.register("fill-drain")
    def fill_drain(num_ranks, num_microbatches, *, twice=False):
        """All forwards, then all backwards."""
        return gpipe(num_ranks, num_microbatches * (2 if twice else 1))

    entry = get("fill-drain")
    assert isinstance(entry, Entry)
    assert entry.summary == "All forwards, then all backwards."
    assert entries()[-1] == entry
    assert build("fill-drain", 2, 3, twice=True) == build("gpipe", 2, 6)
    with pytest.raises(UserError, match="fill-drain has no option 'thrice'; did you mean 'twice'"):
        build("fill-drain", 2, 3, thrice=True)


@pytest.mark.usefixtures("registered")
def test_a_broken_plug_in_is_listed_with_its_reason_and_hurts_nobody():
    SCHEDULE_REGISTRY.register("broken")(42)
    SCHEDULE_REGISTRY.register("wrong")(lambda num_ranks, num_microbatches: "F B")
    listed = {entry.name: entry for entry in entries()}
    assert "not 42" in listed["broken"].summary
    assert build("1f1b", 2, 2) is not None
    with pytest.raises(UserError, match="'broken' must be a function"):
        build("broken", 2, 2)
    with pytest.raises(UserError, match="'wrong' must return a Program, not str"):
        build("wrong", 2, 2)


def test_an_entry_knows_how_its_batches_follow_each_other() -> None:
    """More units, more batches by its option, or one batch because it drains after each."""
    assert get("pipedream").batches(2, 4, 3) == build("pipedream", 2, 12)
    assert get("pipedream-2bw").batches(2, 4, 3) == build("pipedream-2bw", 2, 4, num_batches=3)
    assert get("1f1b").batches(2, 4, 3) == build("1f1b", 2, 4)


def test_traits_that_others_ask_for() -> None:
    assert [each.name for each in entries() if not each.for_auto] == ["naive", "zb-auto"]
    assert [each.name for each in entries() if COSTS in each.options] == ["zb-auto"]
    assert [each.name for each in entries() if each.takes_replicas] == ["pipedream"]
    assert get("1f1b").options_for(2, {"forward": 2.0}, 3.0) == {}
    told = {"costs": [(2.0, 1.0, 1.0)] * 2, "latency": 0.0, "memory_limit": 3.0}
    assert get("zb-auto").options_for(2, {"forward": 2.0}, 3.0) == told
    for each in entries():
        assert {*each.per_stage} <= {*each.options}
