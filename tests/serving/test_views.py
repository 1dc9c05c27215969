"""The page's files and endpoints, without a browser."""

import asyncio
import base64
import json

import numpy as np
import pytest

pytest.importorskip("fastapi")

from fastapi import FastAPI
from fastapi.testclient import TestClient

from longstride.data.images import Images
from longstride.data.text import Text
from longstride.serving import views
from longstride.serving.failures import StoppingError
from longstride.serving.scores import look_at, passes, score_pass
from longstride.serving.served import Served
from longstride.serving.views import FILES, MOST_BYTES, page_router
from tests.model.small import model

DATA = list(range(40))
UNSAFE = ("https://", "innerHTML", "outerHTML", "insertAdjacentHTML", "eval(", "document.write")
OUTSIDE = (
    "../views.py",
    "..%2fviews.py",
    "%2e%2e/views.py",
    "views.py",
    "none.js",
    "",
    "%00",
    "..\\views.py",
    "/etc/passwd",
)


class Engine:
    """Runs what it is given at once, and counts."""

    def __init__(self):
        self.runs = 0

    async def run(self, function):
        self.runs += 1
        return function()


def serve(kind=None, run=None, **changes):
    app, engine = FastAPI(), Engine()
    served = Served("small", model(**changes).eval(), kind or Text(), run=run)
    app.include_router(page_router(served, engine))
    client = TestClient(app)
    client.served, client.engine = served, engine
    return client


@pytest.fixture(scope="module")
def client():
    return serve()


def refused(response, status=400, param=None):
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert "\n" not in error["message"]
    return error["message"]


def test_the_page_runs_nothing_from_elsewhere(client):
    page = client.get("/")
    assert page.headers["content-type"].startswith("text/html")
    policy = page.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
    assert "unsafe" not in policy
    for content, kind in FILES.values():
        if kind != "image/svg+xml":
            text = content.decode()
            assert not any(word in text for word in UNSAFE)


def test_lines_stay_short():
    for name, (content, _) in FILES.items():
        assert max(map(len, content.decode().splitlines())) <= 125, name


def test_every_file_that_is_named_is_there(client):
    for content, _ in FILES.values():
        for word in content.decode().replace("'", '"').split('"'):
            if word.startswith(("./", "/static/")):
                assert client.get(f"/static/{word.rpartition('/')[2]}").status_code == 200, word
    assert client.get("/static/main.js").headers["content-type"].startswith("text/javascript")
    assert client.get("/static/style.css").headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("name", OUTSIDE)
def test_nothing_else_is_read(client, name):
    response = client.get(f"/static/{name}")
    assert response.status_code == 404
    assert "import" not in response.text


def test_about(client):
    about = client.get("/page/about").json()
    assert (about["name"], about["kind"], about["context"], about["heads"]) == ("small", "text", 24, 2)
    assert about["most_bytes"] == MOST_BYTES
    assert client.get("/page/samples").json()["samples"][0]["name"] == "Hoosier Hysteria"


def test_the_curve_is_read_again_when_it_has_grown(tmp_path):
    client = serve(run=tmp_path)
    assert client.get("/page/about").json()["run"] is None
    for step in (1, 2):
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, "bits_per_byte": 4.0}) + "\n")
        assert client.get("/page/about").json()["run"]["training"][-1] == [step, 4.0]
    assert str(tmp_path) not in client.get("/page/about").text


def test_scores(client):
    before = client.engine.runs
    answer = client.post("/page/scores", json={"bytes": DATA}).json()
    made = client.served.model
    expected = np.concatenate([score_pass(made, bytes(DATA), part) for part in passes(made.config, len(DATA))])
    assert np.allclose(answer["bits"], expected, atol=1e-5)
    assert answer["bits_per_byte"] == pytest.approx(expected.mean(), abs=1e-5)
    assert client.engine.runs > before  # Only the engine may run the model.


def test_look(client):
    answer = client.post("/page/look", json={"bytes": DATA, "position": 30}).json()
    seen = look_at(client.served.model, bytes(DATA), 30)
    assert answer["byte"] == DATA[30]
    assert answer["probability"] == pytest.approx(seen.probabilities[30])
    assert len(answer["likely"]) == 16
    chances = [chance for _, chance in answer["likely"]]
    assert chances == sorted(seen.probabilities, reverse=True)[:16]
    assert answer["rank"] == 1 + sum(seen.probabilities > seen.probabilities[30])
    levels = np.frombuffer(base64.b64decode(answer["levels"]), np.uint8).reshape(3, 2, -1)
    assert (levels == seen.levels).all()
    assert (answer["first"], answer["layers"]) == (seen.first, [0, 1, 2])
    some = client.post("/page/look", json={"bytes": DATA, "position": 0, "layers": [2]}).json()
    assert some["layers"] == [2]


@pytest.mark.parametrize(
    "value", [None, [], "abc", {}, [256], [-1], [1.0], [True], [None], ["1"], [[1]], [1e400], [10**30], 5]
)
def test_bytes_must_be_bytes(client, value):
    for place in ("scores", "look"):
        content = json.dumps({"bytes": value, "position": 0} if place == "look" else {"bytes": value})
        headers = {"content-type": "application/json"}
        response = client.post(f"/page/{place}", content=content, headers=headers)
        assert response.status_code == 400
        assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("position", [None, -1, 40, 10**30, 1.5, "1", True, [0]])
def test_position_must_be_in_the_bytes(client, position):
    message = refused(client.post("/page/look", json={"bytes": DATA, "position": position}), param="position")
    assert message.startswith("position must be ")


def test_errors_repeat_little_of_a_long_value(client):
    for position in (10**3999, -(10**3999), "1" * 4000, [1] * 4000):
        message = refused(client.post("/page/look", json={"bytes": DATA, "position": position}), param="position")
        assert len(message) < 250
        assert message.startswith("position must be at most 39, got 1000") == (position == 10**3999)


@pytest.mark.parametrize("layers", [[], [3], [-1], ["0"], 0, "all", [0, 0], [0, 1, 2, 0], [True]])
def test_layers_must_be_layers(client, layers):
    message = refused(client.post("/page/look", json={"bytes": DATA, "position": 5, "layers": layers}), param="layers")
    assert message.startswith("layers must be ")


def test_sizes_are_limited(client):
    message = refused(client.post("/page/scores", json={"bytes": [0] * (MOST_BYTES + 1)}), param="bytes")
    assert message == "bytes has 65,537; give at most 65,536"
    images = serve(Images((4, 2, 3)), embedding="image(4, 2, 3)")
    refused(images.post("/page/scores", json={"bytes": [0] * 25}), param="bytes")
    assert images.post("/page/scores", json={"bytes": [0] * 24}).status_code == 200


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"1", b"\xff", b'{"bytes": NaN}', b"[" * 5000, b'{"other": 1}'])
def test_bodies_must_be_objects(client, content):
    headers = {"content-type": "application/json"}
    refused(client.post("/page/scores", content=content, headers=headers))


def test_other_content_is_refused(client):
    """A form of another site could send it without being asked."""
    content = json.dumps({"bytes": DATA})
    refused(client.post("/page/scores", content=content, headers={"content-type": "text/plain"}), 415)


def test_requests_that_wait_are_limited(client, monkeypatch):
    monkeypatch.setattr(views, "MOST_REQUESTS", 0)
    response = client.post("/page/scores", json={"bytes": DATA})
    refused(response, 429)
    assert response.headers["retry-after"] == "1"


def test_a_server_that_stops_says_so(monkeypatch):
    async def stopping(function):
        raise StoppingError("the server is stopping")

    client = serve()
    monkeypatch.setattr(client.engine, "run", stopping)
    refused(client.post("/page/scores", json={"bytes": DATA}), 503)
    refused(client.post("/page/look", json={"bytes": DATA, "position": 0}), 503)


def test_weights_that_are_not_finite_are_told(client):
    broken = serve()
    broken.served.model.output.weight.data.fill_(float("nan"))
    answer = broken.post("/page/scores", json={"bytes": DATA}).json()
    assert answer == {"bits": [None] * 40, "bits_per_byte": None}
    assert broken.post("/page/look", json={"bytes": DATA, "position": 3}).json()["probability"] == 0


def test_a_client_that_leaves_stops_the_work():
    made = serve()
    left = []

    class Gone:
        async def is_disconnected(self):
            left.append(True)
            return len(left) > 1

    desk = views.Desk(made.served, made.engine)
    data = DATA * 1000
    with pytest.raises(views.RequestError, match="left"):
        asyncio.run(desk.scores({"bytes": data}, Gone()))
    assert made.engine.runs == 1
    assert desk.waiting == 0
