"""The command ``vpipe``: finds the sub-command, and turns what goes wrong into one sentence.

``vpipe --help`` must answer at once, on a login node, before anything heavy is imported. So a sub-command is a name and
a line of help in ``COMMANDS``; its module is imported when it is called. To add one, write ``cli/<name>.py`` with a
click command called ``command`` and enter it here. A command returns None or its exit code:

    0  done
    1  the answer is no: an invalid program, a difference
    2  the question was wrong; one sentence says where, and how to mend it
   74  the answer could not be written: a full disk
"""

from __future__ import annotations

import atexit
import errno
import gc
import os
import re
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

import click
from click.shell_completion import CompletionItem

from vpipe import __version__, process
from vpipe.errors import UserError, nearest

COMMANDS = {
    "init": "Write a first config with comments.",
    "train": "Train a model from a config file.",
    "scale": "Change the number of ranks of an elastic run that is going on.",
    "chaos": "Break a run on purpose, and prove that it ended equal.",
    "run": "Run a script of your own on N local ranks.",
    "schedules": "The catalogue of schedules, or its ranking under your costs.",
    "draw": "Draw a schedule: terminal, SVG or CSV.",
    "simulate": "How long a schedule takes, where it idles, what it holds.",
    "verify": "Whether a schedule is right: all violations, deadlocks included.",
    "parity": "Train pipelined and in one process, and compare to the bit.",
    "profile": "Measure the layers of a model.",
    "plan": "Partition, recompute, swap and schedule from measured costs.",
    "compare": "A fair sweep over schedules and microbatches.",
    "report": "A run as one HTML page.",
    "dashboard": "A run as a live page.",
    "playground": "Schedules in the browser: sliders, timeline, verifier.",
    "export": "The weights of a run, for Hugging Face and others.",
    "data": "Build a data set from text on this machine.",
    "submit": "Write and submit a SLURM job.",
    "doctor": "What this machine has, what would run, what is missing.",
}

OUTPUT_LOST = os.EX_IOERR
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)

_KEY = re.compile(
    r"\b(model_parallel_size|data_parallel_size|threads|transport|elastic|machines|container)\s*[:=]\s*([^\s#,}]+)"
)
_NOT_HERE = {"transport": "inprocess", "elastic": "", "machines": "", "container": ""}
"""Keys, and the values with which no zygote is needed, or another one; empty: any but none."""

EXAMPLES = """
\b
Examples:
  vpipe draw 1f1b -p 4 -m 8                       a picture in the terminal
  vpipe simulate zb-h1 -p 4 -m 8 --json           bubbles and memory, before anything runs
  vpipe schedules --rank -p 4 -m 16 --latency 1   which schedule suits this network?
  vpipe verify schedule.csv                       a CSV of torch or of your own: right, and free of deadlock?
  vpipe train configs/gpt_small.yaml              the same under torchrun and srun

'vpipe COMMAND --help' says more. VPIPE_DEBUG=1 shows the traceback of an error.
"""


class LazyGroup(click.Group):
    """A group whose commands are modules that are imported when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for name in COMMANDS if find_spec(f"vpipe.cli.{name}")]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        command = import_module(f"vpipe.cli.{cmd_name}").command
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        known = self.list_commands(ctx)
        if args and args[0] not in known and not args[0].startswith("-"):
            hint = nearest(args[0], known) or f"; known: {', '.join(known)}"
            raise UserError(f"there is no command {args[0]!r}{hint}")
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Like click's, from the table, so that TAB imports no command."""
        known = [name for name in self.list_commands(ctx) if name.startswith(incomplete)]
        options = click.Command.shell_complete(self, ctx, incomplete)
        return [*(CompletionItem(name, help=COMMANDS[name]) for name in known), *options]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Names and lines of help from the table, so that help imports no command."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name]) for name in self.list_commands(ctx)])


@click.group(
    cls=LazyGroup, epilog=EXAMPLES, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110}
)
@click.version_option(__version__, prog_name="vpipe")
def cli() -> None:
    """Pipeline-parallel training for any PyTorch model, with an answer before the job is queued."""


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit."""
    atexit.register(gc.freeze)  # else an interpreter that has loaded torch looks for garbage for a second while it ends
    try:
        code = _run(sys.argv[1:] if args is None else list(args))
        sys.stdout.flush()
    except UserError as error:
        from vpipe.launch import environment

        if os.environ.get("VPIPE_DEBUG") or (process.rank() is not None and sys.excepthook is not sys.__excepthook__):
            raise  # a rank that has met the others has a hook: it knows which of them speaks
        environment.let_rank_0_speak()
        _fail(error.sentence, getattr(error, "exit_code", 2))
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(2)
    except click.ClickException as error:
        path = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "vpipe"
        _fail(" ".join(f"{error.format_message().rstrip('.')}; see '{path} --help'".split()))
    except (KeyboardInterrupt, click.Abort):
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the interpreter complains while it exits
        sys.exit(141)
    except OSError as error:
        if error.errno not in FULL or not _output_is_lost():
            raise
        _fail(f"standard output cannot be written: {error.strerror}", OUTPUT_LOST)
    sys.exit(code if isinstance(code, int) else 0)


def _run(words: list[str]) -> object:
    """Run a command; ranks that ``train`` will want begin to import while its config is read."""
    guess = guessed(words[1:]) if words[:1] == ["train"] else None
    if guess is None:
        return cli.main(args=words, prog_name="vpipe", standalone_mode=False)
    from vpipe.launch import zygote_start

    zygote_start.begin(*guess)
    try:
        return cli.main(args=words, prog_name="vpipe", standalone_mode=False)
    finally:
        zygote_start.dismiss()


def guessed(words: Sequence[str]) -> tuple[int, int] | None:
    """How many ranks and threads these words of ``train`` and the config that they name ask for; None: no ranks here,
    or unclear."""
    if any(word in ("-h", "--help", "--print-config", "--elastic") for word in words):
        return None
    files = [word for word in words if word.endswith((".yaml", ".yml")) and Path(word).is_file()]
    if len(files) != 1:
        return None
    found = dict(_KEY.findall(Path(files[0]).read_text(encoding="utf-8", errors="replace")))
    found |= dict(_KEY.findall("\n".join(words)))
    if "--nproc" in words[:-1]:
        found["model_parallel_size"] = words[words.index("--nproc") + 1]
    for key, value in _NOT_HERE.items():
        if key in found and found[key] not in ("none", "null", "[]") and value in ("", found[key]):
            return None
    defaults = {"model_parallel_size": "", "data_parallel_size": "1", "threads": "0"}
    numbers = [found.get(key, default) for key, default in defaults.items()]
    if not all(number.isdecimal() for number in numbers):
        return None
    stages, replicas, threads = map(int, numbers)
    return (stages * replicas, threads) if stages * replicas > 1 else None


def _output_is_lost() -> bool:
    """Whether it was standard output that is full, and no file: an empty line says. If so, the rest is given up."""
    try:
        sys.stdout.write("\n")
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False


def _fail(sentence: str, code: int = 2) -> NoReturn:
    click.echo(f"vpipe: {sentence}", err=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
