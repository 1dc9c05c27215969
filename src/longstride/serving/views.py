"""The page and the endpoints that only it uses, under /page."""

from fastapi import APIRouter

from longstride.serving.engine import Engine
from longstride.serving.served import Served


def page_router(served: Served, engine: Engine) -> APIRouter:
    """Returns the routes of the page: / and /static/... are open, /page/... needs the API key if there is one.

    What runs the model goes through `await engine.run(function)`: the model's thread calls it between two bytes, and nothing
    else may use the model meanwhile. Raise `errors.RequestError` for a client's mistake.
    """
    return APIRouter()
