"""What may stand on a command line: every word that comes from a user passes here before it reaches another program.

Commands are lists of words, so a shell never reads them. Two dangers remain: a word that poses as an option
(``-oProxyCommand=...``), and a line break that poses as a second line of a script or log. Both are refused here, with
the value and what would do. The patterns end with ``\\Z``: ``$`` would let a trailing line break pass.
"""

from __future__ import annotations

import re

from vpipe.errors import UserError

_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?\Z")
_ADDRESS = re.compile(r"[0-9A-Fa-f.:]+\Z")
_USER = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}\Z")
_OPTION = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.,:=@%+/\[\]-]{0,255}\Z")
_TIME = re.compile(r"([0-9]{1,6}-)?[0-9]{1,6}(:[0-9]{1,2}){0,2}\Z")
_ARRAY = re.compile(r"[0-9]{1,6}(-[0-9]{1,6}(:[0-9]{1,6})?)?(,[0-9]{1,6}(-[0-9]{1,6}(:[0-9]{1,6})?)?)*(%[0-9]{1,6})?\Z")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,254}\Z")
_CONTROL = re.compile(r"[\x00-\x1f\x7f\x85\u2028\u2029]")

_LONGEST = 4096


def host(value: str, where: str = "the machine") -> str:
    """A host name or address that ssh and SLURM can take."""
    return _matched(_HOST, value, where, "a host name: letters, digits, dots, dashes and underscores")


def destination(value: str, where: str = "the machine") -> str:
    """What ssh connects to: a host name or an address, perhaps with a user before it."""
    user, at, name = value.rpartition("@")
    if at:
        _matched(_USER, user, where, "host:gpu or user@host:gpu")
    address(name, where)
    return value


def address(value: str, where: str = "the address") -> str:
    """An IPv4 or IPv6 address, or a host name."""
    if _ADDRESS.match(value) and len(value) <= 45:
        return value
    return host(value, where)


def option(value: str, where: str) -> str:
    """The value of a SLURM option."""
    return _matched(_OPTION, value, where, "a word of letters, digits and _.,:=@%+/[]- that begins with none of these")


def duration(value: str, where: str) -> str:
    """A duration as SLURM writes it."""
    return _matched(_TIME, value, where, "a time such as 90 (minutes), 01:30:00 or 2-00:00:00")


def array(value: str, where: str) -> str:
    """The indices of a job array as SLURM writes them."""
    return _matched(_ARRAY, value, where, "indices such as 0-7, 1,3,5 or 0-15%4")


def variable(value: str, where: str) -> str:
    """The name of an environment variable."""
    return _matched(_VARIABLE, value, where, "a name of letters, digits and underscores")


def path(value: str, where: str) -> str:
    """A path: any characters that a file name may have, but nothing that poses as an option or a second line."""
    if not value or len(value) > _LONGEST or value.startswith("-") or _CONTROL.search(value) or not _is_text(value):
        raise UserError(f"{where} is {shown(value)} but must be a path of one line that does not begin with a dash")
    return value


def image(value: str, where: str = "launch.container.image") -> str:
    """The name or path of a container image."""
    path(value, where)
    if any(letter.isspace() for letter in value):
        raise UserError(f"{where} is {shown(value)} but must be an image name or a path without spaces")
    return value


def bind(value: str, where: str = "launch.container.binds") -> tuple[str, str]:
    """(outside, inside) of a bind. A comma or a second colon would be read as more binds or as options of one."""
    outside, colon, inside = value.partition(":")
    inside = inside if colon else outside
    if "," in value or ":" in inside or not inside.startswith("/"):
        raise UserError(f"{where} has {shown(value)} but takes `outside` or `outside:/inside`, without commas")
    return path(outside, where), path(inside, where)


def argument(value: str, where: str) -> str:
    """A word for vpipe itself, such as ``training.epochs=1``: one line, of any characters."""
    if len(value) > _LONGEST or _CONTROL.search(value) or not _is_text(value):
        raise UserError(f"{where} is {shown(value)} but must be one line of text")
    return value


def shown(value: str) -> str:
    """A value as an error shows it: quoted, on one line, not longer than a line."""
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:76]}...'"


def _matched(pattern: re.Pattern[str], value: str, where: str, expected: str) -> str:
    if not pattern.match(value):
        raise UserError(f"{where} is {shown(value)} but must be {expected}")
    return value


def _is_text(value: str) -> bool:
    """Whether the value can be written: half of a surrogate pair cannot."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
