"""YAML and JSON text as plain values, with the line of every key and without YAML's surprises.

PyYAML's ``safe_load`` reads ``1e-4`` as a string, ``no`` as false, ``010`` as eight and ``1:30`` as ninety, keeps the
last of two equal keys without a word, and expands nested aliases until the memory is gone. A training run must not
start from such a misunderstanding. So only PyYAML's parser is used; the values are built here:

| written | means |
| --- | --- |
| ``1e-4`` ``1.`` ``.5`` | floats |
| ``true`` ``false`` (also capitalised) | the only booleans; ``no``, ``on`` … are strings |
| ``010`` | refused: eight in YAML 1.1, ten in YAML 1.2 |
| two equal keys, ``*alias``, ``<<``, ``!tag`` | refused, with the line |

Every problem is collected, none is raised, so that a file with five mistakes is mended in one go.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from vpipe.config.problems import ConfigError, Key, Problem, dotted, short
from vpipe.errors import nearest_file

MAX_BYTES = 1_000_000
MAX_DEPTH = 32
MAX_DIGITS = 300
"""A number with more characters is a mistake, and Python refuses integers of more than 4,300 digits."""

_INT = re.compile(r"[-+]?(0|[1-9][0-9]*(_[0-9]+)*)")
_PREFIXED = re.compile(r"0(x[0-9a-fA-F]+|o[0-7]+|b[01]+)")
_OCTAL = re.compile(r"[-+]?0[0-9_]+")
_FLOAT = re.compile(r"[-+]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?")
_WORDS: dict[str, object] = {"": None, "~": None, "null": None, "Null": None, "NULL": None}
_WORDS |= {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_WORDS |= {".inf": float("inf"), "-.inf": float("-inf"), ".nan": float("nan")}


@dataclass
class Document:
    """A parsed text: the value, the line of every key, and what is wrong with the text itself."""

    value: Any = None
    lines: dict[Key, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    file: str = ""
    old_keys: dict[Key, Key] = field(default_factory=dict)
    """Of a translated file: key here → key as the file writes it. ``lines`` then speaks of the file's own keys."""

    def line(self, key: Key) -> int | None:
        """The line of ``key``, or of the nearest thing around it."""
        while key and key not in self.lines:
            key = key[:-1]
        return self.lines.get(key)

    def complain(self, key: Key, text: str, line: int | None = None) -> None:
        self.problems.append(Problem(text, key, self.file, line or self.line(key)))


def plain(text: str) -> Any:
    """What an unquoted scalar means. Raises ``ValueError`` with a remedy where two YAML versions disagree."""
    if text in _WORDS:
        return _WORDS[text]
    if len(text) > MAX_DIGITS:
        return text
    if _INT.fullmatch(text):
        return int(text)
    if _OCTAL.fullmatch(text):
        raise ValueError(
            f"is {text}, which is octal for some readers and decimal for others; "
            f"write {text.lstrip('+-0_') or '0'}, or quote it if it is a name"
        )
    if _PREFIXED.fullmatch(text):
        return int(text, 0)
    return float(text) if _FLOAT.fullmatch(text) else text


def parse(text: str, file: str = "") -> Document:
    """YAML text as a document; never raises."""
    document = Document(file=file)
    loader: Any = None
    try:
        loader = yaml.SafeLoader(text)
        _skip(loader, yaml.StreamStartEvent)
        if loader.check_event(yaml.StreamEndEvent):
            return document
        _skip(loader, yaml.DocumentStartEvent)
        document.value = _Builder(loader, document).value((), 0)
        _skip(loader, yaml.DocumentEndEvent)
        if not loader.check_event(yaml.StreamEndEvent):
            second = loader.get_event().start_mark.line + 1
            document.complain((), "a second document begins after '---'; keep one document per file", second)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        reason = " ".join(part for part in (error.context, error.problem) if part)
        document.complain((), f"this is not YAML: {reason}", mark.line + 1 if mark else None)
    except yaml.YAMLError as error:
        document.complain((), f"this is not YAML: {str(error).splitlines()[0]}")
    except _TooDeep:
        pass  # already complained of
    finally:
        if loader is not None:
            loader.dispose()
    return document


class _TooDeep(Exception):
    """The rest of the text cannot be placed."""


def _skip(loader: Any, kind: type[yaml.Event]) -> None:
    event = loader.get_event()
    assert isinstance(event, kind), f"PyYAML gave {event} instead of {kind.__name__}"


@dataclass
class _Builder:
    """Values from PyYAML's events, with the place of each."""

    loader: Any  # PyYAML's event methods have no types
    document: Document

    def value(self, key: Key, depth: int) -> Any:
        event: Any = self.loader.get_event()
        line = event.start_mark.line + 1
        self.document.lines.setdefault(key, line)
        if depth > MAX_DEPTH:
            self.document.complain(key, f"the text is nested deeper than {MAX_DEPTH} levels", line)
            raise _TooDeep
        if isinstance(event, yaml.AliasEvent):
            self.document.complain(key, f"uses the alias *{event.anchor}; write the value out", line)
            return None
        tag = getattr(event, "tag", None)
        if tag is not None and tag != "!":
            self.document.complain(
                key, f"carries the tag {short(tag)}; leave tags out, values are read as they look", line
            )
        if isinstance(event, yaml.MappingStartEvent):
            return self.mapping(key, depth)
        if isinstance(event, yaml.SequenceStartEvent):
            return self.sequence(key, depth)
        assert isinstance(event, yaml.ScalarEvent)
        if event.style is not None or tag is not None:
            return event.value
        try:
            return plain(event.value)
        except ValueError as error:
            self.document.complain(key, str(error), line)
            return None

    def sequence(self, key: Key, depth: int) -> list[Any]:
        items: list[Any] = []
        while not self.loader.check_event(yaml.SequenceEndEvent):
            items.append(self.value((*key, len(items)), depth + 1))
        self.loader.get_event()
        return items

    def mapping(self, key: Key, depth: int) -> dict[str, Any]:
        items: dict[str, Any] = {}
        while not self.loader.check_event(yaml.MappingEndEvent):
            line = self.loader.peek_event().start_mark.line + 1
            name = self.name(key, depth, line)
            place = (*key, name)
            first = self.document.lines.get(place)
            if first is None:
                self.document.lines[place] = line
            value = self.value(place, depth + 1)
            if name in items:
                self.document.complain(
                    place,
                    f"is given twice: {short(items[name])} on line {first} and {short(value)} here; keep one",
                    line,
                )
            elif name == "<<":
                self.document.complain(place, "merge keys are not read; write the values out", line)
            else:
                items[name] = value
        self.loader.get_event()
        return items

    def name(self, key: Key, depth: int, line: int) -> str:
        """A mapping's key as text: ``1: x`` and ``"1": x`` are the same key here, as in JSON."""
        event: yaml.Event = self.loader.peek_event()
        if isinstance(event, yaml.ScalarEvent):
            self.loader.get_event()
            return str(event.value)
        self.value((*key, "?"), depth + 1)
        self.document.complain(key, "has a list, a mapping or an alias as a key; a key is a word", line)
        return "?"


def read_text(path: Path, problem: Callable[[str], Exception]) -> str:
    """The text of a file of reasonable size in UTF-8; ``problem`` makes the exception for anything else."""
    try:
        if path.is_dir():
            raise problem("is a directory; give a file")
        with path.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        missing = isinstance(error, FileNotFoundError)
        raise problem(f"does not exist{nearest_file(path)}" if missing else f"cannot be read: {error}") from error
    if len(data) > MAX_BYTES:
        raise problem(f"is larger than {MAX_BYTES:,} bytes; a config is a few lines of text")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise problem(f"is not UTF-8 text (byte {error.start} is {data[error.start]:#04x})") from error


def read_yaml(path: Path) -> Document:
    """The YAML file ``path``."""
    file = str(path)
    return parse(read_text(path, lambda reason: ConfigError([Problem(reason, (), file)])), file)


def without_comments(text: str) -> str:
    """JSON without ``// …`` up to the end of a line, as VPipe's documents print it; inside a string it stays."""
    return re.sub(r'"(?:\\.|[^"\\])*"|//[^\n]*', lambda found: "" if found[0].startswith("//") else found[0], text)


def read_json(path: Path) -> Any:
    """The JSON file ``path``, comments left out, with duplicate keys refused. Raises :class:`ConfigError`."""

    def fail(reason: str, line: int | None = None) -> ConfigError:
        return ConfigError([Problem(reason, (), str(path), line)])

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise fail(f"the key {dotted((twice,))} is given twice; keep one")
        return dict(pairs)

    try:
        return json.loads(without_comments(read_text(path, fail)), object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        raise fail(f"this is not JSON: {error.msg}", error.lineno) from error
    except (RecursionError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise fail(f"this is not JSON that can be used: {error}") from error


def absolute(text: str, folder: Path) -> str:
    """``text`` as an absolute path, seen from ``folder``."""
    return os.path.abspath(folder / os.path.expanduser(text))
