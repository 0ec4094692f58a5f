"""Many ranks, one readable stream.

Lines of rank 0 pass as they are; lines of the others carry ``[rank 2]``. A line is never torn by another rank's. On a
terminal rank 0 may draw progress bars: its bytes pass at once, and a line of another rank is written above the
unfinished one. Everything a rank says also goes to its own log file.
"""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO, Protocol

from vpipe.process import obeys

_CLEAR_LINE = b"\r\x1b[K"
_LONGEST_OPEN_LINE = 4096


class Stream(Protocol):
    """The part of ``sys.stdout.buffer`` that is used."""

    def write(self, data: bytes, /) -> object: ...

    def flush(self) -> None: ...


class Sink:
    """Where one of the two streams of all ranks ends."""

    def __init__(self, stream: Stream, is_terminal: bool) -> None:
        self._stream = stream
        self.is_terminal = is_terminal
        self._open = b""
        """What rank 0 has written of a line on the terminal without ending it."""
        self._kept: dict[int, bytes] = {}

    def write(self, rank: int, data: bytes) -> None:
        """Bytes as they come from a rank."""
        if rank == 0 and self.is_terminal:
            self._put(data)
            self._open = (self._open + data).rpartition(b"\n")[2][-_LONGEST_OPEN_LINE:]
            return
        data = self._kept.pop(rank, b"") + data
        end = max(data.rfind(b"\n"), data.rfind(b"\r") if rank == 0 else -1) + 1
        if data[end:]:
            self._kept[rank] = data[end:]
        if end:
            self.lines(data[:end] if rank == 0 else tagged(rank, data[:end]))

    def lines(self, text: bytes) -> None:
        """Whole lines, above whatever line is open."""
        self._put(_CLEAR_LINE + text + self._open if self._open else text)

    def finish(self) -> None:
        """Write what never ended with a newline."""
        for rank, data in sorted(self._kept.items()):
            self.lines(data + b"\n" if rank == 0 else tagged(rank, data))
        self._kept.clear()
        if self._open.strip():
            self._put(b"\n")
        self._open = b""

    def _put(self, data: bytes) -> None:
        try:
            self._stream.write(data)
            self._stream.flush()
        except BrokenPipeError:
            raise
        except OSError:
            pass  # redirected to a disk that is full


def tagged(rank: int, text: bytes) -> bytes:
    """Every line with its rank; of a line that was redrawn, its last state."""
    lines = text.removesuffix(b"\n").split(b"\n")
    return b"".join(b"[rank %d] %s\n" % (rank, line.rstrip(b"\r").rpartition(b"\r")[2]) for line in lines)


class Output:
    """The merged output of a launch, and the log files of its ranks."""

    def __init__(self, stdout: Stream, stderr: Stream, num_ranks: int, log_dir: Path | str | None, quiet: bool) -> None:
        self._quiet = quiet
        self.sinks = (Sink(stdout, obeys(stdout)), Sink(stderr, obeys(stderr)))
        self._logs: list[BinaryIO] = []
        self._num_lost = 0
        """Bytes that the log files did not take."""
        if log_dir is not None:
            folder = Path(log_dir)
            folder.mkdir(parents=True, exist_ok=True)
            self._logs = [(folder / f"rank{rank}.log").open("ab", buffering=0) for rank in range(num_ranks)]

    def feed(self, rank: int, number: int, data: bytes, shown: int | None = None) -> None:
        """Bytes that ``rank`` wrote to stream ``number``: 0 is its stdout, 1 its stderr. ``shown`` is the number that
        its lines carry, where ranks change their numbers."""
        self.log(rank, data)
        if not self._quiet:
            self.sinks[number].write(rank if shown is None else shown, data)

    def log(self, rank: int, data: bytes) -> None:
        """Bytes for the rank's log file alone."""
        if not self._logs:
            return
        try:
            self._num_lost += len(data) - (self._logs[rank].write(data) or 0)
        except OSError as error:  # a full disk costs the log, not the run
            if not self._num_lost:
                self.say(f"vpipe: warning: {self._logs[rank].name}: {error.strerror}; the run goes on without it")
            self._num_lost += len(data)

    def say(self, text: str) -> None:
        """Lines of the launcher itself, to stderr."""
        self.sinks[1].lines(text.rstrip("\n").encode(errors="replace") + b"\n")

    def finish(self) -> None:
        """Write what is left."""
        for sink in self.sinks:
            sink.finish()

    def close(self) -> None:
        for log in self._logs:
            log.close()
        if self._num_lost:
            self.say(f"vpipe: warning: {self._num_lost} bytes of the ranks' log files could not be written")
