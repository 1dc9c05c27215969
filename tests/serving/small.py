"""A small model behind a server, for tests."""

import contextlib
import threading

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")

import uvicorn
from starlette.testclient import TestClient

from longstride.data.kinds import kind_class
from longstride.sampling import generate
from longstride.serving.answers import Job
from longstride.serving.app import create_app
from longstride.serving.served import Served
from longstride.serving.server import open_listener, server_config
from longstride.serving.settings import ServeSettings
from tests.model.small import model


def served(kind="text", name="tiny", **changes):
    made = model(**{"context": 64, **changes}).eval().requires_grad_(False)
    return Served(name, made, kind_class(kind)())


def app(given=None, **settings):
    return create_app(given or served(), ServeSettings(**{"streams": 4, **settings}))


@contextlib.contextmanager
def client(given=None, **settings):
    with TestClient(app(given, **settings), base_url="http://localhost:8000") as made:
        yield made


@contextlib.contextmanager
def server(given=None, **settings):
    """A real server in a thread, on a free port: yields the server, with `port`, `url` and `app`."""
    listener = open_listener("127.0.0.1", 0)
    made = app(given, **settings)
    running = uvicorn.Server(server_config(made))
    running.capture_signals = contextlib.nullcontext
    running.app, running.port = made, listener.getsockname()[1]
    running.url = f"http://127.0.0.1:{running.port}"
    thread = threading.Thread(target=running.run, args=([listener],))
    thread.start()
    try:
        yield running
    finally:
        running.should_exit = True
        thread.join()


def alone(made, job: Job) -> bytes:
    """What `generate` makes of a job whose prompt is inside the context."""
    params = job.params
    pieces = generate(
        made, [job.prompt], job.length, seed=job.seed, first=job.index, temperature=params.temperature, top_k=params.top_k,
        top_p=params.top_p,
    )  # fmt: skip
    return b"".join(piece[0] for piece in pieces)
