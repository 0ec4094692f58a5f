"""VPipe's files: the plans and maps of its documents load through the same call, and nothing is lost in silence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vpipe.config import Loaded, load
from vpipe.config.document import read_json
from vpipe.config.problems import ConfigError
from vpipe.errors import UserError

FLAT: dict[str, Any] = {
    "directory": "bert",
    "module": "vgpus=4",
    "partition": "vgpus=4/vpipe.json",
    "config_file": "vgpus=4/mp_conf.json",
    "machines": ["localhost:0", "localhost:1", "localhost:2", "localhost:3"],
    "sync_mode": "asp",
    "distributed_backend": "gloo",
    "model_type": "bert",
    "data_dir": "data",
    "log_directory": "output",
    "batch_size": 16,
    "learning_rate": 0.03,
    "epochs": 2,
}
PLAN = {"partition": [12, 13, 13, 11], "recompute_ratio": [0.3, 0, 0, 0]}
RANKS: dict[str, Any] = {
    "module_to_stage_map": [0, 1, 2, 3, 3],
    "stage_to_rank_map": {"0": [0], "1": [1], "2": [2], "3": [3]},
}


def written(
    tmp_path: Path, changes: dict[str, Any] | None = None, plan: Any = None, ranks: Any = None, place: str = "."
) -> Path:
    folder = tmp_path / place / "vgpus=4"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vpipe.json").write_text(json.dumps(PLAN if plan is None else plan))
    (folder / "mp_conf.json").write_text(json.dumps(RANKS if ranks is None else ranks))
    flat = {key: value for key, value in {**FLAT, **(changes or {})}.items() if value is not ...}
    lines = [f"'{key}': {json.dumps(value)}" for key, value in flat.items()]
    (tmp_path / "configs").mkdir(exist_ok=True)
    file = tmp_path / "configs" / "job.yml" if place == "bert" else tmp_path / "job.yml"
    file.write_text("\n".join(lines) + "\n")
    return file


def told(tmp_path: Path, changes: dict[str, Any] | None = None, plan: Any = None, ranks: Any = None) -> str:
    with pytest.raises(UserError) as caught:
        load(written(tmp_path, changes, plan, ranks))
    return str(caught.value).replace(str(tmp_path), "")


def test_vpipes_file_becomes_our_sections(tmp_path: Path) -> None:
    loaded: Loaded = load(written(tmp_path))
    config = loaded.config
    assert (config.model.name, config.model.num_layers, config.model.hidden_size) == ("bert", 24, 1024)
    assert (config.dataset.name, config.dataset.path) == ("bert", str(tmp_path / "data"))
    assert (config.dataset.batch_size, config.training.num_microbatches) == (16 * 32, 32)
    assert (config.training.optimizer, config.training.learning_rate, config.training.epochs) == ("lamb", 0.03, 2)
    assert (config.parallel.scheduler, config.parallel.backend) == ("pipedream", "gloo")
    assert (config.parallel.partition, config.parallel.recompute) == ((12, 13, 13, 11), (0.3, 0, 0, 0))
    assert config.launch.machines == tuple(FLAT["machines"])
    assert config.observe.directory == "output"
    assert [warning.split(": ")[1].split()[0] for warning in loaded.warnings] == ["directory", "module"]


def test_the_json_files_are_found_where_vpipes_tree_has_them(tmp_path: Path) -> None:
    config = load(written(tmp_path, place="bert")).config
    assert config.parallel.partition == (12, 13, 13, 11)


def test_bsp_is_gpipe_with_32_units_unless_told(tmp_path: Path) -> None:
    config = load(written(tmp_path, {"sync_mode": "bsp"})).config
    assert (config.parallel.scheduler, config.training.num_microbatches, config.dataset.batch_size) == (
        "gpipe",
        32,
        512,
    )
    config = load(written(tmp_path, {"sync_mode": "bsp", "num_microbatches": 4})).config
    assert (config.training.num_microbatches, config.dataset.batch_size) == (4, 64)


def test_frequencies_in_units_become_iterations(tmp_path: Path) -> None:
    observe = load(written(tmp_path, {"print_frequency": 100, "verbose_frequency": 0})).config.observe
    assert (observe.log_interval, observe.verbose_interval) == (3, 0)
    assert load(written(tmp_path, {"print_frequency": 1})).config.observe.log_interval == 1


def test_macrobatch_is_2bw(tmp_path: Path) -> None:
    config = load(written(tmp_path, {"macrobatch": True})).config
    assert (config.parallel.scheduler, config.training.num_microbatches) == ("pipedream-2bw", 4)
    assert config.dataset.batch_size == 64


@pytest.mark.parametrize(
    ("plan", "layers"),
    [
        ({"partition": [13, 13, 13, 10], "recompute_ratio": [1, 1, 1, 1]}, 24),
        ({"partition": [13, 13, 13, 10], "recompute_ratio": [0, 0, 0, 0]}, 24),
        ({"partition": [13, 13, 13, 10]}, 24),
    ],
)
def test_the_plans_of_the_documents(tmp_path: Path, plan: Any, layers: int) -> None:
    config = load(written(tmp_path, plan=plan)).config
    assert config.model.num_layers == layers
    assert config.parallel.recompute == (tuple(plan["recompute_ratio"]) if "recompute_ratio" in plan else 0)


def test_bert_48_on_8_stages(tmp_path: Path) -> None:
    plan = {"partition": [11, 11, 12, 12, 13, 13, 14, 11], "recompute_ratio": [1, 0.85, 0.8, 0.6, 0.5, 0.2, 0, 0]}
    ranks = {"module_to_stage_map": [*range(8), 7]}
    machines = [f"host{i // 4}:{i % 4}" for i in range(8)]
    config = load(written(tmp_path, {"machines": machines}, plan, ranks)).config
    assert (config.model.num_layers, config.parallel.model_parallel_size) == (48, 8)


def test_replicas_depths_and_machines_follow_the_rank_map(tmp_path: Path) -> None:
    ranks = {
        "module_to_stage_map": [0, 1, 2, 3, 3],
        "stage_to_rank_map": {"0": [0, 4], "1": [1], "2": [2], "3": [3]},
        "stage_to_depth_map": {"0": 3, "1": 2, "2": 1, "3": 0},
    }
    config = load(written(tmp_path, {"machines": ["a:0", "b:0", "c:0", "d:0", "e:0"]}, ranks=ranks)).config
    assert config.parallel.replicas == (2, 1, 1, 1)
    assert config.parallel.schedule_options == {"depths": [3, 2, 1, 0]}
    assert config.launch.machines == ("a:0", "e:0", "b:0", "c:0", "d:0"), "our ranks are numbered stage by stage"
    assert config.num_ranks == 5
    assert config.training.num_microbatches == 32, "whole rounds of two"


def test_tensor_parallel_groups_become_one_rank_each_with_a_warning(tmp_path: Path) -> None:
    ranks = {
        "module_to_stage_map": [0, 1, 1],
        "stage_to_rank_map": {"0": [0, 2], "1": [4, 6]},
        "mp_size": 2,
    }
    changes = {"machines": [f"a:{i}" for i in range(8)]}
    loaded = load(written(tmp_path, changes, {"partition": [5, 4]}, ranks))
    assert loaded.config.parallel.replicas == (2, 2)
    assert loaded.config.launch.machines == ("a:0", "a:2", "a:4", "a:6")
    assert any("mp_size 2" in warning for warning in loaded.warnings)


def test_every_key_that_lost_its_meaning_is_warned_about(tmp_path: Path) -> None:
    changes = {
        "compress_activations": False,
        "compress_in_gpu": True,
        "lr_warmup": True,
        "learning_rate_policy": "step",
    }
    warnings = " ".join(load(written(tmp_path, changes)).warnings)
    for word in ("directory", "module", "compress_activations", "compress_in_gpu", "lr_warmup", "learning_rate_policy"):
        assert word in warnings
    assert "line 14" in warnings


def test_step_policy_divides_every_thirty_epochs(tmp_path: Path) -> None:
    config = load(written(tmp_path, {"learning_rate_policy": "step", "epochs": 90})).config
    assert config.training.learning_rate_steps == (30 / 90, 60 / 90)


def test_no_input_pipelining_keeps_one_unit_in_flight(tmp_path: Path) -> None:
    found = load(written(tmp_path, {"no_input_pipelining": True})).config
    assert found.parallel.schedule_options == {"depths": [0, 0, 0, 0]}


def test_container_and_synthetic_data(tmp_path: Path) -> None:
    config = load(written(tmp_path, {"container": "bert", "synthetic_data": True})).config
    assert (config.launch.container.kind, config.launch.container.image) == ("docker", "bert")
    assert (config.dataset.name, config.dataset.path) == ("synthetic", None)
    assert config.dataset.extra == {"kind": "bert", "vocab_size": 30522}
    config = load(written(tmp_path, {"container": "vpipe.sif"})).config
    assert (config.launch.container.kind, config.launch.container.image) == ("apptainer", str(tmp_path / "vpipe.sif"))


@pytest.mark.parametrize(("model_type", "module", "name"), [
    ("translation", "x", "translation"), ("gpt", "medium_4", "cpm-medium"), ("gpt", "large_4", "cpm-large"),
])  # fmt: skip
def test_the_other_families(tmp_path: Path, model_type: str, module: str, name: str) -> None:
    changes = {"model_type": model_type, "module": module, "partition": ..., "config_file": ...}
    config = load(written(tmp_path, changes)).config
    assert config.model.name == name
    assert config.parallel.model_parallel_size == 4, "one stage per machine"


def test_directory_and_module_are_never_imported(tmp_path: Path) -> None:
    (tmp_path / "bert.py").write_text("raise SystemExit('imported')")
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert" / "__init__.py").write_text("raise SystemExit('imported')")
    load(written(tmp_path, {"directory": "bert", "module": "bert"}))


def test_overrides_speak_our_names(tmp_path: Path) -> None:
    config = load(written(tmp_path), ["training.learning_rate=1e-3"], scheduler="1f1b").config
    assert (config.training.learning_rate, config.parallel.scheduler) == (1e-3, "1f1b")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"learning_rate": "fast"}, "line 12: learning_rate is 'fast' but must be a number, more than 0"),
        ({"batch_size": "16"}, "line 11: batch_size is '16' but must be a whole number"),
        ({"batch_size": ...}, "batch_size is missing: the size of one unit"),
        ({"model_type": "image_classification"}, "is 'image_classification' but must be one of bert"),
        ({"model_type": ..., "directory": "code"}, "model_type is missing but must be one of bert, translation, gpt"),
        ({"sync_mode": "bps"}, "line 6: sync_mode is 'bps' but must be asp or bsp; did you mean 'bsp'?"),
        ({"machine": ["a:0"]}, "machine is an unknown key of a VPipe file; did you mean 'machines'?"),
        ({"machines": ["a:0"]}, "machines lists 1 machines, but the pipeline has 4 ranks"),
        ({"partition": "none.json"}, "/none.json does not exist"),
        ({"partition": 3}, "partition is 3 but must be the path of a JSON file"),
        ({"macrobatch": "yes"}, "macrobatch is 'yes' but must be true or false"),
        ({"num_layers": 12}, "adds up to 49 blocks, but a BERT of 12 layers has 2 x 12 + 1 = 25"),
        ({"distributed_backend": "mpi"}, "distributed_backend is 'mpi' but must be one of auto, gloo, nccl"),
        ({"container": "-v/:/x"}, "container is '-v/:/x' but must be an image name"),
    ],
)
def test_mistakes_are_told_under_the_files_own_keys(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    assert said in told(tmp_path, changes)


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ([1, 2], "instead of a plan"),
        ({}, 'has no "partition"'),
        ({"partition": [1, -2]}, "partition is [1, -2] but must be a list of whole numbers"),
        ({"partition": [12, 13, 13, 11], "recompute_ratio": [0.5]}, "has 1 entries, but partition has 4"),
        ({"partition": [12, 13, 13, 11], "recompute_ratio": [0, 0, 0, 2]}, "a list of numbers from 0 to 1"),
        ({"partition": [12, 13, 13, 12]}, "adds up to 50 blocks, but a BERT of N layers has 2N + 1, an odd number"),
        ({"partition": [25, 24]}, "partition describes 2 stages and config_file describes 4 stages"),
    ],
)
def test_bad_plans(tmp_path: Path, plan: Any, said: str) -> None:
    assert said in told(tmp_path, plan=plan)


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ([], "instead of"),
        ({}, "module_to_stage_map is null but must list the stage of every module"),
        ({"module_to_stage_map": [0, 1, 1, 2, 2]}, "must be [0, 1, 2, 3, 3]: one module per stage, then the loss"),
        ({**RANKS, "stage_to_rank_map": {"0": [0]}}, "must give a list of ranks for each of the stages 0 to 3"),
        ({**RANKS, "stage_to_rank_map": {"0": [0], "1": [0], "2": [1], "3": [2]}}, "each of the ranks 0 to 3 once"),
        ({**RANKS, "stage_to_depth_map": {"0": 0, "1": 2, "2": 4, "3": 6}}, "the first stage runs ahead the furthest"),
        ({**RANKS, "mp_size": 0}, "mp_size is 0 but must be a whole number"),
        ({**RANKS, "stage_to_rank_mp": {}}, "stage_to_rank_mp is an unknown key; did you mean 'stage_to_rank_map'?"),
    ],
)
def test_bad_rank_maps(tmp_path: Path, ranks: Any, said: str) -> None:
    assert said in told(tmp_path, ranks=ranks)


def test_broken_json_is_told_with_its_line(tmp_path: Path) -> None:
    file = written(tmp_path)
    (tmp_path / "vgpus=4" / "vpipe.json").write_text('{"partition": [1,\n 2}')
    (tmp_path / "vgpus=4" / "mp_conf.json").write_text('{"mp_size": 1, "mp_size": 2}')
    with pytest.raises(UserError) as caught:
        load(file)
    assert "vpipe.json, line 2: this is not JSON" in str(caught.value)
    assert "mp_conf.json the key mp_size is given twice" in str(caught.value)


PRINTED = """\
directory: 'bert'                    # the model's code
module: 'vgpus=4'
partition: 'vgpus=4/vpipe.json'
config_file: 'vgpus=4/mp_conf.json'

machines: ['localhost:0', 'localhost:1', 'localhost:2', 'localhost:3']

sync_mode: 'asp'
distributed_backend: 'gloo'

batch_size: 16
learning_rate: 0.03
epochs: 2
"""
"""As the learning guide prints it: without model_type."""


def printed(folder: Path, plan: str, ranks: str = "", yaml: str = PRINTED) -> Path:
    (folder / "vgpus=4").mkdir()
    (folder / "vgpus=4" / "vpipe.json").write_text(plan)
    falling = '{"module_to_stage_map": [0, 1, 2, 3, 3], "stage_to_depth_map": {"0": 3, "1": 2, "2": 1, "3": 0}}'
    (folder / "vgpus=4" / "mp_conf.json").write_text(ranks or falling)
    (folder / "old.yml").write_text(yaml)
    return folder / "old.yml"


def test_the_printed_file_loads_with_the_printed_plan(tmp_path: Path) -> None:
    plan = """{
    "partition": [12, 13, 13, 11],      // layers of each stage
    "recompute_ratio": [0.3, 0, 0, 0]   // what is recomputed: "//" in a string stays
}"""
    config = load(printed(tmp_path, plan)).config
    assert (config.model.name, config.model.num_layers, config.dataset.name) == ("bert", 24, "bert")
    assert config.parallel.partition == (12, 13, 13, 11)
    assert config.parallel.recompute == (0.3, 0.0, 0.0, 0.0)


def test_a_plan_of_ratios_alone_leaves_the_cut_open(tmp_path: Path) -> None:
    config = load(printed(tmp_path, '{"recompute_ratio": [0.5, 0, 0, 0]}  // half of it\n')).config
    assert config.parallel.partition == "auto"
    assert config.parallel.recompute == (0.5, 0.0, 0.0, 0.0)
    assert config.parallel.model_parallel_size == 4


def test_a_slash_in_a_string_is_no_comment(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"a//b": "c//d", // e\n "f": "\\"//"}')
    assert read_json(tmp_path / "a.json") == {"a//b": "c//d", "f": '"//'}


def test_a_refused_depth_map_is_the_only_problem(tmp_path: Path) -> None:
    """Its replicas are not known then, so that the number of machines cannot be wrong."""
    ranks = (
        '{"module_to_stage_map": [0, 1, 2, 3, 3], "stage_to_rank_map": {"0": [0, 1], "1": [2], "2": [3], "3": [4]}, '
        '"stage_to_depth_map": {"0": 0, "1": 2, "2": 4, "3": 6}}'
    )
    five = PRINTED.replace("'localhost:3']", "'localhost:3', 'localhost:4']")
    with pytest.raises(ConfigError) as caught:
        load(printed(tmp_path, '{"partition": [12, 13, 13, 11]}', ranks, five))
    assert len(caught.value.problems) == 1
    assert "must fall from stage to stage" in str(caught.value)
