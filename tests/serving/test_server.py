"""A real server: the official client, curl, clients that leave, malformed requests, and its end."""

import contextlib
import functools
import json
import operator
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from longstride.serving import server as connections
from longstride.serving.answers import Job
from tests.serving import malformed
from tests.serving.small import alone, served, server


@pytest.fixture(scope="module")
def tiny():
    return served()


@pytest.fixture(scope="module")
def running(tiny):
    with server(tiny) as made:
        yield made


@pytest.fixture(scope="module")
def openai(running):
    return pytest.importorskip("openai").OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)


def test_openai(openai, tiny):
    found = openai.completions.create(model="tiny", prompt="The ", max_tokens=12, seed=3, temperature=1.0, top_p=1.0)
    expected = alone(tiny.model, Job(b"The ", 12, seed=3))
    assert found.choices[0].text == expected.decode("utf-8", "replace")
    assert found.choices[0].byte_ids == list(expected)
    assert found.usage.completion_tokens == 12
    assert [model.id for model in openai.models.list()] == ["tiny"]
    assert openai.models.retrieve("tiny").context == 64


def test_openai_streams(openai, tiny):
    chunks = list(openai.completions.create(model="tiny", prompt="é", max_tokens=12, seed=3, n=2, stream=True))
    for index in range(2):
        text = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices[0].index == index)
        assert text == alone(tiny.model, Job("é".encode(), 12, seed=3, index=index)).decode("utf-8", "replace")


def test_openai_knows_our_errors(openai):
    module = pytest.importorskip("openai")
    with pytest.raises(module.BadRequestError) as refused:
        openai.completions.create(model="tiny", prompt="a" * 100)
    assert refused.value.code == "context_length_exceeded"
    with pytest.raises(module.NotFoundError):
        openai.completions.create(model="gpt-9", prompt="a")
    with pytest.raises(module.BadRequestError, match="suffix"):
        openai.completions.create(model="tiny", prompt="a", suffix="b")


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_curl(running, tiny):
    def curl(*arguments):
        return subprocess.run(["curl", "--silent", "--max-time", "30", *arguments], capture_output=True, check=True).stdout

    head = [f"{running.url}/v1/completions", "-H", "Content-Type: application/json", "-d"]
    body = {"prompt": "The ", "max_tokens": 8, "seed": 1}
    expected = list(alone(tiny.model, Job(b"The ", 8, seed=1)))
    assert json.loads(curl(*head, json.dumps(body)))["choices"][0]["byte_ids"] == expected
    lines = curl("--no-buffer", *head, json.dumps({**body, "stream": True})).decode().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    assert functools.reduce(operator.iadd, (chunk["choices"][0]["byte_ids"] for chunk in chunks), []) == expected
    assert json.loads(curl(f"{running.url}/health")) == {"status": "ok"}
    assert b"longstride_running" in curl(f"{running.url}/metrics")


def ask(port, **body):
    """Opens a connection, sends a request and returns the connection."""
    connection = socket.create_connection(("127.0.0.1", port), timeout=60)
    connection.sendall(malformed.http(json.dumps(body).encode()))
    return connection


def wait_until(condition):
    tick, deadline = threading.Event(), 6000
    while not condition() and deadline:
        tick.wait(0.01)
        deadline -= 1
    assert condition()


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_place(tiny, stream):
    with server(tiny, streams=1, queue=1) as made:
        counts = made.app.state.engine.counts
        endless = {"prompt": "a", "max_tokens": 10**6, "overflow": "slide", "stream": stream}
        first = ask(made.port, **endless)
        wait_until(lambda: counts.running == 1)
        second = ask(made.port, **endless)
        wait_until(lambda: counts.waiting == 1)
        with ask(made.port, prompt="b") as third:
            answer = third.recv(65536).decode()
        assert answer.startswith("HTTP/1.1 429 ")
        assert "retry-after:" in answer.lower()
        second.close()
        wait_until(lambda: counts.waiting == 0)
        first.close()
        wait_until(lambda: counts.running == 0)
        assert counts.samples["left"] == 2
        with ask(made.port, prompt="b", max_tokens=3, seed=1) as last:
            assert last.recv(65536).startswith(b"HTTP/1.1 200 ")


def hurl(port, count, seed):
    rng = random.Random(seed)
    requests = [malformed.request(rng) for _ in range(count)]
    with ThreadPoolExecutor(8) as pool:
        statuses = list(pool.map(lambda given: malformed.send(port, *given), requests))
    bad = [(given[:200], half, status) for (given, half), status in zip(requests, statuses) if not 400 <= status < 500]
    assert not bad
    return Counter(statuses)


def check_malformed(made, tiny, count):
    statuses = hurl(made.port, count, 0)
    assert statuses[400] > count / 3
    assert made.app.state.engine.counts.running == made.app.state.engine.counts.waiting == 0
    assert malformed.send(made.port, malformed.http(b'{"prompt": "a", "max_tokens": 2}'), False) == 200
    assert malformed.send(made.port, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n", False) == 200
    assert max(made.app.state.http.statuses) < 500


def test_malformed_requests(running, tiny):
    check_malformed(running, tiny, 300)


@pytest.mark.slow
def test_ten_thousand_malformed_requests(tiny):
    with server(tiny) as made:
        check_malformed(made, tiny, 10_000)


def test_half_requests_and_connections_that_just_close(running):
    whole = malformed.http(b'{"prompt": "a", "max_tokens": 2}')
    for size in (0, 1, 20, len(whole) - 5):
        with socket.create_connection(("127.0.0.1", running.port), timeout=30) as connection:
            connection.sendall(whole[:size])
    assert malformed.send(running.port, whole, False) == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/nothing"])
@pytest.mark.parametrize("at_once", [True, False])
def test_a_body_that_breaks_off_is_no_error_of_ours(running, caplog, path, at_once):
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    with socket.create_connection(("127.0.0.1", running.port), timeout=60) as connection:
        parts = [head.encode(), b"no number\r\n"]
        answer = b""
        for part in [b"".join(parts)] if at_once else parts:
            connection.sendall(part)
            if path == "/nothing" and not at_once and not answer:
                answer = connection.recv(65536)
        with contextlib.suppress(ConnectionResetError):
            while part := connection.recv(65536):
                answer += part
    assert re_status(answer) in (400, 404)
    assert malformed.send(running.port, HEALTH, False) == 200
    assert not caplog.records


def test_a_client_that_closes_its_half_gets_no_late_answer(tiny, monkeypatch):
    page = Path(__file__).parents[2] / "docs" / "serving.md"
    assert f"gets no answer that takes longer than {connections.HALF_CLOSED_SECONDS} s." in page.read_text()
    monkeypatch.setattr(connections, "HALF_CLOSED_SECONDS", 0.05)
    with server(tiny) as made, ask(made.port, prompt="a", max_tokens=10**6, overflow="slide") as connection:
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(65536) == b""
        wait_until(lambda: made.app.state.engine.counts.samples["left"] == 1)


HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.mark.parametrize("begin", [b"", HEALTH[:20], HEALTH + b"G"])
def test_silent_connections_are_closed(tiny, monkeypatch, begin):
    monkeypatch.setattr(connections, "WATCH_SECONDS", 0.05)
    with server(tiny) as made, socket.create_connection(("127.0.0.1", made.port), timeout=60) as connection:
        connection.sendall(begin)
        answer = b""
        with contextlib.suppress(ConnectionResetError):
            while part := connection.recv(65536):
                answer += part
        assert (b" 200 OK" in answer) == begin.endswith(b"G")


def test_a_client_that_reads_nothing_is_left(tiny, monkeypatch):
    monkeypatch.setattr(connections, "WATCH_SECONDS", 0.2)
    with server(tiny) as made, socket.socket() as connection:
        wait_until(lambda: made.started)
        # What the machine itself keeps for a reader is small.
        made.servers[0].sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", made.port))
        body = {"prompt": "a", "max_tokens": 10**5, "overflow": "slide", "stream": True, "logprobs": 20}
        connection.sendall(malformed.http(json.dumps(body).encode()))
        counts = made.app.state.engine.counts
        wait_until(lambda: counts.samples["left"] == 1)
        assert counts.bytes < 10**5


def test_answers_that_take_long_are_waited_for(tiny, monkeypatch):
    monkeypatch.setattr(connections, "WATCH_SECONDS", 0.01)
    with server(tiny) as made, ask(made.port, prompt="a", max_tokens=500, overflow="slide") as connection:
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")


def test_few_connections_are_accepted_at_a_time_and_many_wait(tiny):
    with server(tiny) as made:
        wait_until(lambda: made.started)
        assert made.config.backlog == connections.ACCEPTED
        assert 4 * connections.ACCEPTED < connections.OTHER_FILES
        listener = made.servers[0].sockets[0]._sock
        calls = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(socket.socket, "listen", lambda self, backlog: calls.append(backlog))
            listener.listen(connections.ACCEPTED)
        assert calls == [connections.BACKLOG]


def test_more_connections_than_files_are_closed(tiny, monkeypatch):
    monkeypatch.setattr(connections, "most_connections", lambda: 3)
    with server(tiny) as made, contextlib.ExitStack() as stack:
        for _ in range(3):
            connection = stack.enter_context(ask(made.port, prompt="a", max_tokens=2))
            assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
        refused = stack.enter_context(socket.create_connection(("127.0.0.1", made.port), timeout=60))
        with contextlib.suppress(ConnectionResetError):
            assert refused.recv(1) == b""
        connection.close()
        wait_until(lambda: len(made.server_state.connections) == 2)
        with ask(made.port, prompt="a", max_tokens=2) as last:
            assert last.recv(65536).startswith(b"HTTP/1.1 200 ")


@contextlib.contextmanager
def process_of(tiny, folder, *flags):
    """Runs `longstride serve`: yields the process and its port."""
    tiny.model.save_pretrained(folder)
    command = [sys.executable, "-m", "longstride", "serve", str(folder), "--port", "0", "--kind", "text", "--name", "tiny",
               "--streams", "2", "--overflow", "slide", *flags]  # fmt: skip
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        line = process.stderr.readline()
        assert "serving tiny on http://127.0.0.1:" in line, line + process.stderr.read()
        yield process, int(line.split("127.0.0.1:")[1].split(":")[0])
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def receive_all(connection) -> bytes:
    content = b""
    while part := connection.recv(65536):
        content += part
    return content


def test_sigterm_finishes_what_is_under_way(tiny, tmp_path):
    with process_of(tiny, tmp_path / "model") as (process, port):
        with ask(port, prompt="a", max_tokens=400, seed=6, stream=True) as connection:
            content = connection.recv(65536)
            assert content.startswith(b"HTTP/1.1 200 ")
            process.send_signal(signal.SIGTERM)
            content += receive_all(connection)
        assert b"data: [DONE]" in content
        made = b"".join(
            bytes(json.loads(line[6:])["choices"][0]["byte_ids"])
            for line in content.split(b"\n")
            if line.startswith(b"data: {")
        )
        assert made == alone(tiny.model, Job(b"a", 400, seed=6))
        assert process.wait(60) == 0
        assert process.stderr.read() == ""
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=5)


def test_sigterm_ends_what_takes_longer_than_the_grace(tiny, tmp_path):
    endless = {"prompt": "a", "max_tokens": 10**6}
    with (
        process_of(tiny, tmp_path / "model", "--grace", "0") as (process, port),
        ask(port, **endless) as whole,
        ask(port, **endless, stream=True) as stream,
        ask(port, **endless, stream=True) as queued,
    ):
        for connection in (stream, queued):
            assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
        process.send_signal(signal.SIGTERM)
        head, _, body = receive_all(whole).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 5" in head.lower()
        assert json.loads(body)["error"]["code"] == "stopping"
        for connection in (stream, queued):
            content = receive_all(connection)
            *_, last = (line for line in content.split(b"\n") if line.startswith(b"data: "))
            assert json.loads(last[6:])["error"]["code"] == "stopping"
            assert content.endswith(b"\r\n0\r\n\r\n")
        assert process.wait(60) == 0
        said = process.stderr.read()
        assert "Traceback" not in said
        assert said.count("\n") <= 1


def test_a_second_interrupt_does_not_wait(tiny, tmp_path):
    with (
        process_of(tiny, tmp_path / "model") as (process, port),
        ask(port, prompt="a", max_tokens=10**6, stream=True) as connection,
    ):
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
        process.send_signal(signal.SIGINT)
        while True:  # Until it has heard that.
            try:
                socket.create_connection(("127.0.0.1", port), timeout=5).close()
            except OSError:
                break
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0  # And not aborted by the thread of the model.
        assert process.stderr.read() == ""


def test_no_path_of_the_machine_is_shown(running):
    """Not in answers to malformed requests, nor by any address."""
    home = str(Path.home())
    rng = random.Random(5)
    paths = [f"/{prefix}{name}" for prefix in ("", "static/", "v1/models/", "page/", "..%2f", "static/..%2f..%2f")
             for name in ("etc/passwd", "../../etc/passwd", "%2e%2e/app.py", "config.json", "__class__")]  # fmt: skip
    requests = [f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode() for path in paths]
    requests += [malformed.wrong_field(rng).replace(b"Host:", b"Connection: close\r\nHost:") for _ in range(30)]
    for request in requests:
        with socket.create_connection(("127.0.0.1", running.port), timeout=30) as connection:
            connection.sendall(request)
            answer = b""
            while part := connection.recv(65536):
                answer += part
        assert re_status(answer) in range(400, 500), request
        for word in ("root:", "site-packages", "/src/", "longstride/", "Traceback", home + "/"):
            assert word.encode() not in answer.partition(b"\r\n\r\n")[2], (request, answer)


def re_status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])
