"""uvicorn with our settings, and connections whose client says nothing, reads nothing, or has closed its half."""

import asyncio
import socket
import sys

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

HALF_CLOSED_SECONDS = 0.5
"""Seconds in which a client that has closed its half of the connection may still get its answer."""
WATCH_SECONDS = 30.0
"""Seconds between two looks at a connection. One on which nothing has happened between them is closed."""
BACKLOG = 2048
"""Connections that wait to be accepted."""
ACCEPTED = 16
"""Connections that are accepted at a time."""
OTHER_FILES = 128
"""Files that are left for something else, and for connections that are accepted and not yet counted."""


class Listener(socket.socket):
    """A listening socket with a backlog of its own. asyncio accepts as many connections at a time as the backlog has that it
    asks for; with many, it would run out of files before the first connection is looked at."""

    def listen(self, backlog: int = BACKLOG) -> None:
        super().listen(BACKLOG)


class Connection(H11Protocol):
    """Most clients that close their half have left, and their samples need not be made. Some only say that they send
    nothing more: they get an answer that comes at once, such as that a request is wrong."""

    transport: asyncio.Transport
    timer: asyncio.TimerHandle | None = None
    last_cycle: object = None
    """At the last look: the request, the bytes that were not yet sent, and whether there was room for more since."""
    unsent: int = 0
    has_resumed: bool = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > most_connections():
            self.transport.abort()
        self.timer = self.loop.call_later(WATCH_SECONDS, self._watch)

    def _watch(self) -> None:
        """Closes the connection of a client that sends no request, or reads nothing of its answer."""
        unsent, is_idle = self.transport.get_write_buffer_size(), self.cycle is None or self.cycle.response_complete
        is_stuck = unsent == self.unsent and not self.has_resumed if unsent else is_idle and self.cycle is self.last_cycle
        if is_stuck:
            self.transport.abort()
            return
        self.last_cycle, self.unsent, self.has_resumed = self.cycle, unsent, False
        self.timer = self.loop.call_later(WATCH_SECONDS, self._watch)

    def resume_writing(self) -> None:
        super().resume_writing()
        self.has_resumed = True

    def send_400_response(self, msg: str) -> None:
        """Answers what is no HTTP, unless an answer has begun, and tells a request that is under way that its client has
        left."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.abort()
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def eof_received(self) -> bool | None:  # type: ignore[override]
        if self.cycle is None or self.cycle.response_complete:
            return None
        self.loop.call_later(HALF_CLOSED_SECONDS, self.transport.close)
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self.timer is not None:
            self.timer.cancel()


def most_connections() -> int:
    """Returns how many connections there may be. Without files, none could be accepted, not even to be refused."""
    if sys.platform == "win32":
        return 2**20
    import resource

    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 2**20 if files == resource.RLIM_INFINITY else max(1, files - OTHER_FILES)


def server_config(app: ASGIApp, grace: int | None = None) -> uvicorn.Config:
    """grace: seconds that answers under way get when the server stops; None: as many as they take."""
    return uvicorn.Config(
        app, http=Connection, ws="none", lifespan="on", log_level="error", access_log=False, server_header=False,
        proxy_headers=False, timeout_graceful_shutdown=grace, backlog=ACCEPTED,
    )  # fmt: skip


def open_listener(host: str, port: int) -> Listener:
    """Listens on an address. OSError or UnicodeError if that is impossible."""
    family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = Listener(fileno=socket.create_server(place[:2], family=family).detach())
    listener.listen()
    return listener
