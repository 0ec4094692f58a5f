"""Bad configs: every mistake at once, in words, with the line and the nearest key; never a traceback of ours."""

from __future__ import annotations

from pathlib import Path

import pytest

from vpipe.cli.main import main
from vpipe.config import ConfigError, PipelineConfig, load
from vpipe.errors import UserError

GOOD = "model: {name: gpt}\ndataset: {name: text}\n"


def problems(tmp_path: Path, text: str, *overrides: str, **options: object) -> str:
    file = tmp_path / "job.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(UserError) as caught:
        load(file, overrides, **options)  # type: ignore[arg-type]
    return str(caught.value).replace(str(tmp_path), "")


def test_all_mistakes_are_told_at_once_with_their_lines(tmp_path: Path) -> None:
    text = """\
model:
  name: gpt
  hiden_size: 64
  num_layers: "4"
dataset: {name: text, batch_size: 2}
training:
  precision: bf61
  exit_after_profile: no
  batch_size: 3
  learning_rate_steps: [0.9, x]
parallel: {partition: [1, 2.5], replicas: [1, 2, 3]}
observ: {trace: true}
"""
    expected = """\
11 problems in the config:
  --set foo is not section.key=value, such as training.epochs=1
  --set training.seed=-1: training.seed is -1 but must be a whole number, at least 0
  /job.yaml, line 3: model.hiden_size is an unknown key; did you mean 'hidden_size'?
  /job.yaml, line 4: model.num_layers is '4' but must be a whole number, at least 1, at most 16384, or null
  /job.yaml, line 5: dataset.batch_size is 2, which cannot be cut into training.num_microbatches = 4 units; raise it, \
or lower num_microbatches
  /job.yaml, line 7: training.precision is 'bf61' but must be one of fp32, bf16, fp16; did you mean 'bf16'?
  /job.yaml, line 8: training.exit_after_profile is 'no' but must be true or false (YAML's yes and no are not read)
  /job.yaml, line 9: training.batch_size is an unknown key; did you mean dataset.batch_size?
  /job.yaml, line 10: training.learning_rate_steps[1] is 'x', but training.learning_rate_steps must be a list of rising \
numbers above 0: below 1 a share of all updates, else updates
  /job.yaml, line 11: parallel.partition is [1, 2.5] but must be auto, a list with the number of blocks of each stage, \
or the path of a plan
  /job.yaml, line 11: parallel.replicas has 3 entries, but model_parallel_size is 4; give one per stage
  /job.yaml, line 12: observ is an unknown key; did you mean 'observe'?"""
    told = problems(tmp_path, text, "training.seed=-1", "foo")
    assert told == expected.replace("11 problems", "12 problems")


def test_one_mistake_is_one_sentence(tmp_path: Path) -> None:
    told = problems(tmp_path, GOOD + "training:\n  learning_rate: fast\n")
    assert told == "/job.yaml, line 4: training.learning_rate is 'fast' but must be a number, more than 0"


def test_a_learning_rate_in_quotes_is_a_string_and_refused(tmp_path: Path) -> None:
    assert "is '1e-4' but must be a number" in problems(tmp_path, GOOD + "training: {learning_rate: '1e-4'}")


def test_missing_names_say_what_they_are(tmp_path: Path) -> None:
    told = problems(tmp_path, "training: {epochs: 1}")
    assert "model is missing; add it: What is trained" in told
    assert "dataset is missing" in told
    assert "model.name is missing; add it: Which model" in problems(tmp_path, "model: {}\ndataset: {name: text}")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "model is missing"),
        ("- a\n- b\n", "holds ['a', 'b'] instead of sections"),
        ("just words", "holds 'just words' instead of sections"),
        ("model: [1", "this is not YAML"),
        ("model:\n\t- x", "line 2: this is not YAML"),
        ("model: {name: gpt}\nmodel: {name: bert}\n", "line 2: model is given twice: {'name': 'gpt'} on line 1 and"),
        ("model: {name: gpt}\n---\nmodel: {}\n", "line 2: a second document"),
        ("model: &a {name: gpt}\ndataset: *a\n", "line 2: dataset uses the alias *a"),
        ("model: {<<: {name: gpt}}\n", "model.<< merge keys are not read"),
        ("model: !!python/object/apply:os.system [ls]\n", "line 1: model carries the tag"),
        ("model: {name: !!str gpt}\n", "model.name carries the tag"),
        ("? [a, b]\n: c\n", "as a key; a key is a word"),
        ("training: {epochs: 010}\n", "training.epochs is 010, which is octal for some readers"),
        ("a: " + "[" * 40 + "]" * 40, "nested deeper than 32 levels"),
        ("a: " + "[" * 5000, "nested deeper than 32 levels"),
        ("model: \x01", "this is not YAML"),
        (GOOD + "training: {epochs: " + "9" * 5000 + "}", "training.epochs is '9999"),
        (GOOD + "training: {epochs: " + "9" * 200 + "}", "training.epochs is 9999"),
        (GOOD + "training: {learning_rate: " + "9" * 299 + "}", "training.learning_rate is 9999"),
        (GOOD + "training: {learning_rate: .nan}", "training.learning_rate is nan but must be a number"),
        (GOOD + "training: {learning_rate: 1e999}", "training.learning_rate is inf but must be a number"),
        (GOOD + "training: {learning_rate: true}", "training.learning_rate is true but must be a number"),
        (GOOD + "training: {epochs: 2.5}", "training.epochs is 2.5 but must be a whole number"),
        (GOOD + "training: {epochs: null}", "training.epochs is null but must be a whole number"),
        (GOOD + "training: 3", "training is 3 but must be a mapping of keys"),
        (GOOD + "training: null", "training is null but must be a mapping of keys"),
        (
            GOOD + "launch: {slurm: {options: {partition: '-x; rm'}}}",
            "launch.slurm.options is '-x; rm' but must be a mapping",
        ),
        (GOOD + "launch: {machines: ['-oProxyCommand=x:0']}", "launch.machines[0] is '-oProxyCommand=x:0', but"),
        (GOOD + "parallel: {timeout: 0}", "parallel.timeout is 0 but must be a number, more than 0"),
        (GOOD + "parallel: {partition: nowhere.json}", "nowhere.json does not exist"),
        (GOOD + "model: {vocab_size: 0}", "given twice"),
    ],
)
def test_bad_text(tmp_path: Path, text: str, said: str) -> None:
    told = problems(tmp_path, text)
    assert said in told
    assert len(told) < 2000


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("parallel: {replicas: [1, 2, 1, 1], data_parallel_size: 4}", "but data_parallel_size is 4; give one"),
        (
            "parallel: {scheduler: pipedream, schedule_options: {depths: [1, 0, 0]}}",
            "parallel.schedule_options.depths has 3 entries, but model_parallel_size is 4; give one per stage",
        ),
        (
            "parallel: {partition: [1, 2, 3, 4], recompute: [0, 0, 0, 0, 0, 0, 0, 0]}",
            "disagree on the number of stages",
        ),
        ("parallel: {stages_per_rank: 2, partition: [1, 2, 3, 4]}", "has 4 entries, but there are 8 stages"),
        ("parallel: {recompute: 0.6, swap: [0.5, 0, 0, 0]}", "more than all of its blocks"),
        ("training: {max_iterations: 0}", "must be -1 (no limit) or at least 1"),
        ("training: {evaluation_batches: 0}", "evaluation_interval: -1 turns evaluation off"),
        ("training: {learning_rate_policy: step}", "learning_rate_steps is empty"),
        ("training: {learning_rate_policy: step, learning_rate_steps: [5, 2]}", "must rise and begin above 0"),
        ("training: {minimum_learning_rate: 1}", "above learning_rate = 0.0001"),
        ("launch: {machines: ['a:0', 'b:0']}", "lists 2 machines, but the pipeline has 4 ranks"),
        ("launch: {container: {kind: docker}}", "launch.container.image is null, but kind is docker"),
        ("launch: {container: {image: x.sif}}", "choose apptainer"),
    ],
)
def test_rules_between_fields(tmp_path: Path, text: str, said: str) -> None:
    assert said in problems(tmp_path, GOOD + text)


def test_huggingface_and_its_keys_go_together(tmp_path: Path) -> None:
    data = "\ndataset: {name: text}"
    assert "model.config is null, but name: huggingface needs it" in problems(
        tmp_path, "model: {name: huggingface}" + data
    )
    told = problems(tmp_path, "model: {name: gpt, config: {a: 1}, directory: x}" + data)
    assert "model.config is only read with name: huggingface, not with 'gpt'" in told
    assert "model.directory is only read with name: huggingface" in told


def test_a_bert_partition_must_add_up(tmp_path: Path) -> None:
    text = "model: {name: bert, num_layers: 24}\ndataset: {name: bert}\nparallel: {partition: [12, 13, 13, 12]}"
    told = problems(tmp_path, text)
    assert told.endswith("adds up to 50 blocks, but a BERT of 24 layers has 2 x 24 + 1 = 49; change one of the two")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        load(tmp_path / "none.yaml")
    with pytest.raises(UserError, match="is a directory"):
        load(tmp_path)
    with pytest.raises(UserError, match="cannot be read"):
        load("a\0b")
    (tmp_path / "big.yaml").write_bytes(b"#" * 1_000_001)
    with pytest.raises(UserError, match="larger than 1,000,000 bytes"):
        load(tmp_path / "big.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"model: \xe9")
    with pytest.raises(UserError, match="is not UTF-8 text"):
        load(tmp_path / "latin.yaml")


def test_names_are_checked_where_the_caller_knows_them(tmp_path: Path) -> None:
    known = {"parallel.scheduler": ["gpipe", "1f1b", "async_threaded"]}
    told = problems(tmp_path, GOOD + "parallel: {scheduler: 1f1}", names=known)
    assert told.endswith("parallel.scheduler is '1f1', which is not known; did you mean '1f1b'?")
    load(tmp_path / "job.yaml", scheduler="GPipe", names=known)


@pytest.mark.parametrize(
    "values",
    [
        None, 3, [], {1: 2}, {"model": {1: 2}}, {"model": {"name": "\ud800"}}, {"model": {"name": object()}},
        {"model": {"name": "gpt", "extra": {"f": object()}}, "dataset": {"name": "text"}},
        {"model": {"name": "gpt", "extra": {"f": float("nan")}}, "dataset": {"name": "text"}},
        {"model": {"name": "gpt"}, "dataset": {"name": "text"}, "training": {"learning_rate": 10**400}},
        {"model": {"name": "gpt"}, "dataset": {"name": "text"}, "training": {"epochs": 10**5000}},
    ],
)  # fmt: skip
def test_from_dict_refuses_what_is_no_config(values: object) -> None:
    with pytest.raises(ConfigError):
        PipelineConfig.from_dict(values)  # type: ignore[arg-type]


def test_a_key_that_hides_control_characters_is_escaped(tmp_path: Path) -> None:
    told = problems(tmp_path, GOOD + '"\\e[31mred": 1')
    assert "\x1b" not in told


def test_the_command_line_keeps_a_line_for_each_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "typo.yaml"
    file.write_text("model: {name: gpt, num_layer: 2}\ndataset: {name: synthetic}\nparallel: {scheduler: 1f2b}\n")
    with pytest.raises(SystemExit) as end:
        main(["train", str(file)])
    assert end.value.code == 2
    assert capsys.readouterr().err.splitlines() == [
        f"vpipe: 2 problems in {file}:",
        "  line 1: model.num_layer is an unknown key; did you mean 'num_layers'?",
        "  line 3: parallel.scheduler is '1f2b', which is not known; did you mean '1f1b'?",
    ]
