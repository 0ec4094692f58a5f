"""Where the command begins, also as ``python -m vpipe`` for launchers such as torchrun and srun.

A Ctrl-C while Python still imports the command line, which takes a third of a second, ends it quietly as any later one
does. It is no exception meanwhile: an extension module that is being imported may turn one into another error.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import NoReturn

INTERRUPTED = 128 + signal.SIGINT


def main() -> NoReturn:
    """Import the command line, then run it."""
    heeded = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # else somebody wants it ignored
    if heeded:
        signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    from vpipe.cli.main import main

    if heeded:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    main()


if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]  # ``python -m vpipe`` imports what ``vpipe`` does
    main()
