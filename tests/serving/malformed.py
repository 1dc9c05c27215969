"""Malformed requests as raw bytes: types, sizes, unicode, nesting, huge numbers, broken HTTP, half-closed connections."""

import json
import random
import re
import socket

WRONG: dict[str, list[object]] = {
    "prompt": [5, 1.5, True, {}, [], [256], [-1], [1, "a"], [[1], "a"], [None], [[[1]]], {"a": 1}, "a" * 3000, [10**400]],
    "max_tokens": ["5", -1, 1.5, 10**30, True, [], {}, float("1e300")],
    "temperature": ["hot", -1, 1e300, [], {}, True, 1e-9],
    "top_p": ["x", -0.1, 1.1, 10**400, [], True],
    "top_k": [0, 257, "1", 1.5, True],
    "n": [0, -1, 129, 10**50, "1", 1.5, True, []],
    "best_of": [0, 2, "1", True],
    "seed": [2**64, -(2**63) - 1, "1", 1.5, True, [1]],
    "stop": ["", ["a"] * 17, [1], 5, {}, [""], "a" * 2000, [["a"]], "\ud800"],
    "echo": [1, "true", [], {}],
    "logprobs": [-1, 21, "1", True, 1.5],
    "stream": [1, "true", []],
    "stream_options": [{}, 5, {"include_usage": True}],
    "user": [5, "a" * 2000, []],
    "overflow": ["wrap", 5, ""],
    "suffix": ["end", 5],
    "logit_bias": [{"1": 5}, [], 5],
    "presence_penalty": [1, "0", False],
    "model": ["gpt-9", 5, [], {}, "../../etc/passwd", "\x00"],
}
"""Values that no request may have."""
STRANGE = ["\ud800", "\u202e", "\x00", "é" * 40, "💥", "a" * 200, "__proto__", "../../etc/passwd", "%00", "${x}"]


def http(body: bytes, host: str = "localhost", **headers: str) -> bytes:
    given = {"Host": host, "Content-Type": "application/json", "Content-Length": str(len(body)), **headers}
    lines = [f"{name}: {value}" for name, value in given.items() if value]
    return ("POST /v1/completions HTTP/1.1\r\n" + "\r\n".join(lines) + "\r\n\r\n").encode("utf-8", "surrogatepass") + body


def request(rng: random.Random) -> tuple[bytes, bool]:
    """Returns a malformed request, and whether its sender then closes its half of the connection."""
    return rng.choice(MAKERS)(rng), rng.random() < 0.1


def wrong_field(rng: random.Random) -> bytes:
    field = rng.choice(list(WRONG))
    body = {"prompt": "a", "max_tokens": 1, field: rng.choice(WRONG[field])}
    return http(json.dumps(body).encode())


def unknown_field(rng: random.Random) -> bytes:
    return http(json.dumps({"prompt": "a", rng.choice(STRANGE): rng.choice([1, None, [], "x"])}).encode())


def no_object(rng: random.Random) -> bytes:
    return http(rng.choice([b"", b"[]", b"5", b"null", b'"x"', b"true", b"NaN", b"-Infinity", b"1e999", b"\xef\xbb\xbf{}"]))


def broken_json(rng: random.Random) -> bytes:
    good = b'{"prompt": "abc", "max_tokens": 3, "stop": ["x"]}'
    kind = rng.randrange(3)
    if kind == 0:
        return http(good[: rng.randrange(len(good))])
    at = rng.randrange(1, len(good) - 1)
    if kind == 1:  # A byte that is no UTF-8.
        return http(good[:at] + bytes([rng.choice([0xFF, 0xC0, 0xED, 0x80])]) + good[at:])
    return http(good + rng.choice([b"}", b"]", b",", b"{}", b"x"]))


def nested(rng: random.Random) -> bytes:
    depth = rng.choice([33, 100, 1000, 50_000])
    opening, closing = rng.choice([(b"[", b"]"), (b'{"a":', b"}")])
    middle = opening * depth + b"1" + (closing * depth if rng.random() < 0.5 else b"")
    return http(b'{"prompt": ' + middle + b"}")


def huge_number(rng: random.Random) -> bytes:
    digits = b"9" * rng.choice([20, 400, 5000, 20_000])
    number = rng.choice([digits, b"-" + digits, b"1e" + digits[:9], digits + b".5e" + digits[:5]])
    field = rng.choice(["max_tokens", "n", "seed", "top_k", "logprobs", "best_of"])
    return http(b'{"prompt": "a", "' + field.encode() + b'": ' + number + b"}")


def wrong_head(rng: random.Random) -> bytes:
    body = b'{"prompt": "a"}'
    return rng.choice(
        [
            http(body, host="evil.com"),
            http(body, host=""),
            http(body, Origin="https://evil.com"),
            http(body, **{"Content-Type": "text/plain"}),
            http(body, **{"Content-Type": ""}),
            http(body, **{"Content-Length": "99999999999"}),
            http(body, **{"Content-Length": "-5"}),
            http(body, **{"Content-Length": "five"}),
            http(body, **{"Content-Length": "9" * 40}),
            http(body + b"\r\n", **{"Transfer-Encoding": "chunked", "Content-Length": ""}),
            http(body).replace(b"/v1/completions", b"/v1/nothing"),
            http(body).replace(b"POST", b"PUT"),
            http(body).replace(b"HTTP/1.1", b"HTTP/x"),
            http(body).replace(b"Host:", b"Host"),
            http(body).replace(b"/v1/completions", b"/../../etc/passwd"),
        ]
    )


def noise(rng: random.Random) -> bytes:
    return rng.choice(
        [
            rng.randbytes(rng.randrange(1, 200)) + b"\r\n\r\n",
            b"GET /v1/nothing HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 100_000 + b"\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(100) + b"\r\n\r\n",
        ]
    )


MAKERS = [wrong_field, wrong_field, unknown_field, no_object, broken_json, nested, huge_number, wrong_head, noise]


def send(port: int, content: bytes, closes_half: bool, seconds: float = 30) -> int:
    """Sends a request and returns the status of the answer; 0 if the connection ended without one."""
    with socket.create_connection(("127.0.0.1", port), timeout=seconds) as connection:
        try:
            connection.sendall(content)
            if closes_half:
                connection.shutdown(socket.SHUT_WR)
            answer = b""
            while b"\r\n" not in answer and (part := connection.recv(65536)):
                answer += part
        except (BrokenPipeError, ConnectionResetError):
            return 0
    found = re.match(rb"HTTP/1\.[01] (\d{3}) ", answer)
    return int(found[1]) if found else 0
