"""Who may use the server: hosts, origins, keys, and bodies of limited size."""

import asyncio

import pytest

from longstride.serving import guard
from longstride.serving.metrics import HttpCounts
from tests.serving.small import app, client

BODY = {"prompt": "a", "max_tokens": 1}


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "localhost:8000",
        "LOCALHOST.",
        "127.0.0.1:8000",
        "127.0.0.1",
        "[::1]:8000",
        "192.168.1.5:80",
        "my.server",
    ],
)
def test_names_and_addresses_of_this_server(host):
    with client(allowed_hosts=("my.server",)) as made:
        assert made.get("/health", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    ["evil.com", "localhost.evil.com", "evil.com:8000", "", "127.0.0.1.evil.com", "user@localhost", "localhost@evil.com",
     "[::1", "localhost:port", "0x7f.1", "é", "localhost/evil.com", "localhost#evil.com", "localhost?", "localhost:99999",
     "localhost, evil.com", "[fe80::1%evil.com]"],
)  # fmt: skip
def test_other_names_are_refused(host):
    with client() as made:
        found = made.post("/v1/completions", json=BODY, headers={"host": host.encode()})
    assert found.status_code == 403
    assert found.json()["error"]["code"] == "host_not_allowed"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/models", "/metrics", "/health", "/"])
@pytest.mark.parametrize(
    "origin",
    ["https://evil.com", "http://localhost:9000", "null", "http://localhost:8000.evil.com", "", "http://[", "http://[::1]x",
     "http://localhost:8000/evil.com", "file://localhost:8000", "http://evil.com@localhost:8000"],
)  # fmt: skip
def test_other_origins_are_refused(path, origin):
    with client() as made:
        for method in ("GET", "POST", "OPTIONS"):
            found = made.request(method, path, headers={"origin": origin})
            assert found.status_code == 403
            assert not [name for name in found.headers if name.startswith("access-control")]


def test_a_page_of_this_server_may_use_it():
    with client() as made:
        found = made.post("/v1/completions", json=BODY, headers={"origin": "http://localhost:8000"})
        assert found.status_code == 200
        found = made.post("/v1/completions", json=BODY, headers={"sec-fetch-site": "same-origin"})
        assert found.status_code == 200
        found = made.post("/v1/completions", json=BODY, headers={"sec-fetch-site": "cross-site"})
        assert found.status_code == 403


def test_no_cors_headers_and_headers_that_protect():
    with client() as made:
        found = made.get("/v1/models")
    assert not [name for name in found.headers if name.startswith("access-control")]
    assert found.headers["x-content-type-options"] == "nosniff"
    assert "frame-ancestors 'none'" in found.headers["content-security-policy"]
    assert found.headers["cross-origin-resource-policy"] == "same-origin"


def test_a_form_of_another_site_is_no_request():
    """What a browser sends without asking first."""
    with client() as made:
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
            found = made.post("/v1/completions", content=b'{"prompt": "a"}', headers={"content-type": kind})
            assert found.status_code == 415
        assert made.post("/v1/completions", content=b'{"prompt": "a"}').status_code == 415


def test_a_key(tmp_path, monkeypatch):
    path = tmp_path / "key"
    path.write_text("s3cret\n")
    with client(api_key_file=path) as made:
        for given in ({}, {"authorization": "Bearer wrong"}, {"authorization": "s3cret"}, {"authorization": "Basic s3cret"},
                      {"authorization": "Bearer s3cre"}, {"authorization": b"Bearer \xff"}):  # fmt: skip
            for place in ("/v1/models", "/v1/completions", "/metrics", "/page/x", "/nothing"):
                found = made.post(place, json=BODY, headers=given)
                assert (found.status_code, found.json()["error"]["code"]) == (401, "invalid_api_key")
        headers = {"authorization": "bearer s3cret"}
        assert made.get("/v1/models", headers=headers).status_code == 200
        assert made.post("/v1/completions", json=BODY, headers=headers).status_code == 200
        assert made.get("/health").status_code == 200
    monkeypatch.setenv("LONGSTRIDE_API_KEY", "other")
    with client() as made:
        assert made.get("/v1/models").status_code == 401
        assert made.get("/v1/models", headers={"authorization": "Bearer other"}).status_code == 200


@pytest.mark.parametrize("key", ["", "two words", "two\nlines", "é"])
def test_a_key_that_is_none(tmp_path, key):
    path = tmp_path / "key"
    path.write_text(key)
    with pytest.raises(ValueError, match="must hold a key"):
        app(api_key_file=path)


def test_large_bodies():
    with client() as made:
        for content in (b"[" * 2**24, b'"' + b"a" * 2**24):
            found = made.post("/v1/completions", content=content, headers={"content-type": "application/json"})
            assert (found.status_code, found.json()["error"]["code"]) == (413, "request_too_large")

            def parts(content=content):
                for start in range(0, len(content), 2**20):
                    yield content[start : start + 2**20]

            found = made.post("/v1/completions", content=parts(), headers={"content-type": "application/json"})
            assert found.status_code == 413


def test_headers_that_come_twice():
    with client() as made:
        found = made.get("/health", headers=[("host", "localhost"), ("host", "evil.com")])
    assert found.status_code == 400


@pytest.mark.parametrize("begins", [True, False], ids=["a stream", "a whole answer"])
def test_a_client_that_reads_nothing_does_not_keep_the_server_from_its_end(monkeypatch, begins):
    monkeypatch.setattr(guard, "REFUSAL_SECONDS", 0.01)
    sent = []

    async def endless(scope, receive, send):
        if begins:
            head = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}
            await send(head)
        started.set()
        await asyncio.Event().wait()

    async def send(message):
        sent.append(message)
        if started.is_set():
            await asyncio.Event().wait()

    async def stop():
        scope = {"type": "http", "path": "/", "headers": [(b"host", b"localhost")]}
        task = asyncio.create_task(guard.Guard(endless, None, (), HttpCounts())(scope, None, send))
        await started.wait()
        task.cancel()
        async with asyncio.timeout(60):
            await task

    started = asyncio.Event()
    asyncio.run(stop())
    assert len(sent) == 1 + begins
    assert b'"code": "stopping"' in sent[1]["body"] if begins else sent[0]["status"] == 503
