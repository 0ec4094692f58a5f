"""What is wrong with a config, told all at once: file, line, key, the value found and the value that would do.

pydantic finds the mistakes but speaks of types and unions. Here each of its errors becomes one sentence from what the
field itself says it expects (:func:`expects`), the same words that the reference page prints.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from vpipe.errors import UserError, nearest

Key = tuple[str | int, ...]
"""A place in a config: ``("training", "betas", 0)``."""


@dataclass(frozen=True)
class Problem:
    """One thing to mend."""

    text: str
    key: Key = ()
    file: str = ""
    line: int | None = None
    also: tuple[Key, ...] = ()
    """Other keys that the sentence is about."""

    def __str__(self) -> str:
        where = f"line {self.line}: " if self.line is not None else ""
        return f"{where}{dotted(self.key)}{' ' if self.key else ''}{self.text}"


class ConfigError(UserError):
    """A config that cannot be used, with every problem that was found."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__(_tell(self.problems))

    @property
    def sentence(self) -> str:
        """A line for each problem."""
        return "\n".join(line if line[:1] != " " else f"  {line.strip()}" for line in str(self).splitlines())


def _tell(problems: Sequence[Problem]) -> str:
    """One sentence for one problem; a heading and a line each for several."""
    files = {problem.file for problem in problems if problem.file}
    if len(problems) == 1:
        return _placed(problems[0])
    ordered = sorted(problems, key=lambda problem: (problem.file, problem.line or 0))
    told = map(_placed if len(files) > 1 else str, ordered)
    heading = f"{len(problems)} problems in {files.pop() if len(files) == 1 else 'the config'}:"
    return "\n  ".join([heading, *told])


def _placed(problem: Problem) -> str:
    """The sentence with its file in front."""
    comma = ", " if problem.line is not None else ": " if problem.key else " "
    return f"{problem.file}{comma}{problem}" if problem.file else str(problem)


def dotted(key: Key) -> str:
    """``training.betas[0]``. Odd characters of a hostile key are escaped."""
    text = ""
    for part in key:
        word = part if isinstance(part, str) and part.isprintable() and part else repr(part)
        text += f"[{part}]" if isinstance(part, int) else f".{word[:80]}" if text else word[:80]
    return text


def short(value: object) -> str:
    """A value as the file would write it, cut to a readable length."""
    words = {"None": "null", "True": "true", "False": "false"}
    try:
        text = repr(value)
    except ValueError:  # an integer too long for decimal digits
        text = "a number of thousands of digits"
    text = words.get(text, text)
    return text if len(text) <= 60 else f"{text[:57]}..."


def expects(field: FieldInfo) -> str:
    """What a field accepts, in words: ``a whole number, at least 1``."""
    extra = field.json_schema_extra
    if isinstance(extra, Mapping) and "expects" in extra:
        return str(extra["expects"])
    return _expects(field.annotation, field.metadata)


def _expects(annotation: Any, metadata: Iterable[Any]) -> str:
    if get_origin(annotation) is Annotated:
        annotation, *more = get_args(annotation)
        return _expects(annotation, [*metadata, *more])
    limits = ", ".join(filter(None, map(_limit, metadata)))
    if get_origin(annotation) in (Union, UnionType):
        inner = [_expects(part, ()) for part in get_args(annotation) if part is not NoneType]
        return " or ".join([*inner, *(["null"] if NoneType in get_args(annotation) else [])])
    if get_origin(annotation) is Literal:
        return f"one of {', '.join(str(choice) for choice in get_args(annotation))}"
    if get_origin(annotation) is tuple:
        return "a list"
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "a word"}
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "a mapping of keys"
    return ", ".join(filter(None, [words.get(annotation, "a mapping"), limits]))


def _limit(constraint: object) -> str:
    """A limit in words; one beyond any use is not worth a word."""
    match constraint:
        case Le(le=high) | Lt(lt=high) if isinstance(high, int | float) and high >= 1e6:
            return ""
        case Ge(ge=low):
            return f"at least {low}"
        case Gt(gt=low):
            return f"more than {low}"
        case Le(le=high):
            return f"at most {high}"
        case Lt(lt=high):
            return f"less than {high}"
    return ""


def field_at(model: type[BaseModel], key: Key) -> tuple[Key, FieldInfo | None, type[BaseModel]]:
    """(the longest part of ``key`` that names a field, that field, the section it is in)."""
    owner = model
    field: FieldInfo | None = None
    for depth, part in enumerate(key):
        if not isinstance(part, str) or part not in owner.model_fields:
            return key[:depth], field, owner
        field = owner.model_fields[part]
        inner = section_of(field)
        if inner is None:
            return key[: depth + 1], field, owner
        owner = inner
    return key, field, owner


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    """The model of a field that is itself a section."""
    annotation = field.annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def places_of(name: str, model: type[BaseModel], at: Key = ()) -> list[Key]:
    """Every place of the config whose last word is ``name``."""
    found: list[Key] = []
    for own, field in model.model_fields.items():
        inner = section_of(field)
        found += [(*at, own)] if own == name else []
        found += places_of(name, inner, (*at, own)) if inner is not None else []
    return found


def from_pydantic(errors: Iterable[Mapping[str, Any]], model: type[BaseModel]) -> list[tuple[Key, str]]:
    """(key, sentence) per mistaken key. A union's branches become one sentence."""
    told: dict[Key, str] = {}
    for error in errors:
        loc: Key = tuple(error["loc"])
        key, field, owner = field_at(model, loc)
        if error["type"] == "extra_forbidden":
            told[loc] = unknown(loc, owner, model)
        elif error["type"] == "missing":
            text = (field.description or "") if field is not None else ""
            told[loc] = f"is missing; add it: {text.split('. ')[0].rstrip('.')}"
        elif field is not None:
            index = next((part for part in loc[len(key) :] if isinstance(part, int)), None)
            is_item = index is not None and get_origin(field.annotation) not in (Union, UnionType)
            subject = f"is {short(error['input'])}, but {dotted(key)}" if is_item else f"is {short(error['input'])} but"
            told.setdefault(
                (*key, index) if is_item and index is not None else key, f"{subject} must be {_remedy(error, field)}"
            )
        else:
            told.setdefault(loc, f"is {short(error['input'])} but must be a mapping of sections")
    return list(told.items())


def _remedy(error: Mapping[str, Any], field: FieldInfo) -> str:
    wanted = expects(field)
    value = error["input"]
    if error["type"] == "literal_error" and isinstance(value, str):
        choices = [str(choice) for choice in get_args(field.annotation)]
        return wanted + nearest(value, choices)
    if error["type"] == "bool_type" and str(value).lower() in ("yes", "no", "on", "off", "y", "n"):
        return f"{wanted} (YAML's yes and no are not read)"
    return wanted


def unknown(key: Key, owner: type[BaseModel], model: type[BaseModel]) -> str:
    """An unknown key, with the place it belongs to or the nearest name."""
    name = str(key[-1])
    elsewhere = [dotted(place) for place in places_of(name, model) if place != key]
    if elsewhere:
        return f"is an unknown key; did you mean {' or '.join(elsewhere)}?"
    hint = nearest(name, owner.model_fields)
    return f"is an unknown key{hint}" if hint else f"is an unknown key; known here: {', '.join(owner.model_fields)}"
