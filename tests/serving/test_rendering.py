"""Long answers: rendered and sent in parts, between which others are served."""

import asyncio
import json
from itertools import pairwise

import pytest

from longstride.serving import rendering
from longstride.serving.choices import Choice
from longstride.serving.rendering import WholeChoice, whole_answer
from tests.serving.small import app, client, served

BODY = {"prompt": "Thé cat 'sat'\n\\", "n": 2, "max_tokens": 20, "seed": 1, "echo": True, "logprobs": 3, "stop": "\x00"}


@pytest.fixture(scope="module")
def tiny():
    return served()


async def post(made, body, log, leaves=False):
    """Sends a request, without a server. Beside it, something else notes in the log whenever the event loop gets to it."""
    content, sent, is_done = json.dumps(body).encode(), list[dict](), False

    async def other():
        while not is_done:
            log.append("other")
            await asyncio.sleep(0)

    async def receive():
        if not sent and not log.count("received"):
            log.append("received")
            return {"type": "http.request", "body": content}
        if leaves:
            return {"type": "http.disconnect"}
        await asyncio.get_running_loop().create_future()

    async def send(message):
        if message["type"] == "http.response.body" and message.get("body"):
            log.append("send")
        sent.append(message)

    headers = [(b"host", b"localhost"), (b"content-type", b"application/json"), (b"content-length", b"%d" % len(content))]
    scope = {
        "type": "http", "method": "POST", "path": "/v1/completions", "headers": headers, "query_string": b"",
        "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http", "server": ("localhost", 80), "root_path": "",
    }  # fmt: skip
    made.state.engine.start()
    beside = asyncio.create_task(other())
    try:
        await asyncio.wait_for(made(scope, receive, send), 60)
    finally:
        is_done = True
        await beside
        await made.state.engine.stop()
    return sent


@pytest.mark.parametrize("stream", [False, True])
def test_others_are_served_between_the_parts_of_an_answer(tiny, monkeypatch, stream):
    monkeypatch.setattr("longstride.serving.choices.MOST_NUMBERS", 20)
    monkeypatch.setattr(rendering, "PART_BYTES", 64)
    log, chunk = list[str](), Choice._chunk
    monkeypatch.setattr(Choice, "_chunk", lambda self, *args: log.append("render") or chunk(self, *args))
    sent = asyncio.run(post(app(tiny), {**BODY, "stream": stream}, log))
    assert sent[0]["status"] == 200
    assert log.count("render") > 2 * 35 // 5  # Two choices of a prompt and 20 bytes, 5 numbers each, 20 at a time.
    assert not any(one == two != "other" for one, two in pairwise(log))
    if not stream:
        sizes = [len(message["body"]) for message in sent[1:]]
        assert max(sizes) <= 64
        assert dict(sent[0]["headers"])[b"content-length"] == str(sum(sizes)).encode()


def test_an_answer_in_parts_is_the_same_as_in_one(tiny, monkeypatch):
    def found():
        with client(tiny) as api:
            answer = api.post("/v1/completions", json=BODY)
        assert answer.headers["content-type"] == "application/json"
        return {**answer.json(), "id": "", "created": 0}

    whole = found()
    monkeypatch.setattr("longstride.serving.choices.MOST_NUMBERS", 7)
    monkeypatch.setattr(rendering, "PART_BYTES", 5)
    assert found() == whole
    (first, _) = whole["choices"]
    assert first["text"].startswith(BODY["prompt"])
    assert list(first) == ["index", "text", "byte_ids", "logprobs", "finish_reason"]
    assert {len(values) for values in first["logprobs"].values()} == {len(first["byte_ids"])}


def test_choices_of_nothing():
    for likely, logprobs in ((None, None), (2, {})):
        whole = WholeChoice(Choice(3, b"", False, likely))
        for chunk in whole.choice.chunks(rendering.Piece(finish="length")):
            whole.add(chunk)
        (made,) = json.loads(whole_answer({"id": "a"}, [whole], {}).body)["choices"]
        assert made["byte_ids"] == []
        assert (made["logprobs"] is None) == (logprobs is None)
        assert made["index"] == 3


def test_a_client_that_leaves_gets_no_half_of_an_answer(tiny):
    made = app(tiny)
    body = {"prompt": "a", "max_tokens": 10**6, "overflow": "slide"}
    assert asyncio.run(post(made, body, [], leaves=True)) == []
    assert dict(made.state.http.statuses) == {0: 1}
    assert made.state.engine.counts.samples["length"] == 0
