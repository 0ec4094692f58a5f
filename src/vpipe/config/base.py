"""What all sections share: closed (an unknown key is an error), frozen, strict (``"3"`` is not 3), documented."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

PlainName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.+-]{0,127}$")]
"""A word that may become a file name or a word of a command line: it never begins with a dash and holds no space."""

Text = Annotated[str, Field(min_length=1, max_length=4096, pattern=r"^[^\x00-\x1f\x7f]*$")]
"""A path or another line of text: no control characters, so that one value cannot pose as two lines of a script."""

ScheduleName = Annotated[
    str, Field(pattern=r"^([A-Za-z0-9][A-Za-z0-9_.+-]{0,127}|[^\x00-\x1f\x7f]{1,4092}\.[cC][sS][vV])$")
]
"""The name of a schedule, or the path of a CSV file with a program."""

Count = Annotated[int, Field(ge=1, le=2**31)]
Size = Annotated[int, Field(ge=1, le=2**20)]
"""A width or a length: a larger one could not be computed with anywhere."""
LayerCount = Annotated[int, Field(ge=1, le=2**14)]
Interval = Annotated[int, Field(ge=-1, le=2**31)]
FloatList = tuple[float, ...]


class Section(BaseModel):
    """A group of keys. Every field has a description, and a default wherever one makes sense."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )


def worded(default: Any, expects: str, **limits: Any) -> Any:
    """A field whose type needs words: what it accepts is said by ``expects``. One that is a list in the file and a
    tuple here is not ``strict``."""
    return Field(default, json_schema_extra={"expects": expects}, **limits)
