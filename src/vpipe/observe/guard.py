"""Limits of each HTTP client of the page's server: connections, bytes, seconds.

Any user of the machine can open connections to a port of the loopback interface, and a request that is never finished
costs its sender nothing. So a connection has ``HEADER_SECONDS`` to send its request, and where ``MAX_WAITING`` have not
sent theirs and one more comes, the oldest *slow* one goes: a whole request is served, whatever the other clients
do. Slow is who sent a part of a request, or nothing for ``PATIENCE_SECONDS``. The others may simply not have been read
yet: on a busy machine many connections are accepted at once, and a visitor's request lies unread behind them, so one of
these goes only when there are ``MAX_UNREAD``. A body is refused, because nothing here takes one. Connections are closed
after each answer.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_SECONDS = 5.0
PATIENCE_SECONDS = 1.0
MAX_WAITING = 32
MAX_UNREAD = 512
"""Connections at once, however fresh: a process may have 1,024 open files."""
MAX_STREAMS = 32
"""Browsers that follow a run at once."""
MAX_HEADER_BYTES = 16 * 1024


def closing(app: Any) -> Any:
    """The application with connections that end after each answer, whatever it is."""

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        async def last(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
            await send(message)

        await app(scope, receive, last)

    return answer


class Guarded(H11Protocol):
    """uvicorn's protocol with a deadline for the request, and a bound on those who wait for theirs."""

    _waiting: dict[Guarded, asyncio.TimerHandle] = {}  # noqa: RUF012 - shared on purpose: it counts all connections
    _slow: dict[Guarded, None] = {}  # noqa: RUF012 - those of them that had their chance, the oldest first

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        while len(self._waiting) >= (MAX_WAITING if self._slow else MAX_UNREAD):
            next(iter(self._slow or self._waiting))._leave()
        self._waiting[self] = self.loop.call_later(HEADER_SECONDS, self._leave)
        self.loop.call_later(
            PATIENCE_SECONDS, self._is_slow
        )  # a loop reads what has arrived before it looks at its timers

    def handle_events(self) -> None:
        super().handle_events()
        self._is_slow()
        if self.cycle is not None:  # the request is whole
            self._settled()

    def connection_lost(self, exc: Exception | None) -> None:
        self._settled()
        super().connection_lost(exc)

    def _is_slow(self) -> None:
        if self in self._waiting:
            self._slow[self] = None

    def _settled(self) -> None:
        self._slow.pop(self, None)
        timer = self._waiting.pop(self, None)
        if timer is not None:
            timer.cancel()

    def _leave(self) -> None:
        self._settled()
        self.transport.abort()
