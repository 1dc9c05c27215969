"""Serves a model over HTTP until a signal ends it.

longstride serve RUN --port 8000
longstride play
"""

import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from longstride.common.console import StandardError, print_line
from longstride.common.lazy import import_optional
from longstride.serving.settings import OWNER, ServeSettings


def serve(folder: Path, settings: ServeSettings, opened: Callable[[str], object] | None = None) -> None:
    """Serves until SIGTERM or Ctrl-C. opened: called with the address once the server listens."""
    uvicorn = import_optional("uvicorn", "longstride serve", "serve")
    import_optional("fastapi", "longstride serve", "serve")
    import_optional("prometheus_client", "longstride serve", "serve")
    from longstride.model.byte_cost import cache_bytes
    from longstride.serving.app import create_app
    from longstride.serving.served import open_served
    from longstride.serving.server import server_config

    listener = _listen(settings)
    served = open_served(
        OWNER, folder, name=settings.name, checkpoint=settings.checkpoint, kind=settings.kind, device=settings.device
    )  # fmt: skip
    app = create_app(served, settings)
    address = _address(listener)
    console = StandardError()
    places = app.state.engine.places.count
    memory = -(-places * cache_bytes(served.model.config) // 2**20)
    print_line(
        console,
        f"serving {served.name} on {address}: {places:,} samples at once, which take {memory:,} MiB (--streams), "
        f"{settings.queue:,} may wait",
    )
    if not settings.is_local and settings.api_key() is None:
        print_line(console, "every machine on the network may use it: no API key is set (--api-key-file)")
    server = uvicorn.Server(server_config(app, settings.grace))
    if opened is not None:
        threading.Thread(target=_call_when_started, args=(server, lambda: opened(address)), daemon=True).start()
    with _signals(server):
        server.run([listener])


def _listen(settings: ServeSettings) -> socket.socket:
    """Opens the port before the model is loaded, which takes longer."""
    from longstride.serving.server import open_listener

    try:
        return open_listener(settings.host, settings.port)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(
            f"{OWNER}: cannot listen on host = {settings.host!r}, port = {settings.port}: {reason}; give others"
        ) from None


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _call_when_started(server: Any, function: Callable[[], object]) -> None:
    while not server.started and not server.should_exit:
        threading.Event().wait(0.05)
    if server.started:
        function()


@contextmanager
def _signals(server: Any) -> Iterator[None]:
    """Context in which SIGTERM and SIGINT end the server in order, and the process with 0: uvicorn raises them again when it
    has stopped, for the handlers that were there before its own."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        server.should_exit = True

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
