"""What every endpoint does with a request: reads its JSON, and turns the engine's errors into answers."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from starlette.requests import Request

from longstride.common.files import parse_object
from longstride.serving.errors import RequestError, stopping
from longstride.serving.failures import BusyError, ModelError, StoppingError

BODY_SECONDS = 30
"""Seconds that a client has to send its request."""


async def read_body(request: Request) -> dict[str, Any]:
    """Returns the JSON object of a request's body."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise RequestError("the header Content-Type must be application/json", status=415)
    try:
        content = await asyncio.wait_for(request.body(), BODY_SECONDS)
    except TimeoutError:
        raise RequestError(f"the body did not come within {BODY_SECONDS} s", status=408) from None
    try:
        return parse_object(content.decode(), "the body")
    except UnicodeDecodeError as error:
        raise RequestError(f"the body is no UTF-8: {error.reason} at byte {error.start}") from None
    except ValueError as error:
        raise RequestError(str(error)[:500]) from None


@contextmanager
def errors_of_engine() -> Iterator[None]:
    """Turns errors of the engine into those of a request."""
    try:
        yield
    except BusyError as error:
        headers = {"Retry-After": str(error.retry_after)}
        raise RequestError(str(error), code="queue_full", status=429, headers=headers) from None
    except StoppingError as error:
        raise stopping(str(error)) from None
    except ModelError as error:
        raise RequestError(str(error), code="model_error", status=500) from None
