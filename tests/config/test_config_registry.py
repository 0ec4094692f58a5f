"""The plug-in points: decorators, names, entry points of other packages."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from vpipe import registry as registry_module
from vpipe.errors import UserError
from vpipe.registry import DATASET_REGISTRY, MODEL_REGISTRY, SCHEDULE_REGISTRY, STAGE_REGISTRY, Registry


@pytest.fixture
def models() -> Registry[object]:
    registry: Registry[object] = Registry("model")

    @registry.register("gpt")
    class GPT:
        def __init__(self, size: int = 1) -> None:
            self.size = size

    return registry


def test_register_get_create_list_in_len(models: Registry[object]) -> None:
    assert "gpt" in models
    assert "bert" not in models
    assert len(models) == 1
    assert models.list_registered() == list(models) == ["gpt"]
    assert models.create("gpt", size=3).size == 3
    assert type(models.create("gpt")) is models.get("gpt")


def test_a_decorated_class_is_returned_unchanged(models: Registry[object]) -> None:
    class Mine: ...

    assert models.register("mine")(Mine) is Mine


def test_a_taken_name_is_refused_unless_forced(models: Registry[object]) -> None:
    with pytest.raises(UserError, match=r"'gpt' is already registered as .*GPT.*force=True"):
        models.register("gpt")(dict)
    models.register("gpt", force=True)(dict)
    assert models.get("gpt") is dict


def test_an_unknown_name_lists_the_names_and_the_nearest(models: Registry[object]) -> None:
    models.register("llama")(dict)
    with pytest.raises(UserError, match=r"no model 'lama'; did you mean 'llama'\? Registered: gpt, llama"):
        models.get("lama")
    with pytest.raises(UserError, match="no model 'resnet'; registered: gpt, llama"):
        models.create("resnet")
    with pytest.raises(UserError, match="registered: none"):
        Registry[object]("stage").get("x")


def test_register_without_a_name_says_how(models: Registry[object]) -> None:
    with pytest.raises(UserError, match="write @register"):
        models.register(dict)  # type: ignore[arg-type]


def test_the_four_plug_in_points_exist() -> None:
    groups = [r.group for r in (MODEL_REGISTRY, DATASET_REGISTRY, STAGE_REGISTRY, SCHEDULE_REGISTRY)]
    assert groups == ["vpipe.models", "vpipe.datasets", "vpipe.stages", "vpipe.schedules"]


def _offer(monkeypatch: pytest.MonkeyPatch, *points: EntryPoint) -> Registry[object]:
    monkeypatch.setattr(
        registry_module, "entry_points", lambda group: [point for point in points if point.group == group]
    )
    return Registry("model", group="vpipe.models")


def test_an_entry_point_is_loaded_only_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    models = _offer(
        monkeypatch,
        EntryPoint("good", "collections:OrderedDict", "vpipe.models"),
        EntryPoint("bad", "no_such_package:Model", "vpipe.models"),
    )
    assert models.list_registered() == ["bad", "good"]
    assert "bad" in models
    assert models.create("good", a=1) == {"a": 1}
    with pytest.raises(UserError, match=r"'bad' of the package .* cannot be loaded from no_such_package:Model"):
        models.get("bad")


def test_two_packages_with_one_name_are_both_named(monkeypatch: pytest.MonkeyPatch) -> None:
    models = _offer(
        monkeypatch,
        EntryPoint("same", "collections:OrderedDict", "vpipe.models"),
        EntryPoint("same", "collections:Counter", "vpipe.models"),
    )
    with pytest.raises(UserError, match=r"OrderedDict.*Counter"):
        models.get("same")


def test_a_real_package_is_found_without_being_imported(tmp_path: Path) -> None:
    (tmp_path / "plug.py").write_text("class Model:\n    name = 'from another package'\n")
    info = tmp_path / "plug-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plug\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[vpipe.models]\nplugged = plug:Model\n")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from vpipe.registry import MODEL_REGISTRY\n"
        "assert 'plugged' in MODEL_REGISTRY and 'plug' not in sys.modules\n"
        "assert MODEL_REGISTRY.get('plugged').name == 'from another package'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
