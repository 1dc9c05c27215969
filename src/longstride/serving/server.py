"""uvicorn with our settings, and connections whose client has closed its half."""

from typing import TYPE_CHECKING

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

if TYPE_CHECKING:
    from asyncio import Transport

HALF_CLOSED_SECONDS = 0.5
"""Seconds in which a client that has closed its half of the connection may still get its answer."""


class Connection(H11Protocol):
    """Most clients that close their half have left, and their samples need not be made. Some only say that they send
    nothing more: they get an answer that comes at once, such as that a request is wrong."""

    transport: "Transport"

    def eof_received(self) -> bool | None:  # type: ignore[override]
        if self.cycle is None or self.cycle.response_complete:
            return None
        self.loop.call_later(HALF_CLOSED_SECONDS, self.transport.close)
        return True


def server_config(app: ASGIApp, grace: int | None = None) -> uvicorn.Config:
    """grace: seconds that answers under way get when the server stops; None: as many as they take."""
    return uvicorn.Config(
        app, http=Connection, ws="none", lifespan="on", log_level="error", access_log=False, server_header=False,
        proxy_headers=False, timeout_graceful_shutdown=grace,
    )  # fmt: skip
