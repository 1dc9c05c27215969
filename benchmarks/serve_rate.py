"""Rate of serving, beside that of `longstride bench sampling` for as many streams in one process.

python benchmarks/serve_rate.py --json benchmarks/results/serve-h200.json

Parts, each written to the file when it is done:

- bench: bytes per second of `generate` after prompts, timed as `longstride bench sampling` does, for each of --streams.
- http: of `longstride serve` with as many clients that come at once, whole and streamed, prompts included; the time until
  all of them have their first byte; and until one has it that is alone, whose prompt has a new length each time.
- engine: of the engine without HTTP, from when all streams are under way until the first ends.
- exact: requests whose answers among others are those alone, with and without `--exact`.

Shares are of bench's rate. Weights are random. http needs longstride[serve].
"""

import asyncio
import json
import signal
import traceback
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch
from serve_load import Client, serving

from longstride.commands.bench.sampling import Ours, random_model
from longstride.common.device import choose_device, describe_machine
from longstride.model import SparseTransformer, preset
from longstride.sampling.streams import GPU_PIECE
from longstride.serving.answers import Job
from longstride.serving.engine import Engine

GOALS = {1: 0.9}
"""Share of bench's rate over HTTP by the number of clients."""
GOAL = 0.8
WARM_UP = 160
"""Bytes of answers that are not timed: more than `generate` makes at a time."""


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="enwik8")
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 1])
    parser.add_argument("--position", type=int, default=200, help="bytes of each prompt")
    parser.add_argument("--bytes", type=int, default=5000, help="bytes of each answer")
    parser.add_argument("--rounds", type=int, default=2, help="of bench, of which the best counts")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--parts", nargs="+", default=[*PARTS], choices=[*PARTS])
    parser.add_argument("--compared", type=int, default=32, help="requests that are also served alone")
    parser.add_argument("--compared-bytes", type=int, default=256, help="bytes of their answers")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = choose_device("serve_rate", options.device)
    model = random_model(preset(options.preset), device).requires_grad_(False)
    sizes = {"position": options.position, "bytes": options.bytes}
    result: dict[str, Any] = {"machine": describe_machine(device), "preset": options.preset, **sizes}
    for name in options.parts:
        begun = perf_counter()
        try:
            result[name] = PARTS[name](model, options)
        except Exception:  # The other parts are worth having.
            result[name] = None
            traceback.print_exc()
        result.setdefault("seconds", {})[name] = round(perf_counter() - begun, 1)
        add_shares(result)
        if options.json is not None:
            options.json.write_text(json.dumps(result, indent=2) + "\n")
        print(f"{name}: {json.dumps(result[name])}  ({result['seconds'][name]} s)", flush=True)
    print_table(result)
    if any(result[name] is None for name in options.parts):
        raise SystemExit("not all parts could be measured")


def add_shares(result: dict[str, Any]) -> None:
    """Adds to each rate its share of bench's."""
    bench = result.get("bench") or {}
    for part in ("http", "engine"):
        for streams, row in (result.get(part) or {}).items():
            for name in [name for name in row if name.endswith("bytes_per_second") and streams in bench]:
                row[name.replace("bytes_per_second", "share")] = round(row[name] / bench[streams], 3)


def print_table(result: dict[str, Any]) -> None:
    print(f"\n{'':28}{'bytes/s':>10}{'share':>8}{'goal':>7}")
    for streams, rate in (result.get("bench") or {}).items():
        print(f"{streams + ' streams, bench':28}{rate:>10,}")
        for part in ("engine", "http"):
            for name, value in ((result.get(part) or {}).get(streams) or {}).items():
                if name.endswith("bytes_per_second"):
                    kind = name.removesuffix("bytes_per_second").replace("_", " ").strip()
                    share = result[part][streams][name.replace("bytes_per_second", "share")]
                    goal = f"{GOALS.get(int(streams), GOAL):7}" if part == "http" else ""
                    print(f"{streams + ' streams, ' + part + ' ' + kind:28}{value:>10,}{share:>8}{goal}")
    for streams, row in (result.get("http") or {}).items():
        print(f"first byte of {streams} clients at once: {row['first_bytes_ms']} ms")
    if result.get("exact"):
        print("answers that are those alone: " + ", ".join(f"{name} {value}" for name, value in result["exact"].items()))


def bench(model: SparseTransformer, options: Namespace) -> dict[str, int]:
    """Bytes per second for each number of streams."""
    device = next(model.parameters()).device
    rates = {}
    for streams in options.streams:
        prompts = torch.randint(256, (streams, options.position), dtype=torch.uint8, device=device)
        Ours(model).time(prompts, WARM_UP)
        timings = [Ours(model).time(prompts, options.bytes - GPU_PIECE) for _ in range(options.rounds)]
        rates[str(streams)] = max(round(streams / timing.seconds) for timing in timings)
    return rates


def make_job(position: int, length: int, seed: int) -> Job:
    made = torch.randint(256, (position,), generator=torch.Generator().manual_seed(seed))
    return Job(bytes(made.tolist()), length, seed=seed)


def http(model: SparseTransformer, options: Namespace) -> dict[str, dict[str, float]]:
    """The same by a server in a process of its own, with places for all of its clients."""
    found = {}
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        words = ["--streams", str(max(options.streams)), "--device", str(next(model.parameters()).device)]
        with serving(Path(folder), *words) as (port, process):
            for streams in options.streams:
                found[str(streams)] = asyncio.run(time_http(port, streams, options.position, options.bytes))
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
    return found


async def time_http(port: int, count: int, position: int, length: int) -> dict[str, float]:
    clients = [Client(port) for _ in range(count)]

    async def ask(stream: bool, length: int, first_seed: int, position: int = position) -> float:
        """Sends a request of each client. Returns the seconds until all have their answers."""
        jobs = [make_job(position, length, first_seed + number) for number in range(count)]
        bodies = [
            {"prompt": list(job.prompt), "max_tokens": length, "seed": job.seed, "stream": stream, "temperature": 1}
            for job in jobs
        ]
        begun = perf_counter()
        answers = await asyncio.gather(*(client.post(body) for client, body in zip(clients, bodies)))
        seconds = perf_counter() - begun
        assert all(status == 200 for status, _ in answers)
        return seconds

    for again in range(3):
        await ask(True, WARM_UP, 1000 * again)
    firsts = [await ask(False, 1, 1000 * again, position - 2 * again) for again in range(8)]
    return {
        "whole_bytes_per_second": round(count * length / await ask(False, length, 0)),
        "streamed_bytes_per_second": round(count * length / await ask(True, length, 0)),
        "first_bytes_ms": round(1000 * median(firsts), 1),
    }


def engine(model: SparseTransformer, options: Namespace) -> dict[str, dict[str, int]]:
    """Bytes per second while all streams run."""

    async def measure(streams: int) -> int:
        made = Engine(model, streams=streams, queue=2 * streams)
        made.start()
        await asyncio.gather(*(collect(made, make_job(options.position, WARM_UP, seed)) for seed in range(streams)))
        rate = await time_steady(made, streams, options.position, options.bytes)
        await made.stop()
        return rate

    return {str(streams): {"bytes_per_second": asyncio.run(measure(streams))} for streams in options.streams}


async def collect(made: Engine, job: Job) -> bytes:
    return b"".join([piece.data async for _, piece in made.submit([job])])


async def time_steady(made: Engine, streams: int, position: int, length: int) -> int:
    """Bytes per second from when all streams have begun until the first has ended."""
    begun = ended = 0.0
    at_begin = at_end = 0
    waiting = streams

    async def client(number: int) -> None:
        nonlocal begun, ended, at_begin, at_end, waiting
        is_first = True
        async for _, piece in made.submit([make_job(position, length, number)]):
            if is_first:
                is_first = False
                waiting -= 1
                if not waiting:
                    begun, at_begin = perf_counter(), made.counts.bytes
            if piece.finish is not None and not ended:
                ended, at_end = perf_counter(), made.counts.bytes

    await asyncio.gather(*map(client, range(streams)))
    assert ended > begun > 0, "the first answer ended before the last began; give more --bytes"
    return round((at_end - at_begin) / (ended - begun))


def exact(model: SparseTransformer, options: Namespace) -> dict[str, str]:
    """How many of some requests have the same answer alone and together; prompts of several lengths, some of them empty."""
    streams = max(options.streams)
    count = min(options.compared, streams)

    async def compare(is_exact: bool) -> str:
        made = Engine(model, streams=streams, queue=streams, exact=is_exact)
        made.start()
        jobs = [make_job(7 * number % 190, options.compared_bytes, number) for number in range(streams)]
        together = await asyncio.gather(*(collect(made, job) for job in jobs))
        alone = [await collect(made, job) for job in jobs[:count]]
        await made.stop()
        return f"{sum(one == other for one, other in zip(together, alone))} of {count}"

    return {name: asyncio.run(compare(name == "exact")) for name in ("exact", "default")}


PARTS: dict[str, Callable[[SparseTransformer, Namespace], Any]] = {
    "bench": bench, "http": http, "exact": exact, "engine": engine
}  # fmt: skip


if __name__ == "__main__":
    main()
