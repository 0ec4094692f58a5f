"""The old commands of VPipe and OurGPipe, translated word by word into ``vpipe train``.

    driver.py --config_file C             ->  vpipe train C
    gpipe_runner.py --config C --scheduler S  ->  vpipe train C --scheduler S

Words that ``vpipe train`` knows pass through. An option that VPipe had and that has another home now is refused with
its new name: an option that is accepted and ignored would lie.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn

import click

from vpipe.cli.main import main

MOVED = {
    "--launch_single_container": "launch.container.kind in the config",
    "--mount_directories": "launch.container.binds in the config",
}
"""Old option → where it lives now."""


def driver(args: Sequence[str] | None = None) -> NoReturn:
    """VPipe's ``driver.py``."""
    main(translate("driver.py", "--config_file", args))


def gpipe_runner(args: Sequence[str] | None = None) -> NoReturn:
    """OurGPipe's ``gpipe_runner.py``."""
    main(translate("gpipe_runner.py", "--config", args))


def translate(program: str, option: str, args: Sequence[str] | None) -> list[str]:
    """The words of ``vpipe train`` for those of an old command; ``option`` names the config there."""
    config, rest = None, []
    words = iter(sys.argv[1:] if args is None else args)
    for word in words:
        name, equals, value = word.partition("=")
        if name == option:
            config = value if equals else next(words, None)
        elif name in MOVED:
            _refuse(f"{name} is now {MOVED[name]}")
        else:
            rest.append(word)
    if rest and set(rest) & {"-h", "--help"}:
        return ["train", "--help"]
    if config is None:
        _refuse(f"{option} is missing: {program} {option} CONFIG, or better: vpipe train CONFIG")
    return ["train", *rest, "--", str(config)]


def _refuse(sentence: str) -> NoReturn:
    click.echo(f"vpipe: {sentence}", err=True)
    sys.exit(2)
