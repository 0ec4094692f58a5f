"""The launcher's event loop: what comes from the zygote, the ranks and the keyboard, one event at a time.

No threads: a signal, a line of output, a report and the end of a process are all readable descriptors.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import selectors
import signal
import socket
import subprocess
import termios
import threading
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from vpipe.errors import UserError, on_one_line, printable
from vpipe.launch import early
from vpipe.launch.environment import SECRET
from vpipe.launch.first_cause import IN_ORDER, Report, Verdict
from vpipe.launch.lines import JsonLines
from vpipe.launch.output import Output
from vpipe.launch.process import MOST_DESCRIPTORS, is_stopped, kill_group
from vpipe.rundir.journal import BY_SIGNAL, MISTAKE, Ending, EndingKind

FAILURE_GRACE = 3.0
"""Seconds that the other ranks get after one has failed."""
CAUSE_PATIENCE = 5.0
"""Seconds to wait for the real cause when a rank has only lost another one."""


@dataclass(frozen=True)
class Grace:
    """How long a run that was asked to stop may take."""

    first: Callable[[], float]
    """Seconds from the request on."""
    more: Callable[[], float] = lambda: 0.0
    """Seconds more, asked whenever the time is over: 0 ends the ranks."""


class Launch:
    """One run: the zygote, the streams of its ranks, and what is known of their ends."""

    num_streams = 3
    """Descriptors that every rank gets: see ``_streams``."""

    def __init__(self, num_ranks: int, output: Output, grace: Grace) -> None:
        self._num_ranks = num_ranks
        self._output = output
        self._grace = grace
        self._verdict = Verdict(num_ranks)
        self._selector = selectors.DefaultSelector()
        self._events = JsonLines()
        self._reports: dict[int, tuple[int, JsonLines]] = {}
        self._stop_signal = 0
        self._waited = 0.0
        self._out_of_patience = False
        self.ending: Ending | None = None
        """How it ended, where the ranks could not say so themselves."""
        self._kill_at = self._first_end = float("inf")
        self._judge_at = float("inf")
        self._begun = False
        """Whether there are ranks."""
        self._broken: str | None = None
        self._code: int | None = None
        self._zygote: subprocess.Popen[bytes] | None = None
        self._shared: list[int] = []
        """Descriptors that all ranks get, and those that are forked later."""

    def _variables(self) -> dict[str, str]:
        """What else the environment of the ranks has."""
        return {}

    def start(self, spec: dict[str, Any], environment: dict[str, str], port: int = 0) -> None:
        """Start the zygote and hand it the spec."""
        try:
            listener = socket.create_server(("127.0.0.1", port), backlog=max(128, self._num_ranks * 4))
        except OSError as error:
            raise UserError(f"the ranks cannot meet at port {port}: {error.strerror}; choose another, or 0") from None
        port = listener.getsockname()[1]
        streams = [self._streams(rank) for rank in range(self._num_ranks)]
        given = [listener.fileno(), *(fd for theirs in streams for fd in theirs)]
        spec |= {
            "num_ranks": self._num_ranks,
            "fds": [[given.index(fd) for fd in theirs] for theirs in streams],
            "num_fds": self.num_streams,
            "listener": 0,
            "port": port,
            "environment": {
                "WORLD_SIZE": str(self._num_ranks),
                "LOCAL_WORLD_SIZE": str(self._num_ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                SECRET: secrets.token_hex(32),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "TORCHELASTIC_RESTART_COUNT": "0",
                **{name: environment[name] for name in early.LATE if name in environment},
                **self._variables(),
            },
        }
        begun = None if self._shared else early.take(environment)
        started = begun or early.spawn(environment, self._shared)
        self._zygote, self._control = started.process, started.control
        self._selector.register(self._control, selectors.EVENT_READ, self._read_control)
        for first in range(0, len(given), MOST_DESCRIPTORS):
            socket.send_fds(self._control, [b"\n"], given[first : first + MOST_DESCRIPTORS])
        self._control.sendall(json.dumps(spec).encode() + b"\n")
        for fd in given[1:]:
            os.close(fd)
        listener.close()

    def _streams(self, rank: int) -> list[int]:
        """The descriptors that a rank writes to: stdout, stderr, report. Rank 0 gets a terminal where we have one."""
        given = []
        for number in (0, 1):
            terminal = rank == 0 and self._output.sinks[number].is_terminal
            reader, writer = _terminal() if terminal else os.pipe()
            given.append(writer)
            os.set_blocking(reader, False)
            self._selector.register(reader, selectors.EVENT_READ, self._reader_of(rank, number))
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        self._reports[rank] = (reader, JsonLines())
        self._selector.register(reader, selectors.EVENT_READ, lambda _, rank=rank: self._read_report(rank))
        return [*given, writer]

    def _reader_of(self, rank: int, number: int) -> Callable[[Any], bool]:
        def read(fd: Any) -> bool:
            data = _read(fd)
            if data:
                self._printed(rank, number, data)
            elif data is not None:
                self._selector.unregister(fd)
                os.close(fd)
            return bool(data)

        return read

    def _printed(self, rank: int, number: int, data: bytes) -> None:
        """A rank has written to one of its streams."""
        self._output.feed(rank, number, data, self._shown_as(rank))

    def _shown_as(self, rank: int) -> int:
        """The number under which lines of a rank appear."""
        return rank

    def _read_report(self, rank: int) -> bool:
        reader, lines = self._reports[rank]
        data = _read(reader)
        if not data:
            if data is not None and reader in self._selector.get_map():
                self._selector.unregister(reader)
            return False
        for message in lines.feed(data):
            self._reported(rank, message)
        return True

    def _reported(self, rank: int, message: dict[str, Any]) -> None:
        """A rank says why it ends."""
        report = Report.parse(message)
        self._verdict.report(report)
        self._output.log(rank, report.traceback.encode(errors="replace"))

    def _read_control(self, _: Any) -> bool:
        try:
            data = self._control.recv(65536)
        except ConnectionResetError:  # it ended with an order of ours unread
            data = b""
        if not data:
            self._selector.unregister(self._control)
            self._broken = self._broken or "the process that started the ranks has ended"
            return False
        for event in self._events.feed(data):
            self._heard(event)
        return True

    def _heard(self, event: dict[str, Any]) -> None:
        """Something that the zygote tells."""
        if "ended" in event:
            rank = int(event["ended"])
            while self._read_report(rank):
                pass
            self._ended(rank, int(event["status"]))
        elif "started" in event:
            self._begun = True
        elif "failed" in event or "refused" in event:
            self._broken = str(event.get("failed") or event["refused"])
            self._code = MISTAKE if "refused" in event else None

    def _ended(self, rank: int, status: int) -> None:
        self._verdict.ended(rank, status)

    def loop(self) -> int:
        """Relay, until every rank has ended; the exit code."""
        try:
            while not self._verdict.all_ended and not self._broken:
                self._turn()
            self._drain()
        except BrokenPipeError:
            return 141
        self._output.finish()
        return self._conclude()

    def _turn(self) -> None:
        now = time.monotonic()
        until = min(self._kill_at, self._judge_at) - now
        for key, _ in self._selector.select(min(max(until, 0.0), 1.0)):
            key.data(key.fileobj)
        self._wake_zygote()
        now = time.monotonic()
        if now >= self._kill_at:
            more = self._grace.more() if self._waited else 0.0
            if more:
                self._wait_longer(more)
            else:
                self._kill_at = float("inf")
                self._out_of_patience = True
                self._signal(signal.SIGKILL)
        self._judge(now)

    def _wait_longer(self, seconds: float) -> None:
        """They have heard the request and are about to leave: what they write is what it was for."""
        if self._kill_at == self._first_end:
            self._output.say("vpipe: the ranks are still saving, and are waited for; a second signal ends them at once")
        self._kill_at = time.monotonic() + seconds
        self._waited += seconds

    def _judge(self, now: float) -> None:
        """End everything where a rank has failed, once it is known which one was the first."""
        if self._verdict.failed and not self._stop_signal and not self._verdict.ended_by_us:
            if self._verdict.settled or now >= self._judge_at:
                self._end(signal.SIGTERM, FAILURE_GRACE)
            elif self._judge_at == float("inf"):
                self._judge_at = now + CAUSE_PATIENCE

    def _wake_zygote(self) -> None:
        """Whoever stopped the zygote has not stopped the ranks: without it nobody would hear of their end."""
        if self._zygote is not None and is_stopped(self._zygote.pid):
            self._zygote.send_signal(signal.SIGCONT)
            self._output.say("vpipe: the process that started the ranks had been stopped; it goes on")

    def _end(self, signum: int, grace: float) -> None:
        self._verdict.ended_by_us = True
        self._judge_at = float("inf")
        self._kill_at = time.monotonic() + grace
        self._signal(signum)

    def _signal(self, signum: int) -> None:
        self._tell_zygote({"signal": int(signum)})

    def _tell_zygote(self, order: dict[str, Any], fds: Sequence[int] = ()) -> None:
        try:
            socket.send_fds(self._control, [json.dumps(order).encode() + b"\n"], fds)
        except OSError:
            self._broken = self._broken or "the process that started the ranks has ended"

    def stop(self, signum: int) -> None:
        """The user wants to stop: once in good order, twice at once."""
        if self._stop_signal:
            self._kill_at, self._waited = 0.0, 0.0
            return
        self._stop_signal = signum
        self._waited = self._grace.first()
        again = "; Ctrl-C again ends them at once" if signum == signal.SIGINT else ""
        self._output.say(f"vpipe: stopping {self._num_ranks} ranks, at most {self._waited:.3g} s{again}")
        self._end(signum, self._waited)
        self._first_end = self._kill_at

    @contextmanager
    def catching_signals(self) -> Iterator[None]:
        """Hear SIGINT and SIGTERM inside the loop (in the main thread; elsewhere Python cannot)."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        os.set_blocking(writer, False)
        heeded = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
        before = {number: signal.signal(number, lambda *_: None) for number in heeded}
        wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

        def heard(fd: Any) -> bool:
            for number in _read(fd) or b"":
                if number == signal.SIGUSR1:
                    self._signal(number)  # save and leave: the ranks know how
                elif number in before:
                    self.stop(number)
            return False

        self._selector.register(reader, selectors.EVENT_READ, heard)
        try:
            yield
        finally:
            signal.set_wakeup_fd(wakeup)
            for number, handler in before.items():
                signal.signal(number, handler)
            os.close(reader)
            os.close(writer)

    def _drain(self) -> None:
        """What the ranks said last. A grandchild may hold a pipe open, so nobody waits for the end of a stream."""
        for key in list(self._selector.get_map().values()):
            if key.fileobj is not self._control:
                while key.data(key.fileobj):
                    pass

    def _conclude(self) -> int:
        if self._stop_signal:
            return self._stopped()
        if self._verdict.failed:
            for line in self._verdict.lines():
                self._output.say(line)
            self.ending = self._verdict.ending()
            return self._verdict.exit_code()
        if self._broken:
            lines = [printable(line) for line in self._broken.splitlines()]
            self._output.say("\n  ".join(("vpipe: " + lines[0], *lines[1:])))
            self.ending = Ending.of(EndingKind.FAILED, on_one_line("\n".join(lines)), self._code)
            return self.ending.code
        return self._verdict.exit_code()

    def _stopped(self) -> int:
        """The user has asked for the end: in order, or with what was there."""
        codes = set(self._verdict.statuses.values())
        if self._verdict.all_ended and codes == {0}:
            return 0  # they were done
        in_order = next((code for code in IN_ORDER if code in codes), None)
        if in_order is not None and codes <= {0, *IN_ORDER}:
            return in_order
        name = signal.Signals(self._stop_signal).name
        asked = BY_SIGNAL[signal.Signals(self._stop_signal)]
        if not self._begun:
            stopped = asked is EndingKind.STOPPED
            self.ending = Ending.of(
                asked, f"{name} came before the ranks began", None if stopped else 128 + self._stop_signal
            )
            return self.ending.code
        if self._out_of_patience and self._waited:
            why = f"the ranks did not end within {self._waited:.3g} s of {name} and were killed; raise launch.grace"
            self._output.say(f"vpipe: {why}")
        else:
            why = f"{name} ended the ranks before their update was complete"
        kind = EndingKind.INTERRUPTED if asked is EndingKind.INTERRUPTED else EndingKind.KILLED
        self.ending = Ending.of(kind, why, 128 + self._stop_signal)
        return self.ending.code

    def close(self) -> None:
        """End whatever is left, and wait for it."""
        if self._zygote is not None:
            self._control.close()
            kill_group(self._zygote.pid)
            self._zygote.wait()
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, int):
                self._selector.unregister(key.fileobj)
        for reader, _ in self._reports.values():
            os.close(reader)
        self._selector.close()


def _read(fd: int) -> bytes | None:
    """What there is; empty at the end of the stream, None if there is nothing yet."""
    try:
        return os.read(fd, 65536)
    except BlockingIOError:
        return None
    except OSError:
        return b""  # a terminal whose other end is closed


def _terminal() -> tuple[int, int]:
    """A terminal of the size of ours that passes bytes unchanged: (our end, the rank's end)."""
    master, slave = os.openpty()
    tty.setraw(slave)
    with suppress(OSError):
        fcntl.ioctl(slave, termios.TIOCSWINSZ, fcntl.ioctl(2, termios.TIOCGWINSZ, b"\0" * 8))
    return master, slave
