"""Load on a server: many clients at once, each answer compared with that of the same request alone, and the server's memory.

python benchmarks/serve_load.py --clients 100 --seconds 120 --json benchmarks/results/serve-cpu.json

Serves `text-small` with random weights by `longstride serve`, unless --model names a run or a saved model. First sends each
of --requests different requests alone, then all clients send them in random order. Fails if a status is not 200, an answer
differs, or memory grows by more than a twentieth in the second half.
"""

import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory, TemporaryFile
from time import perf_counter
from typing import IO, Any

import torch

from longstride.common.device import describe_machine
from longstride.model import SparseTransformer, preset

GROWTH = 1.05
"""The most that memory may grow in the second half of the time."""
PROMPTS = ["", "The ", "In the year ", "é€💥 ", "[[Category:", "0123456789" * 20]


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="a run or a saved model of text")
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        model = options.model or save_random_model(Path(folder) / "text-small")
        result = asyncio.run(measure(model, options.clients, options.seconds, options.requests))
    print(json.dumps({name: value for name, value in result.items() if name != "memory"}, indent=2))
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    if result["different"] or result["statuses"].keys() != {200} or result["memory_growth"] > GROWTH:
        sys.exit("the server did not pass")


def save_random_model(folder: Path) -> Path:
    torch.manual_seed(0)
    model = SparseTransformer(preset("text-small"))
    torch.nn.init.normal_(model.output.weight, std=model.config.width**-0.5)
    model.save_pretrained(folder)
    return folder


def make_requests(count: int) -> list[dict[str, Any]]:
    rng = random.Random(0)
    found = []
    for seed in range(count):
        body: dict[str, Any] = {"prompt": rng.choice(PROMPTS), "max_tokens": rng.randrange(1, 129), "seed": seed}
        body["temperature"] = rng.choice([0, 0.7, 1.0])
        body |= rng.choice([{}, {}, {"top_p": 0.9}, {"stop": ["a", "\n\n"]}, {"logprobs": 2, "echo": True}, {"n": 2}])
        found.append({**body, "stream": rng.random() < 0.5})
    return found


class Client:
    """A connection that is kept open."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.reader: asyncio.StreamReader | None = None

    async def post(self, body: dict[str, Any]) -> tuple[int, bytes]:
        if self.reader is None:
            self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)
        content = json.dumps(body).encode()
        lines = ["POST /v1/completions HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
        head = "\r\n".join([*lines, f"Content-Length: {len(content)}", "", ""])
        self.writer.write(head.encode() + content)
        headers = await self.reader.readuntil(b"\r\n\r\n")
        if length := re.search(rb"content-length: (\d+)", headers, re.IGNORECASE):
            return status_of(headers), await self.reader.readexactly(int(length[1]))
        parts = []
        while size := int((await self.reader.readline()).strip(), 16):
            parts.append(await self.reader.readexactly(size))
            await self.reader.readline()
        await self.reader.readline()
        return status_of(headers), b"".join(parts)


def status_of(headers: bytes) -> int:
    return int(headers.split(b" ", 2)[1])


def answer(body: dict[str, Any], content: bytes) -> list[tuple[list[int], str, Any, Any]]:
    """What an answer says of each choice: bytes, text, logprobs, why it ended. Whole and streamed answers say the same."""
    if not body["stream"]:
        parts = json.loads(content)["choices"]
    else:
        events = [event.removeprefix("data: ") for event in content.decode().split("\n\n") if event]
        assert events[-1] == "[DONE]"
        parts = [choice for event in events[:-1] for choice in json.loads(event)["choices"]]
    whole: dict[int, Any] = {}
    for part in parts:
        ids, text, logprobs, _ = whole.get(part["index"], ([], "", [], None))
        logprobs = logprobs + (part["logprobs"] or {}).get("token_logprobs", [])
        whole[part["index"]] = (ids + part["byte_ids"], text + part["text"], logprobs, part["finish_reason"])
    return [whole[index] for index in sorted(whole)]


async def measure(model: Path, clients: int, seconds: float, count: int) -> dict[str, Any]:
    with serving(model, "--device", "cpu") as (port, process):
        result = await run_clients(port, process.pid, clients, seconds, count)
        process.send_signal(signal.SIGTERM)
        result["exit_code"] = process.wait(60)
    return {"machine": {**describe_machine(torch.device("cpu")), "cores": os.cpu_count(), "load": os.getloadavg()}, **result}


@contextmanager
def serving(model: Path, *options: str) -> Iterator[tuple[int, subprocess.Popen[str]]]:
    """Context in which `longstride serve` serves a model of text: its port, and its process."""
    command = [sys.executable, "-m", "longstride", "serve", str(model), "--port", "0", "--kind", "text", *options]
    with TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stderr=log, text=True)
        try:
            while not (found := re.search(r"on http://127\.0\.0\.1:(\d+)", written := read_all(log))):
                assert process.poll() is None, written
                time.sleep(0.05)
            yield int(found[1]), process
        finally:
            process.kill()
            process.wait()


def read_all(file: IO[str]) -> str:
    return os.pread(file.fileno(), 2**20, 0).decode()


async def run_clients(port: int, pid: int, clients: int, seconds: float, count: int) -> dict[str, Any]:
    requests, single = make_requests(count), Client(port)
    begun = perf_counter()
    alone = [answer(body, (await single.post(body))[1]) for body in requests]
    alone_seconds = perf_counter() - begun
    statuses: Counter[int] = Counter()
    times: list[float] = []
    different: list[dict[str, Any]] = []
    made, memory = 0, []
    begun = perf_counter()

    async def client(number: int) -> None:
        nonlocal made
        rng, connection = random.Random(number), Client(port)
        while perf_counter() - begun < seconds:
            index = rng.randrange(len(requests))
            start = perf_counter()
            status, content = await connection.post(requests[index])
            times.append(perf_counter() - start)
            statuses[status] += 1
            if status != 200 or answer(requests[index], content) != alone[index]:
                different.append(requests[index])
            made += sum(len(choice[0]) for choice in alone[index])

    async def watch() -> None:
        while perf_counter() - begun < seconds:
            memory.append(resident_bytes(pid))
            await asyncio.sleep(1)

    await asyncio.gather(watch(), *map(client, range(clients)))
    taken = perf_counter() - begun
    half = memory[len(memory) // 2]
    return {
        "clients": clients,
        "seconds": round(taken, 1),
        "requests": len(times),
        "statuses": dict(statuses),
        "different": len(different),
        "requests_per_second": round(len(times) / taken, 2),
        "bytes_per_second": round(made / taken),
        "median_s": round(median(times), 3),
        "p99_s": round(quantiles(times, n=100)[98], 3),
        "alone_requests_per_second": round(count / alone_seconds, 2),
        "memory_growth": round(memory[-1] / half, 4),
        "memory": memory,
    }


def resident_bytes(pid: int) -> int:
    return 1024 * int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1])  # type: ignore[index]


if __name__ == "__main__":
    main()
