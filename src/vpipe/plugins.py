"""Code of the user's own, imported so that what it registers can be named in a config.

A plugin is a Python file or a module. Every process of a run imports it once, before it looks up a name. The folder of
a file is put on the path, so that the file may import its neighbours."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import traceback
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from types import ModuleType

from vpipe.errors import UserError

_loaded: dict[str, ModuleType] = {}


def load(plugins: Iterable[str]) -> None:
    """Import each plugin that this process has not imported yet."""
    for plugin in plugins:
        if plugin not in _loaded:
            _loaded[plugin] = _file(Path(plugin)) if plugin.endswith(".py") else _module(plugin)


def loaded(plugin: str) -> ModuleType:
    """The module of a plugin that was loaded."""
    return _loaded[plugin]


def _file(path: Path) -> ModuleType:
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


def _module(name: str) -> ModuleType:
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
