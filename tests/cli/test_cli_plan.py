"""plan and profile, as a user calls them: answers, files, JSON keys, exit codes, one sentence per error."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from cli_answer import Answer

from vpipe.cli.main import main
from vpipe.plan.costs import LayerCost, Profile, load_profile
from vpipe.plan.links import links_from_json

MIB = 1 << 20
BLOCK = LayerCost("block", 8e-3, 8e-3, 6e-3, 8 * MIB, MIB, 2 * MIB, 4 * MIB)
PROFILE = Profile(
    (LayerCost("embedding", 1e-3, 0.0, 1e-3, 1000, MIB, 4 * MIB, 8 * MIB), *[BLOCK] * 6,
     LayerCost("head", 20e-3, 20e-3, 15e-3, 20 * MIB, 0, 4 * MIB, 8 * MIB)),
    input_bytes=4096, microbatch_rows=4, link_latency=1e-4, link_bandwidth=1e9, swap_bandwidth=2e9, model="a model",
)  # fmt: skip

TINY = {
    "model": {"name": "gpt", "hidden_size": 16, "num_layers": 4, "num_heads": 2, "sequence_length": 8},
    "dataset": {"name": "synthetic", "batch_size": 8, "extra": {"vocab_size": 64, "num_examples": 32}},
    "training": {"num_microbatches": 4, "optimizer": "adamw"},
    "parallel": {"model_parallel_size": 2, "scheduler": "1f1b"},
    "launch": {"threads": 1},
}


@pytest.fixture
def here(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """``main`` in this process, in an empty directory that has a profile and a config."""
    monkeypatch.delenv("VPIPE_DEBUG", raising=False)
    monkeypatch.chdir(tmp_path)
    PROFILE.save("profile.json")
    Path("tiny.yaml").write_text(yaml.safe_dump(TINY))

    def call(*args: str) -> Answer:
        with pytest.raises(SystemExit) as end:
            main(list(args))
        out, err = capfd.readouterr()
        return Answer(end.value.code or 0, out, err)  # type: ignore[arg-type]

    return call


def test_a_plan_as_a_person_reads_it(here: Any) -> None:
    found = here("plan", "profile.json", "-p", "2", "-m", "8", "--memory", "90MiB", "--scheduler", "1f1b",
                 "--no-swap", "-o", "plan.json")  # fmt: skip
    assert found.code == 0, found.err
    for words in (
        "a model",
        "1f1b: 2 ranks, 8 microbatches of 4 rows",
        "MiB of 90.0 MiB (",
        "predicted step",
        "lower bound",
        "(exact)",
        "limited by memory",
        "run it: vpipe train CONFIG --scheduler 1f1b --nproc 2 --set parallel.partition=plan.json",
    ):
        assert words in found.out, words


def test_auto_ranks_the_schedules_that_fit(here: Any) -> None:
    found = here("plan", "profile.json", "-p", "4", "-m", "8")
    names = [line.split()[0] for line in found.out.partition("what fits, best first:")[2].splitlines()[1:] if line]
    assert {"1f1b", "gpipe", "zb-h1"} <= set(names)
    assert found.out.splitlines()[1].startswith(f"{names[0]}: 4 ranks")


def test_json_and_files(here: Any) -> None:
    asked = ("plan", "profile.json", "-p", "2", "-m", "8", "--memory", "90MiB,120MiB", "--scheduler", "1f1b")
    found = here(*asked, "--json", "-o", "plan.json", "--vpipe", "old.json")
    plan = found.json()
    assert plan == json.loads(Path("plan.json").read_text())
    assert {
        "format", "version", "schedule", "num_ranks", "stages_per_rank", "num_microbatches", "microbatch_rows",
        "replicas", "order", "asynchronous",
        "partition", "recompute", "swap", "step_time", "bubble", "stage_times", "stage_memory", "rank_memory", "memory",
        "objective", "lower_bound", "gap", "exact", "limit", "ranking",
    } == set(plan)  # fmt: skip
    assert plan["memory"] == [90 * MIB, 120 * MIB]
    assert sum(plan["partition"]) == 8
    assert set(json.loads(Path("old.json").read_text())) == {"partition", "recompute_ratio"}


def test_slower_ranks_get_less(here: Any) -> None:
    asked = ("plan", "profile.json", "-p", "2", "-m", "8", "--scheduler", "1f1b", "--json")
    slow = here(*asked, "--speeds", "0.5,1").json()["partition"]
    fast = here(*asked, "--speeds", "1,0.5").json()["partition"]
    assert slow[0] < fast[0]


def test_the_number_of_microbatches_may_be_free(here: Any) -> None:
    plan = here(
        "plan", "profile.json", "-p", "2", "-m", "free", "--batch", "32", "--scheduler", "1f1b", "--json"
    ).json()
    assert plan["num_microbatches"] * plan["microbatch_rows"] == 32
    assert {entry["schedule"] for entry in plan["ranking"]} == {f"1f1b m={m}" for m in (1, 2, 4, 8, 16, 32)}


def test_graph_text_is_planned_and_written_back(here: Any) -> None:
    from vpipe.compat.graph_text import export_graph

    Path("graph.txt").write_text(str(export_graph(PROFILE)))
    assert (
        sum(here("plan", "graph.txt", "-p", "3", "-m", "6", "--scheduler", "1f1b", "--json").json()["partition"]) == 8
    )


def test_what_fits_nowhere_is_an_answer(here: Any) -> None:
    found = here("plan", "profile.json", "-p", "2", "-m", "8", "--memory", "60MiB", "--scheduler", "1f1b", "--no-swap")
    assert found.code == 1
    assert "is short by" in found.err
    assert "bytes) of 60.0 MiB" in found.err
    assert "it would fit with 3 ranks" in found.err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("profile.json", "-p", "9", "-m", "4"), "9 stages, but the model has only 8 layers"),
        (("profile.json", "-p", "2", "-m", "4", "--memory", "4 gigs"), "memory is '4 gigs', which is no size"),
        (("profile.json", "-p", "2", "-m", "4", "--memory", "1GiB,1GiB,1GiB"), "given for 3 ranks, but there are 2"),
        (("profile.json", "-p", "2", "-m", "4", "--speeds", "1,0"), "more than zero on every rank"),
        (("profile.json", "-p", "2", "-m", "four"), "-m is 'four'; give a whole number"),
        (("profile.json", "-p", "2", "-m", "9" * 5000), f"-m is '{'9' * 40}'; give a whole number"),
        (("profile.json", "-p", "2", "-m", "free"), "add --batch N"),
        (("profile.json", "-p", "2", "-m", "3", "--batch", "32"), "32 rows cannot be cut into 3 equal microbatches"),
        (("profile.json", "-p", "2"), "add -m N"),
        (("profile.json", "-m", "4"), "add -p N"),
        (("profile.json", "-p", "2", "-m", "4", "-v", "2"), "-v goes with a named schedule"),
        (("profile.json", "-p", "2", "-m", "4", "--scheduler", "zb-h9"), "there is no schedule 'zb-h9'; did you mean 'zb-h"),
        (("profile.json", "-p", "2", "-m", "4", "--profile", "profile.json"), "--profile goes with a config"),
        (("profile.json", "-p", "2", "-m", "4", "--check"), "--check trains a few steps"),
        (("tiny.yaml", "--check", "--speeds", "1,1"), "leave --speeds or --check out"),
        (("profile.json", "-p", "2", "-m", "4", "-o", "no/plan.json"), "no/plan.json cannot be written: there is no directory no"),
        (("missing.json", "-p", "2", "-m", "4"), "make one with `vpipe profile CONFIG"),
        (("nan.json", "-p", "2", "-m", "4"), "nan.json: layers[1].forward is nan"),
        (("plan.json", "-p", "2", "-m", "4"), "not a profile"),
        (("cycle.txt", "-p", "2", "-m", "4"), "the graph has a cycle among a, b"),
        (("missing.txt", "-p", "2", "-m", "4"), "missing.txt: there is no such graph text"),
    ],
)  # fmt: skip
def test_bad_input_is_one_sentence(here: Any, arguments: tuple[str, ...], sentence: str) -> None:
    broken = PROFILE.to_json()
    broken["layers"][1]["forward"] = float("nan")
    Path("nan.json").write_text(json.dumps(broken))
    Path("plan.json").write_text('{"format": "vpipe-plan", "partition": [4, 4]}')
    node = "{} -- X() -- forward_compute_time=1, backward_compute_time=1, activation_size=1.0, parameter_size=1"
    Path("cycle.txt").write_text(f"{node.format('a')}\n{node.format('b')}\n\ta -- b\n\tb -- a\n")
    found = here("plan", *arguments)
    assert found.code == 2
    assert sentence in found.err
    assert found.err.count("\n") == 1
    assert not found.out


def test_the_profile_of_another_model_is_refused(here: Any) -> None:
    found = here("plan", "tiny.yaml", "--profile", "profile.json")
    assert found.code == 2
    assert "profile.json is a profile of 'a model', but tiny.yaml trains 'gpt of 6 layers" in found.err


@pytest.mark.slow
def test_profile_plan_check_and_run(here: Any, vpipe: Any) -> None:
    """The whole way on real ranks: measure, plan under a cap that forces a recompute, check, train equal to the bit."""
    found = vpipe("profile", "tiny.yaml", "-o", "real.json", "-o", "real.txt", "--repeat", "1")
    assert found.returncode == 0, found.stderr
    assert "1-4     block 0 (and 3 like it)" in found.stdout
    profile = load_profile("real.json")
    assert profile.microbatch_rows == 2
    assert profile.link_bandwidth
    assert profile.swap_bandwidth
    assert profile.shard_overhead > 0, "FSDP's own work is measured"
    assert profile.layers[-1].workspace_bytes >= 2 * 8 * 4 * 8, "the gradient of the logits, at least"
    assert all(cost.forward > 0 and cost.parameter_bytes > 0 for cost in profile.layers)
    assert profile.layers[1].boundary_bytes == 2 * 8 * 16 * 4, "rows x tokens x width x 4 bytes"

    common = ("--profile", "real.json", "--scheduler", "1f1b", "--no-swap")
    free = here("plan", "tiny.yaml", *common, "--json").json()
    cap = int(max(free["rank_memory"]) * 0.97)
    planned = vpipe("plan", "tiny.yaml", *common, "--memory", str(cap), "-o", "plan.json", "--check", "--json")
    assert planned.returncode == 0, planned.stderr
    plan = json.loads(planned.stdout)
    assert any(plan["recompute"]) or plan["partition"] != free["partition"]
    check = plan["check"]
    assert set(check) == {"steps", "step", "stages", "rank_memory", "rank_resident"}
    assert [set(pair) for pair in check["stages"]] == [{"predicted", "measured", "error"}] * 2
    assert all(pair["measured"] > 0 for pair in (check["step"], *check["stages"], *check["rank_memory"]))

    run = ("--set", "parallel.partition=plan.json", "--set", "parallel.transport=inprocess", "--steps", "2")
    assert here("parity", "tiny.yaml", *run, "--json").json()["equal"]


@pytest.mark.rotates(1)
@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize(("schedule", "ranks"), [("1f1b", 3), ("zb-h1", 3)])
def test_the_memory_of_a_plan_that_swaps_is_what_is_measured(here: Any, vpipe: Any, schedule: str, ranks: int) -> None:
    """What the lane brings back was counted and its end was not: a swapped gpipe plan was called three times as large
    as it was. The frees of the lane happen in its own thread, where the profiler that counts bytes does not look."""
    Path("wide.yaml").write_text(
        "model: {name: gpt, hidden_size: 64, num_layers: 6, num_heads: 4, sequence_length: 128, vocab_size: -1}\n"
        "dataset: {name: synthetic, batch_size: 32}\n"
        "training: {num_microbatches: 8}\n"
        "parallel: {model_parallel_size: 2, scheduler: gpipe}\nlaunch: {threads: 1}\n"
    )
    done = vpipe("profile", "wide.yaml", "-o", "wide.json", "--repeat", "1")
    assert done.returncode == 0, done.stderr
    for name, count in (("gpipe", 2), (schedule, ranks)):
        common = (
            "plan",
            "wide.yaml",
            "--profile",
            "wide.json",
            "--scheduler",
            name,
            "-p",
            str(count),
            "--no-recompute",
        )
        free = here(*common, "--json").json()["rank_memory"]
        caps = [str(int(max(free) * share)) for share in (0.6, 0.7, 0.75, 0.8, 0.85, 0.9)]
        cap = next(cap for cap in caps if '"swap": [[' in (out := here(*common, "--memory", cap, "--json").out)
                   and any(json.loads(out)["swap"]))  # fmt: skip
        done = vpipe(*common, "--memory", cap, "--check", "--json")
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)["check"]["rank_memory"]
        assert all(-0.1 < pair["error"] < 0.2 for pair in found), (name, found)  # a lane that lags holds less
        largest = free.index(max(free))
        assert name != "gpipe" or found[largest]["measured"] < 0.9 * free[largest], "what is out counted, before"


def test_a_plan_and_a_config_that_disagree(here: Any) -> None:
    """What the plan was made for is what runs, or nothing does."""
    plan = {"partition": [3, 3], "schedule": "1f1b", "num_ranks": 2, "num_microbatches": 4}
    Path("plan.json").write_text(json.dumps(plan))
    common = ("parity", "tiny.yaml", "--steps", "1", "--set", "parallel.transport=inprocess")
    planned = (*common, "--set", "parallel.partition=plan.json")
    assert here(*planned).code == 0
    for setting, sentence in (
        ("parallel.scheduler=gpipe", "is for parallel.scheduler 1f1b, but the config says gpipe"),
        ("training.num_microbatches=2", "is for training.num_microbatches 4, but the config says 2"),
        ("parallel.recompute=0.5", "remove parallel.recompute"),
        ("model.num_layers=5", "adds up to 6 layers, but the model has 7; plan this model anew"),
    ):
        found = here(*planned, "--set", setting)
        assert found.code == 2
        assert sentence in found.err


def test_a_plan_that_recomputes_and_swaps_is_equal_to_one_process(here: Any) -> None:
    plan = {"partition": [4, 2], "recompute": [[1], []], "swap": [[2, 3], [4]]}
    Path("plan.json").write_text(json.dumps(plan))
    for schedule in ("1f1b", "pipedream"):
        found = here("parity", "tiny.yaml", "--steps", "2", "--scheduler", schedule, "--json",
                     "--set", "parallel.transport=inprocess", "--set", "parallel.partition=plan.json")  # fmt: skip
        assert found.json()["equal"], found.err


def test_nothing_is_measured_for_a_file_that_cannot_be_written(here: Any) -> None:
    found = here("profile", "tiny.yaml", "-o", "no/profile.json")
    assert found.code == 2
    assert "no/profile.json cannot be written: there is no directory no" in found.err


def test_a_run_keeps_the_plan_it_follows(here: Any) -> None:
    from vpipe.config import load
    from vpipe.rundir.claim import take

    Path("plan.json").write_text('{"partition": [3, 3], "schedule": "1f1b", "num_ranks": 2}')
    config = load("tiny.yaml", ("parallel.partition=plan.json",)).config
    made = take(config, config.to_yaml(), Path("run")).directory
    assert (made / "plan.json").read_text() == Path("plan.json").read_text()
    config = load("tiny.yaml").config
    assert not (take(config, config.to_yaml(), Path("other")).directory / "plan.json").exists()


# ── the machine ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_replicas_are_the_commands_the_configs_or_the_planners(here: Any) -> None:
    common = ("-m", "8", "--scheduler", "1f1b", "--json")
    single = here("plan", "profile.json", "-p", "2", *common).json()
    double = here("plan", "profile.json", "-p", "2", "--replicas", "2", *common).json()
    assert (single["replicas"], double["replicas"]) == ([], [2, 2])
    assert len(double["rank_memory"]) == 4
    assert double["step_time"] > single["step_time"], "the reduction of gradients takes time"
    free = here("plan", "profile.json", "-p", "4", "--replicas", "auto", "-m", "8", "--json").json()
    assert len(free["rank_memory"]) == 4
    assert any("p=2x2" in each["schedule"] for each in free["ranking"])
    assert any("p=4 " in each["schedule"] for each in free["ranking"])


def test_a_configs_data_parallel_size_is_honoured(here: Any) -> None:
    config = TINY | {"parallel": TINY["parallel"] | {"data_parallel_size": 2}}
    Path("two.yaml").write_text(yaml.safe_dump(config))
    model = here("plan", "two.yaml", "--profile", "profile.json").err.partition("trains ")[2].split("; measure")[0]
    found = load_profile("profile.json")
    Path("own.json").write_text(
        json.dumps(found.to_json() | {"model": model.strip("'"), "layers": found.to_json()["layers"][:6]})
    )
    planned = here("plan", "two.yaml", "--profile", "own.json", "--scheduler", "1f1b", "-o", "plan.json")
    assert planned.code == 0, planned.err
    assert "2 replicas of each, 4 ranks in all" in planned.out
    assert "--nproc 4" in planned.out
    assert json.loads(Path("plan.json").read_text())["replicas"] == [2, 2]
    mixed = TINY | {"parallel": TINY["parallel"] | {"replicas": [2, 1]}}
    Path("mixed.yaml").write_text(yaml.safe_dump(mixed))
    alone = ("--profile", "own.json", "--scheduler", "1f1b", "-p", "2", "--replicas", "1", "-o", "one.json")
    assert "--set parallel.replicas=null" in here("plan", "mixed.yaml", *alone).out, "its own would be run"


def test_replicas_of_stages_and_asynchronous_schedules_are_marked(here: Any) -> None:
    found = here("plan", "profile.json", "-p", "2", "--replicas", "2,1", "-m", "4", "--scheduler", "pipedream")
    assert found.out.splitlines()[1].startswith(
        "pipedream (asynchronous: units read weights that are some updates old)"
    )
    assert "2 stages, 2 1 replicas, 3 ranks in all" in found.out
    ranked = here("plan", "profile.json", "-p", "2", "-m", "4", "--asynchronous").out
    assert "pipedream (asynchronous)" in ranked
    assert "1f1b" in ranked


def test_links_that_differ_and_the_order_of_ranks(here: Any) -> None:
    Path("links.json").write_text('{"bandwidth": [1e9, 2e6, 1e9], "latency": [0, 0.01, 0]}')
    common = ("profile.json", "-p", "4", "-m", "8", "--scheduler", "1f1b", "--json")
    slow = here("plan", *common, "--links", "links.json").json()
    assert slow["step_time"] > here("plan", *common).json()["step_time"]
    turned = here("plan", *common, "--speeds", "0.5,1,1,1", "--order", "free").json()
    given = here("plan", *common, "--speeds", "0.5,1,1,1").json()
    assert turned["step_time"] < given["step_time"]
    assert sorted(turned["order"]) == [0, 1, 2, 3]
    Path("links.json").write_text('{"bandwidth": [1e9]}')
    assert "must be a list of 3 numbers" in here("plan", *common, "--links", "links.json").err


def test_links_that_a_profile_has_measured(here: Any) -> None:
    """The first ranks' are taken for fewer ranks; more were not measured. The command line goes before the profile."""
    common = ("hosts.json", "-m", "8", "--scheduler", "1f1b", "--json")
    Path("links.json").write_text('{"bandwidth": [1e9, 2e6], "latency": [0, 0.01]}')
    asked = ("plan", "profile.json", *common[1:], "-p", "3")
    wanted = here(*asked, "--links", "links.json").json()
    links = links_from_json(json.loads(Path("links.json").read_text()), "links.json")
    replace(PROFILE, links=links).save("hosts.json")
    assert load_profile("hosts.json").links == links
    assert here("plan", *common, "-p", "3").json() == wanted
    assert here("plan", *common, "-p", "2").json()["step_time"] < wanted["step_time"]
    Path("links.json").write_text('{"bandwidth": [1e9, 1e9], "latency": [1e-4, 1e-4]}')
    assert here("plan", *common, "-p", "3", "--links", "links.json").json()["step_time"] < wanted["step_time"]
    more = here("plan", *common, "-p", "4")
    assert more.code == 2
    assert "links between 3 ranks, but the plan is for 4; measure with 4 ranks, or give --links" in more.err
    alone, fast = (
        here("plan", name, *common[1:], "-p", "3", "--against", "ddp").json()["against"][0]["step_time"]
        for name in ("hosts.json", "profile.json")
    )
    assert alone > fast, "data parallelism goes over the same links"


@pytest.mark.parametrize(
    ("links", "words"),
    [
        ([], "links are an object with 'latency'"),
        ({"latency": [[0, 1], [1]]}, "latency[1] must be a list of 2 numbers"),
        ({"latency": [1, 2], "bandwidth": [1]}, "latency is of 3 ranks, but bandwidth of 2"),
        ({"bandwidth": [[1, "fast"], [1, 1]]}, "has 'fast', which is no time or bandwidth"),
        ({"bandwidth": [[0, 0], [1, 0]]}, "the bandwidth from rank 0 to rank 1 is 0.0; it must be finite and positive"),
        ({"latency": "soon"}, "latency must be a list of 1 numbers"),
    ],
)  # fmt: skip
def test_links_of_a_profile_that_are_none(here: Any, links: object, words: str) -> None:
    Path("hosts.json").write_text(json.dumps(PROFILE.to_json() | {"links": links}))
    found = here("plan", "hosts.json", "-p", "2", "-m", "4", "--scheduler", "1f1b")
    assert found.code == 2
    assert words in found.err


def test_a_batch_of_any_size_is_divided_at_once(here: Any) -> None:
    """Every number up to the batch was tried as its divisor."""
    asked = ("plan", "profile.json", "-p", "2", "-m", "free", "--batch", "1000000007", "--scheduler", "1f1b", "--json")
    assert here(*asked).json()["num_microbatches"] == 1, "a prime; as many microbatches are too many to simulate"


def test_effort_and_time_limit(here: Any) -> None:
    common = ("profile.json", "-p", "4", "-m", "8", "--scheduler", "1f1b", "--json")
    plain = here("plan", *common).json()
    assert here("plan", *common, "--effort", "10").json()["step_time"] <= plain["step_time"]
    assert here("plan", *common, "--time-limit", "0.01").json()["step_time"] >= plain["step_time"]


# ── bad input ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"\xff\xfe{}", "not JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"version": 7, "layers": []}', "a profile of version 7, but this vpipe reads version 1"),
        (b'{"layers": [{"name": "a", "forward": 1e308}]}', "layers[0].forward is 1e+308"),
        (b'{"layers": [{"name": "a", "forward": ' + b"9" * 400 + b"}]}", "layers[0].forward is 999"),
        (b'{"layers": [{"name": "a", "forward": ' + b"9" * 5000 + b"}]}", "not JSON"),
        (b'{"input_bytes": 1e308, "layers": [{"name": "a", "forward": 1, "input_grad": 1, "weight_grad": 1, '
         b'"saved_bytes": 1, "boundary_bytes": 1}]}', "input_bytes is 1e+308"),
    ],
)  # fmt: skip
def test_bad_profiles_are_one_sentence(here: Any, text: bytes, words: str) -> None:
    Path("bad.json").write_bytes(text)
    found = here("plan", "bad.json", "-p", "2", "-m", "4")
    assert found.code == 2
    assert words in found.err
    assert "bad.json" in found.err
    assert len(found.err.strip().splitlines()) == 1
    assert len(found.err) < 400


def test_a_directory_is_no_profile_and_the_input_is_not_overwritten(here: Any) -> None:
    for name in ("folder.json", "folder.txt"):
        Path(name).mkdir()
        found = here("plan", name, "-p", "2", "-m", "4")
        assert (found.code, "cannot be read" in found.err) == (2, True), found.err
    before = Path("profile.json").read_bytes()
    found = here("plan", "profile.json", "-p", "2", "-m", "4", "-o", "./profile.json")
    assert found.code == 2
    assert "writing there would destroy it" in found.err
    assert Path("profile.json").read_bytes() == before
    assert "would destroy" in here("profile", "tiny.yaml", "-o", "tiny.yaml").err


@pytest.mark.parametrize(
    "arguments",
    [
        ("-m", "1" + "0" * 400),
        ("-p", "1000000000"),
        ("--memory", "9" * 400),
        ("--speeds", "inf,1"),
        ("--effort", "nan"),
    ],
)
def test_numbers_beyond_reason_are_refused(here: Any, arguments: tuple[str, str]) -> None:
    asked = {"-p": "2", "-m": "4", "--scheduler": "1f1b"} | dict([arguments])
    found = here("plan", "profile.json", *(word for pair in asked.items() for word in pair))
    assert found.code == 2, found.out
    assert "Traceback" not in found.err
