"""What helps while one types: completion in the shell, the schema in an editor."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from click.shell_completion import ShellComplete

from vpipe.cli.main import cli, main
from vpipe.config.document import read_yaml

ROOT = Path(__file__).parents[2]
OWN = sorted((ROOT / "configs").glob("*.yaml"))


def offered(*words: str) -> list[str]:
    """What TAB offers at the end of ``vpipe words…``; the last is what is typed so far."""
    asked = ShellComplete(cli, {}, "vpipe", "_VPIPE_COMPLETE")
    return [item.value for item in asked.get_completions(list(words[:-1]), words[-1])]


def test_commands_and_options() -> None:
    assert offered("dr") == ["draw"]
    assert "--scheduler" in offered("train", "--sch")


@pytest.mark.parametrize("command", ["train", "parity", "plan", "submit"])
def test_schedules(command: str) -> None:
    assert offered(command, "job.yaml", "--scheduler", "zb-h") == ["zb-h1", "zb-h2"]


def test_schedules_elsewhere() -> None:
    assert offered("draw", "zb-h") == ["zb-h1", "zb-h2"]
    assert offered("compare", "job.yaml", "--schedulers", "gpipe,zb-h") == ["gpipe,zb-h1", "gpipe,zb-h2"]


@pytest.mark.parametrize("command", ["train", "parity", "plan", "profile", "compare", "submit"])
def test_keys(command: str) -> None:
    assert offered(command, "job.yaml", "--set", "training.epo") == ["training.epochs="]
    assert "launch.container.kind=" in offered(command, "job.yaml", "--set", "launch.")


def test_names_of_a_key() -> None:
    assert offered("train", "job.yaml", "--set", "parallel.scheduler=zb-h") == [
        "parallel.scheduler=zb-h1",
        "parallel.scheduler=zb-h2",
    ]
    assert "model.name=gpt" in offered("train", "job.yaml", "--set", "model.name=g")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_lines_of_the_documentation(vpipe: Any, shell: str) -> None:
    assert f"_VPIPE_COMPLETE={shell}_source vpipe" in (ROOT / "docs" / "training.md").read_text()
    done = vpipe(_VPIPE_COMPLETE=f"{shell}_source")
    assert done.returncode == 0, done.stderr
    assert "_VPIPE_COMPLETE" in done.stdout


@pytest.fixture
def schema(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """As ``vpipe init --schema`` writes it."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        main(["init", "--schema"])
    assert not end.value.code
    assert "# yaml-language-server: $schema=vpipe.schema.json" in capsys.readouterr().out
    return json.loads((tmp_path / "vpipe.schema.json").read_text())


def test_the_schema_accepts_every_config_of_our_form(schema: Any) -> None:
    checker = jsonschema.Draft202012Validator(schema)
    checker.check_schema(schema)
    wrong = {file.name: [e.message for e in checker.iter_errors(read_yaml(file).value)] for file in OWN}
    assert {name: errors for name, errors in wrong.items() if errors} == {}
    assert len(wrong) > 10


@pytest.mark.parametrize(
    ("section", "key", "value"), [("training", "epochz", 1), ("training", "epochs", "many"), ("nonsense", "key", 1)]
)
def test_the_schema_refuses(schema: Any, section: str, key: str, value: object) -> None:
    values = copy.deepcopy(read_yaml(ROOT / "configs" / "default.yaml").value)
    values.setdefault(section, {})[key] = value
    assert not jsonschema.Draft202012Validator(schema).is_valid(values)


def test_a_schema_has_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["init", str(tmp_path / "x.json"), "--schema", "--huggingface", "llama"])
    assert end.value.code == 2
    assert "leave the model out" in capsys.readouterr().err
    assert not (tmp_path / "x.json").exists()
