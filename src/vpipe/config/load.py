"""From a file and a command line to a checked config, or to one error that names everything to mend.

    text ─▶ Document ─▶ (another form? translate) ─▶ overrides ─▶ paths ─▶ typed sections ─▶ rules between fields

Every step adds its problems to one list. A mistake in one field does not hide a mistake between two others: the rules
run on what is left when the wrong keys are taken out.

What is read lies relative to the file that names it, not to where the command was typed. An override on the command
line is typed in a working directory, so its paths are relative to that. What a run writes (``observe.directory``,
``checkpoint.directory``) goes to the working directory in either case.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from vpipe.config.checks import check, idle_keys, touches
from vpipe.config.document import Document, absolute, parse, read_json, read_yaml
from vpipe.config.pipeline import PipelineConfig
from vpipe.config.problems import ConfigError, Key, Problem, dotted, from_pydantic, short
from vpipe.errors import nearest
from vpipe.registry import FORM_REGISTRY, load_plugins

ORION = "USE_ORION_SCHEDULER"
PLUGINS: Key = ("plugins",)
READ: tuple[Key, ...] = (
    ("model", "config"),
    ("model", "directory"),
    ("dataset", "path"),
    ("dataset", "extra", "path"),
    ("dataset", "extra", "tokenizer"),
    ("parallel", "partition"),
    ("parallel", "scheduler"),
    ("launch", "container", "image"),
)
"""Keys that name a file or folder to read."""
Together = Callable[[PipelineConfig], list[Problem]]
"""What is wrong with a config that is right by itself."""


@dataclass(frozen=True)
class Loaded:
    """A checked config, what to tell the user about it, and the file it came from."""

    config: PipelineConfig
    warnings: tuple[str, ...]
    source: Path


@dataclass
class Draft:
    """A config on its way: plain values, where each came from, and what is wrong so far."""

    values: dict[str, Any]
    document: Document
    overridden: dict[Key, str] = field(default_factory=dict)
    """Key → the override that set it."""
    problems: list[Problem] = field(default_factory=list)

    def complain(self, key: Key, text: str) -> None:
        self.problems.append(self.located(Problem(text, key)))

    def located(self, problem: Problem) -> Problem:
        """The problem with its file and line, or with the override that caused it; old files keep their old key."""
        for key, origin in self.overridden.items():
            shared = min(len(key), len(problem.key))
            if shared and key[:shared] == problem.key[:shared]:
                return Problem(problem.text, problem.key, origin, None, problem.also)
        key = self.document.old_keys.get(problem.key, problem.key)
        return Problem(problem.text, key, self.document.file, self.document.line(key), problem.also)

    def put(self, key: Key, value: Any, origin: str) -> None:
        """Set a value in nested mappings that are made where they are missing."""
        place = self.values
        for depth, part in enumerate(key[:-1]):
            inner = place.setdefault(str(part), {})
            if inner is None:
                inner = place[str(part)] = {}
            if not isinstance(inner, dict):
                self.problems.append(
                    Problem(f"cannot be set, because {dotted(key[: depth + 1])} is {short(inner)}", key, origin)
                )
                return
            place = inner
        place[str(key[-1])] = value
        self.overridden[key] = origin


def load(
    path: str | PathLike[str],
    overrides: Sequence[str] = (),
    scheduler: str | None = None,
    *,
    names: Mapping[str, Collection[str] | Callable[[], Collection[str]]] | None = None,
    environment: Mapping[str, str] | None = None,
    run_plugins: bool = True,
    together: Together | None = None,
) -> Loaded:
    """The config of a YAML file, ours, OurGPipe's or VPipe's.

    ``overrides`` are words such as ``training.learning_rate=1e-3``; ``scheduler`` is ``--scheduler``. ``names`` gives
    the names that a key may have, such as ``{"parallel.scheduler": [...]}``, or a function that does once the
    config's plugins are imported. ``together`` is asked where something else than a name is wrong, so that what only
    model and data together show is told in the same breath. Raises :class:`ConfigError`, a ``UserError``, with every
    problem.
    """
    source = Path(path)
    document = read_yaml(source)
    warnings: list[str] = []
    if document.value is not None and not isinstance(document.value, dict):
        document.complain((), f"the file holds {short(document.value)} instead of sections: model, dataset, ...")
    elif document.value and not set(document.value) & set(PipelineConfig.model_fields):
        document, warnings = FORM_REGISTRY.create("config", document, source)
    values = document.value if isinstance(document.value, dict) else {}
    draft = Draft(deepcopy(values), document, problems=list(document.problems))
    unreadable = bool(document.problems) and not values
    if unreadable:
        raise ConfigError(draft.problems)
    _override(draft, overrides, scheduler, os.environ if environment is None else environment)
    _absolute_paths(draft, source.parent)
    listed = draft.values.get("plugins")
    if run_plugins and isinstance(listed, list):
        load_plugins([item for item in listed if isinstance(item, str)])
    known_names = {key: known() if callable(known) else known for key, known in (names or {}).items()}
    config = _finish(draft, known_names, together)
    return Loaded(config, (*warnings, *idle_keys(config)), source)


def from_values(values: Mapping[str, Any]) -> PipelineConfig:
    """The config of nested mappings. Raises :class:`ConfigError` with every problem."""
    if not isinstance(values, Mapping):
        raise ConfigError([Problem(f"a config is a mapping of sections, not {short(values)}")])
    return _finish(Draft(dict(values), Document()), {})


def _override(draft: Draft, overrides: Sequence[str], scheduler: str | None, environment: Mapping[str, str]) -> None:
    if environment.get(ORION, "").strip().lower() in ("1", "true", "yes", "on"):
        draft.put(("parallel", "use_orion_scheduler"), True, ORION)
    for override in overrides:
        name, equals, text = override.partition("=")
        origin = f"--set {short(override)[1:-1]}"
        key: Key = tuple(part.strip() for part in name.split("."))
        if equals and key == PLUGINS:
            _add_plugins(draft, parse(text, origin).value, origin)
            continue
        if not equals or len(key) < 2 or not all(key):
            draft.problems.append(Problem("is not section.key=value, such as training.epochs=1", (), origin))
            continue
        value = parse(text, origin)
        for problem in value.problems:
            draft.problems.append(Problem(problem.text, key, origin))
        if not value.problems:
            draft.put(key, value.value, origin)
    if scheduler is not None:
        draft.put(("parallel", "scheduler"), scheduler, "--scheduler")


def _add_plugins(draft: Draft, value: Any, origin: str) -> None:
    """Plugins of the command line join those of the file; theirs are relative to the working directory."""
    given = value if isinstance(value, list) else [value]
    texts = [absolute(item, Path.cwd()) if isinstance(item, str) and item.endswith(".py") else item for item in given]
    before = draft.values.get("plugins")
    draft.put(PLUGINS, [*(before if isinstance(before, list) else []), *texts], origin)


def _absolute_paths(draft: Draft, folder: Path) -> None:
    """Make the paths that are read absolute, and take a VPipe plan into the config."""
    for key in READ:
        place: Any = draft.values
        for part in key[:-1]:
            place = place.get(part) if isinstance(place, dict) else None
        name = str(key[-1])
        value = place.get(name) if isinstance(place, dict) else None
        if isinstance(place, dict) and isinstance(value, str) and _is_path(key, value):
            place[name] = absolute(value, Path.cwd() if key in draft.overridden else folder)
    found = draft.values.get("plugins")
    if isinstance(found, list):
        draft.values["plugins"] = [
            absolute(item, folder) if isinstance(item, str) and item.endswith(".py") else item for item in found
        ]
    _take_plan(draft)


def _is_path(key: Key, value: str) -> bool:
    if not value or not value.isprintable():
        return False  # refused by its field
    if key == ("parallel", "partition"):
        return value != "auto"
    if key == ("parallel", "scheduler"):
        return _is_program(value)
    if key[-1] == "tokenizer":
        return value.endswith(".json")
    if key[-1] == "image":
        return value.startswith((".", "/", "~")) or value.endswith((".sif", ".simg"))
    return True


def _is_program(scheduler: str) -> bool:
    """Whether ``parallel.scheduler`` is the path of a program instead of a name."""
    return scheduler.lower().endswith(".csv")


def _take_plan(draft: Draft) -> None:
    """Replace the path of a VPipe plan by its numbers; what the config itself says about recompute stays."""
    parallel = draft.values.get("parallel")
    path = parallel.get("partition") if isinstance(parallel, dict) else None
    if not isinstance(parallel, dict) or not isinstance(path, str) or path in ("", "auto"):
        return
    try:
        plan = read_plan(Path(path))
    except ConfigError as error:
        draft.problems += error.problems
        parallel.pop("partition")
        return
    if not set(plan) <= {"partition", "recompute_ratio"}:
        return
    parallel["partition"] = plan.get("partition", "auto")
    if "recompute_ratio" in plan:
        parallel.setdefault("recompute", plan["recompute_ratio"])


def read_plan(path: Path) -> dict[str, Any]:
    """A plan's JSON: ``partition``, a list of whole numbers, ``recompute_ratio``, or both; of ratios alone the cut is
    found as without a plan. Raises :class:`ConfigError`."""
    plan = read_json(path)

    def fail(text: str, *key: str) -> ConfigError:
        return ConfigError([Problem(text, key, str(path))])

    if not isinstance(plan, dict):
        raise fail(f'holds {short(plan)} instead of a plan: {{"partition": [12, 13, 13, 11], ...}}')
    if not {"partition", "recompute_ratio"} & set(plan):
        raise fail('has no "partition": a plan gives the number of blocks of each stage')
    partition, ratios = plan.get("partition", [1]), plan.get("recompute_ratio", [])
    if not isinstance(partition, list) or not partition or not all(type(n) is int and 0 < n < 2**31 for n in partition):
        raise fail(f"is {short(partition)} but must be a list of whole numbers, at least 1 each", "partition")
    if not isinstance(ratios, list) or not all(type(r) in (int, float) and 0 <= r <= 1 for r in ratios):
        raise fail(f"is {short(ratios)} but must be a list of numbers from 0 to 1", "recompute_ratio")
    if {"partition", "recompute_ratio"} <= set(plan) and len(ratios) != len(partition):
        raise fail(
            f"has {len(ratios)} entries, but partition has {len(partition)}; give one per stage", "recompute_ratio"
        )
    return {str(name): value for name, value in plan.items()}


def _finish(draft: Draft, names: Mapping[str, Collection[str]], together: Together | None = None) -> PipelineConfig:
    """Sections, then the rules between them on whatever is right so far; raises with all that is wrong."""
    known_bad = [problem.key for problem in draft.problems if problem.key]
    config, wrong = _typed(draft.values)
    for key, text in wrong:
        if not any(key[: len(bad)] == bad or bad[: len(key)] == key for bad in known_bad):
            draft.complain(key, text)
    if config is None:
        config, _ = _typed(_without(draft.values, [key for key, _ in wrong]))
    if config is not None:
        bad = [*known_bad, *(key for key, _ in wrong)]
        unknown = _unknown_names(config, names)
        told = [problem for problem in (*check(config), *unknown) if not touches(problem, bad)]
        wrong_sections = _sections([*bad, *(key for problem in told for key in (problem.key, *problem.also))])
        if together is not None and (draft.problems or told) and not unknown and not draft.document.old_keys:
            told += [each for each in together(config) if not _sections((each.key, *each.also)) & wrong_sections]
        draft.problems += [draft.located(problem) if problem.key else problem for problem in told]
    if draft.problems:
        raise ConfigError(draft.problems)
    assert config is not None, "a config without problems has all its sections"
    return config


def _sections(keys: Iterable[Key]) -> set[str]:
    return {str(key[0]) for key in keys if key}


def _typed(values: Mapping[str, Any]) -> tuple[PipelineConfig | None, list[tuple[Key, str]]]:
    try:
        return PipelineConfig.model_validate(dict(values)), []
    except ValidationError as error:
        return None, from_pydantic(error.errors(include_url=False), PipelineConfig)
    except (OverflowError, RecursionError) as error:
        return None, [((), f"holds a value that cannot be used: {error}")]


def _without(values: Mapping[str, Any], wrong: Sequence[Key]) -> dict[str, Any]:
    """The values with every wrong key left at its default, and stand-ins for the two names that have none."""
    kept: dict[str, Any] = {
        name: dict(section) if isinstance(section, Mapping) else section for name, section in values.items()
    }
    for key in wrong:
        section = kept.get(str(key[0])) if key else None
        if len(key) > 1 and isinstance(section, dict):
            section.pop(str(key[1]), None)
        elif key:
            kept.pop(str(key[0]), None)
    for section_name in ("model", "dataset"):
        section = kept.setdefault(section_name, {})
        if isinstance(section, dict):
            section.setdefault("name", "unknown")
    return kept


def _unknown_names(config: PipelineConfig, names: Mapping[str, Collection[str]]) -> list[Problem]:
    problems = []
    for dotted_key, known in names.items():
        section, name = dotted_key.split(".")
        value = getattr(getattr(config, section), name)
        if _is_program(str(value)):
            continue  # a file, which says what is wrong with it when it is read
        if value not in known and str(value).lower() not in {other.lower() for other in known}:
            hint = nearest(str(value), known)
            remedy = hint or f"; known: {', '.join(sorted(known))}"
            text = f"is {value!r}, which is not known{remedy}"
            problems.append(Problem(text, (section, name)))
    return problems
