"""The plug-in points: a new model, data set, optimizer, stage or schedule is one class and one decorator.

    @MODEL_REGISTRY.register("my_model")
    class MyModel(ModelInterface): ...

Another package offers its own without being imported first, through a Python entry point of the same name:

    [project.entry-points."vpipe.models"]
    my_model = "my_package.models:MyModel"

Entry points are listed by name and loaded only when that name is asked for: listing what exists runs nobody's code,
and a broken plug-in cannot hurt a run that does not use it. No torch here, so that ``vpipe --help`` stays quick.

A plugin is code of the user's own, a Python file or a module, imported so that what it registers can be named in a
config (``load_plugins``). Every process of a run imports it once, before it looks up a name. The folder of a file is
put on the path, so that the file may import its neighbours.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import traceback
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar

from vpipe.errors import UserError, nearest

T = TypeVar("T")
Item = TypeVar("Item")

_plugins: dict[str, ModuleType] = {}
"""Those that this process has imported."""


class Registry(Generic[T]):
    """Names of one kind of thing, and what they stand for.

    ``kind`` is what errors call an entry ("model"); ``group`` is the entry-point group that other packages use.
    ``built_in`` are our own names, each with the ``module:function`` that is imported when it is asked for; or
    ``filled_by`` is the module that enters them. ``aliases`` are other words for ours, which ``names`` lists too.
    """

    def __init__(
        self,
        kind: str,
        group: str | None = None,
        built_in: Mapping[str, str] | None = None,
        filled_by: str | None = None,
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        self.kind = kind
        self.group = group
        self.built_in = dict(built_in or {})
        self.aliases = dict(aliases or {})
        self._filled_by = filled_by
        self._entries: dict[str, T] = {}

    def register(self, name: str, force: bool = False) -> Callable[[Item], Item]:
        """A decorator that enters a class or function under ``name``; ``force`` replaces a taken name. One of our own
        built-in names is not taken: whoever enters it means theirs."""
        if not isinstance(name, str) or not name.strip():
            raise UserError(
                f'a {self.kind} is registered under a name, not under {name!r}: write @register("my_{self.kind}")'
            )

        def enter(item: Item) -> Item:
            if name in self._entries and not force:
                raise UserError(
                    f"the {self.kind} {name!r} is already registered as {_address(self._entries[name])}, "
                    f"so {_address(item)} needs another name, or register(..., force=True) to replace it"
                )
            self._entries[name] = item  # type: ignore[assignment]  # the decorator returns what it got, with its own type
            return item

        return enter

    def get(self, name: str) -> T:
        """What ``name`` stands for, be it an entry point of another package. An unknown name lists the known ones."""
        self._fill()
        if name in self.built_in and not self.is_own(name):
            module, _, attribute = self.built_in[name].partition(":")
            found: T = getattr(import_module(module), attribute)
            return found
        if name not in self._entries:
            self._entries[name] = self._load(name)
        return self._entries[name]

    def is_own(self, name: str) -> bool:
        """Whether a user or another package has entered ``name``."""
        return name in self._entries or any(point.name == name for point in self._entry_points())

    def create(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """``get(name)(*args, **kwargs)``."""
        made = self.get(name)
        if not callable(made):
            raise UserError(
                f"the {self.kind} {name!r} is {made!r}, which cannot be called: register a class or a function"
            )
        return made(*args, **kwargs)

    def list_registered(self) -> list[str]:
        """All names, our own and those of other packages' entry points included, sorted."""
        self._fill()
        return sorted({*self.built_in, *self._entries, *(point.name for point in self._entry_points())})

    def names(self) -> list[str]:
        """All words that a config may say: the same, and aliases."""
        return [*self.list_registered(), *self.aliases]

    def meant(self, word: str) -> str:
        """The name that a word of a config stands for, whatever its case: an alias' own, else the word itself."""
        self._fill()
        return {alias.lower(): name for alias, name in self.aliases.items()}.get(word.lower(), word.lower())

    def __contains__(self, name: object) -> bool:
        self._fill()
        return name in self.built_in or (isinstance(name, str) and self.is_own(name))

    def __len__(self) -> int:
        return len(self.list_registered())

    def __iter__(self) -> Iterator[str]:
        return iter(self.list_registered())

    def __repr__(self) -> str:
        return f"Registry({self.kind!r}: {', '.join(self.list_registered()) or 'empty'})"

    def _fill(self) -> None:
        if self._filled_by is not None:
            import_module(self._filled_by)

    def _entry_points(self) -> list[EntryPoint]:
        return [] if self.group is None else list(entry_points(group=self.group))

    def _load(self, name: str) -> T:
        """The entry point ``name``. Two packages with the same name, or one that does not import, are told by name."""
        points = {point.value: point for point in self._entry_points() if point.name == name}
        if not points:
            known = self.list_registered()
            hint = nearest(str(name), known)
            names = ", ".join(known) or "none"
            end = f"{hint} Registered: {names}" if hint else f"; registered: {names}"
            raise UserError(f"there is no {self.kind} {name!r}{end}")
        if len(points) > 1:
            places = " and ".join(f"{point.value} ({_package(point)})" for point in points.values())
            raise UserError(f"two packages offer the {self.kind} {name!r}: {places}; uninstall one of them")
        (point,) = points.values()
        try:
            loaded: T = point.load()
        except Exception as error:
            raise UserError(
                f"the {self.kind} {name!r} of the package {_package(point)} cannot be loaded from {point.value}: "
                f"{type(error).__name__}: {error}"
            ) from error
        return loaded


def _package(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else "unknown package"


def _address(item: object) -> str:
    return f"{getattr(item, '__module__', '?')}.{getattr(item, '__qualname__', repr(item))}"


MODEL_REGISTRY: Registry[Any] = Registry(
    "model",
    group="vpipe.models",
    built_in={
        "gpt": "vpipe.models.gpt:gpt",
        "gpt2": "vpipe.models.gpt:gpt2",
        "llama": "vpipe.models.llama:llama",
        "bert": "vpipe.models.bert:bert",
        "translation": "vpipe.models.translation:translation",
        "cpm-medium": "vpipe.models.cpm:cpm_medium",
        "cpm-large": "vpipe.models.cpm:cpm_large",
        "huggingface": "vpipe.models.huggingface:huggingface",
        "emulated": "vpipe.models.emulated:emulated",
    },
)
DATASET_REGISTRY: Registry[Any] = Registry(
    "dataset",
    group="vpipe.datasets",
    built_in={
        "bert": "vpipe.data.bert_hdf5:load",
        "chid": "vpipe.data.chid:load",
        "code_search_net": "vpipe.data.code_search_net:load",
        "synthetic": "vpipe.data.synthetic:load",
        "text": "vpipe.data.text:load",
        "translation": "vpipe.data.translation:load",
    },
    aliases={"bert_hdf5": "bert", "code": "code_search_net", "codesearchnet": "code_search_net", "cpm": "chid"},
)
OPTIMIZER_REGISTRY: Registry[Any] = Registry(
    "optimizer",
    group="vpipe.optimizers",
    built_in={
        "sgd": "torch.optim:SGD",
        "adam": "torch.optim:Adam",
        "adamw": "torch.optim:AdamW",
        "adafactor": "torch.optim:Adafactor",
        "lamb": "vpipe.train.optimizers:Lamb",
        "lars": "vpipe.train.optimizers:Lars",
    },
)
STAGE_REGISTRY: Registry[Any] = Registry("stage", group="vpipe.stages")
SCHEDULE_REGISTRY: Registry[Any] = Registry("schedule", group="vpipe.schedules", filled_by="vpipe.schedule.catalog")
FORM_REGISTRY: Registry[Any] = Registry(
    "form of another system",
    built_in={
        "config": "vpipe.compat.vpipe_yaml:translate",
        "any module": "vpipe.models.huggingface.module:cut_module",
        "graph profile": "vpipe.compat.graph_text:load_profile",
        "graph plan": "vpipe.compat.graph_orders:plan_file",
        "graph text": "vpipe.compat.graph_text:export_graph",
        "orion": "vpipe.compat.priorities.orion:preload",
        "plan file": "vpipe.compat.plan_file:to_vpipe",
        "run record": "vpipe.compat.run_record:keep",
        "turns": "vpipe.compat.priorities.turns:take_turns",
        "worker threads": "vpipe.compat.threaded:engine_maker",
    },
)
"""What the rest asks of packages that it does not import: of ``compat``, and how a module is cut."""


def check_options(
    name: str, make: Callable[..., Any], given: Mapping[str, Any], where: str, known: Sequence[str]
) -> None:
    """Refuse what the function of ``name`` does not take, or takes as another type: its signature is the statement."""
    try:
        hints = typing.get_type_hints(make)
    except (NameError, TypeError):  # of types that are there for checkers alone
        hints = {}
    for key, value in given.items():
        if key not in known:
            raise UserError(
                f"{where}.{key} is not an option of {name!r}{nearest(key, known)}; it takes {', '.join(known)}"
            )
        if not _fits(value, hints.get(key, Any)):
            wanted = getattr(hints[key], "__name__", str(hints[key]))
            raise UserError(f"{where}.{key} is {value!r} ({type(value).__name__}); it must be {wanted}")


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value is of a type; of one that has parts, only unions are asked."""
    if isinstance(hint, types.UnionType):
        return any(_fits(value, part) for part in typing.get_args(hint))
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint not in (bool, int, str, None, type(None), Path):
        return True
    return isinstance(value, hint) and (hint is not int or not isinstance(value, bool))


def load_plugins(plugins: Iterable[str]) -> None:
    """Import each plugin that this process has not imported yet."""
    for plugin in plugins:
        if plugin not in _plugins:
            _plugins[plugin] = _from_file(Path(plugin)) if plugin.endswith(".py") else _from_module(plugin)


def loaded_plugin(plugin: str) -> ModuleType:
    """The module of a plugin that was loaded."""
    return _plugins[plugin]


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UserError(f"the plugin {path} does not exist; in a config its path is seen from the config's folder")
    name = f"vpipe_plugin_{path.stem}_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    sys.modules[name] = module  # before it runs, so that its classes can travel to other processes
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise _failed(str(path), error) from error
    return module


def _from_module(name: str) -> ModuleType:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise _failed(name, error) from error
        raise UserError(
            f"the plugin {name!r} is neither a Python file (its name ends in .py) nor a module that can be imported"
        ) from None
    except Exception as error:
        raise _failed(name, error) from error


def _failed(plugin: str, error: Exception) -> UserError:
    """The sentence for a plugin that does not import, with the line of it that failed."""
    if isinstance(error, UserError):
        return UserError(f"the plugin {plugin}: {error}")
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == plugin]
    line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
    where = f", line {line}" if line else ""
    return UserError(f"the plugin {plugin}{where} fails: {type(error).__name__}: {' '.join(str(error).split())}")
