"""A container is a prefix of a command: words in, words out.

    wrap(container, ["python3", "-Pm", "vpipe"])  ->  ["apptainer", "exec", ..., image, "python3", "-Pm", "vpipe"]

Nothing here runs anything. Variables go in by name only (docker) or by inheritance (the others), so that a token never
appears in the list of processes. The working directory is bound and kept, so that relative paths mean the same inside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vpipe.errors import UserError, nearest
from vpipe.launch import command_words as valid
from vpipe.launch.environment import carried
from vpipe.process import AS_MODULE

PYTHON = "python3"
"""Python inside an image; outside it is the interpreter that runs vpipe."""

MARK = "VPIPE_IN_CONTAINER"
"""Set where a command already runs inside its container."""


@dataclass(frozen=True)
class Container:
    """In what a rank runs. ``image`` is a name, a ``.sif`` file, or for charliecloud and bubblewrap a directory."""

    kind: str = "none"
    image: str = ""
    binds: tuple[str, ...] = ()
    """``outside`` or ``outside:/inside``."""
    gpus: bool = False

    def __post_init__(self) -> None:
        if self.kind not in _PREFIXES:
            hint = nearest(self.kind, _PREFIXES)
            raise UserError(
                f"launch.container.kind is {valid.shown(self.kind)}{hint}; it is one of {', '.join(_PREFIXES)}"
            )
        if self.kind != "none":
            valid.image(self.image)
        for each in self.binds:
            valid.bind(each)

    @classmethod
    def from_config(cls, config: Any, gpus: bool = False) -> Container:
        """The container of a config's ``launch.container``."""
        return cls(config.kind, config.image or "", tuple(config.binds), gpus)

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """(outside, inside) of every bind."""
        return [valid.bind(each) for each in self.binds]


def wrap(container: Container, command: Sequence[str], directory: str, variables: Iterable[str] = ()) -> list[str]:
    """``command`` inside the container, in ``directory``, with the named environment variables."""
    names = sorted(valid.variable(name, "the environment variable") for name in variables)
    return [*_PREFIXES[container.kind](container, valid.path(directory, "the working directory"), names), *command]


def command_inside(
    container: Container, arguments: Sequence[str], directory: str, environ: Mapping[str, str]
) -> list[str] | None:
    """``vpipe`` with ``arguments`` inside the container, for a run on this machine; ``None`` where there is nothing to
    do: no container, or already inside. The caller sets ``MARK`` in the environment and becomes this command."""
    if container.kind == "none" or MARK in environ:
        return None
    return wrap(container, [PYTHON, AS_MODULE, "vpipe", *arguments], directory, {MARK, *carried(environ)})


def _apptainer(container: Container, directory: str, names: list[str]) -> list[str]:
    gpus = ["--nv"] if container.gpus else []
    binds = [word for pair in _with_directory(container, directory) for word in ("--bind", ":".join(pair))]
    return [container.kind, "exec", *gpus, *binds, "--pwd", directory, container.image]


def _docker(container: Container, directory: str, names: list[str]) -> list[str]:
    """The host's network, because ranks talk to other nodes; its ipc, because neighbours share memory."""
    fixed = ["docker", "run", "--rm", "--init", "--interactive", "--network=host", "--ipc=host"]
    gpus = ["--gpus=all"] if container.gpus else []
    binds = [word for pair in _with_directory(container, directory) for word in ("--volume", ":".join(pair))]
    variables = [word for name in names for word in ("--env", name)]
    return [*fixed, *gpus, *binds, "--workdir", directory, *variables, container.image]


def _charliecloud(container: Container, directory: str, names: list[str]) -> list[str]:
    binds = [f"--bind={outside}:{inside}" for outside, inside in _with_directory(container, directory)]
    return ["ch-run", *binds, f"--cd={directory}", container.image, "--"]


def _bubblewrap(container: Container, directory: str, names: list[str]) -> list[str]:
    root = [
        "bwrap",
        "--ro-bind",
        container.image,
        "/",
        "--dev",
        "/dev",
        "--proc",
        "/proc",
        "--bind",
        "/dev/shm",
        "/dev/shm",
    ]
    binds = [word for pair in _with_directory(container, directory) for word in ("--bind", *pair)]
    return [*root, *binds, "--chdir", directory, "--die-with-parent", "--"]


def _with_directory(container: Container, directory: str) -> list[tuple[str, str]]:
    """The binds, and the working directory unless one of them brings it."""
    inside = [target.rstrip("/") + "/" for _, target in container.pairs]
    brought = any((directory + "/").startswith(target) for target in inside)
    return container.pairs if brought else [*container.pairs, (directory, directory)]


_PREFIXES: dict[str, Callable[[Container, str, list[str]], list[str]]] = {
    "none": lambda container, directory, names: [],
    "apptainer": _apptainer,
    "singularity": _apptainer,
    "docker": _docker,
    "charliecloud": _charliecloud,
    "bubblewrap": _bubblewrap,
}

NONE = Container()
"""No container."""
