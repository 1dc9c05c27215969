"""Rate of the engine that serves requests, beside that of `longstride bench sampling` for as many streams in one process.

python benchmarks/serve_rate.py --preset enwik8 --streams 64 1 --json benchmarks/results/serve-h200.json

For each number of streams: bytes per second of `generate` after a prompt, timed as `longstride bench sampling` does over the
same positions; of the engine, from when all requests are under way until the first ends; of the engine with clients that
ask again at once, prompts included; and with --http the same by `longstride serve`, whole and streamed. Then the answers of
requests that were served together are compared with those of the same requests alone, without and with `exact`. Weights
are random.
"""

import asyncio
import json
import re
import signal
import subprocess
import sys
from argparse import ArgumentParser
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch

from longstride.commands.bench.sampling import Ours, random_model
from longstride.common.device import choose_device, describe_machine
from longstride.model import SparseTransformer, preset
from longstride.sampling.streams import GPU_PIECE
from longstride.serving.answers import Job
from longstride.serving.engine import Engine


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="enwik8")
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 1])
    parser.add_argument("--position", type=int, default=200, help="bytes of each prompt")
    parser.add_argument("--bytes", type=int, default=1536, help="bytes of each answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--http", action="store_true", help="measure longstride serve, too: needs longstride[serve]")
    parser.add_argument("--compared", type=int, default=16, help="requests that are also served alone")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = choose_device("serve_rate", options.device)
    config = preset(options.preset)
    model = random_model(config, device).requires_grad_(False)
    result: dict[str, Any] = {"machine": describe_machine(device), "preset": options.preset, "rows": []}
    for streams in options.streams:
        row: dict[str, Any] = {"streams": streams, "position": options.position, "bytes": options.bytes}
        bench = [
            time_generate(model, streams, options.position, options.bytes - GPU_PIECE) for _ in range(options.rounds + 1)
        ]
        row["bench_bytes_per_second"] = max(bench[1:])
        row |= asyncio.run(time_engine(model, streams, options.position, options.bytes, options.rounds))
        if options.http:
            row |= time_http(model, streams, options.position, options.bytes)
        for name in [name for name in row if name.endswith("_bytes_per_second") and name != "bench_bytes_per_second"]:
            row[name.replace("bytes_per_second", "share")] = round(row[name] / row["bench_bytes_per_second"], 3)
        print(json.dumps(row, indent=2), flush=True)
        result["rows"].append(row)
    for exact in (False, True):
        name = "different_exact" if exact else "different"
        result[name] = asyncio.run(compare(model, max(options.streams), options.bytes, options.compared, exact))
        print(f"exact = {exact}: {result[name]} of {options.compared} answers differ from those alone", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


def time_generate(model: SparseTransformer, streams: int, position: int, steps: int) -> int:
    device = next(model.parameters()).device
    prompts = torch.randint(256, (streams, position), dtype=torch.uint8, device=device)
    return round(streams / Ours(model).time(prompts, steps).seconds)


def make_job(position: int, length: int, seed: int) -> Job:
    made = torch.randint(256, (position,), generator=torch.Generator().manual_seed(seed))
    return Job(bytes(made.tolist()), length, seed=seed)


async def time_engine(model: SparseTransformer, streams: int, position: int, length: int, rounds: int) -> dict[str, int]:
    engine = Engine(model, streams=streams, queue=2 * streams)
    engine.start()
    steady = [await time_steady(engine, streams, position, length) for _ in range(rounds + 1)]
    begun, made = perf_counter(), engine.counts.bytes

    async def client(number: int) -> None:
        for again in range(rounds):
            async for _ in engine.submit([make_job(position, length, 1000 * again + number)]):
                pass

    await asyncio.gather(*map(client, range(streams)))
    repeated = round((engine.counts.bytes - made) / (perf_counter() - begun))
    await engine.stop()
    return {"engine_bytes_per_second": max(steady[1:]), "engine_repeated_bytes_per_second": repeated}


async def time_steady(engine: Engine, streams: int, position: int, length: int) -> int:
    """Bytes per second from when all streams have begun until the first has ended."""
    begun = ended = 0.0
    at_begin = at_end = waiting = 0
    waiting = streams

    async def client(number: int) -> None:
        nonlocal begun, ended, at_begin, at_end, waiting
        is_first = True
        async for _, piece in engine.submit([make_job(position, length, number)]):
            if is_first:
                is_first = False
                waiting -= 1
                if not waiting:
                    begun, at_begin = perf_counter(), engine.counts.bytes
            if piece.finish is not None and not ended:
                ended, at_end = perf_counter(), engine.counts.bytes

    await asyncio.gather(*map(client, range(streams)))
    assert ended > begun > 0, "the first answer ended before the last began; give more --bytes"
    return round((at_end - at_begin) / (ended - begun))


def time_http(model: SparseTransformer, streams: int, position: int, length: int) -> dict[str, int]:
    """The same by a server in a process of its own, twice: to warm up, and to be timed."""
    from serve_load import Client

    async def ask(port: int, stream: bool) -> int:
        clients = [Client(port) for _ in range(streams)]
        bodies = [
            {"prompt": list(make_job(position, length, seed).prompt), "max_tokens": length, "seed": seed, "stream": stream}
            for seed in range(streams)
        ]
        rate = 0
        for _ in range(2):
            begun = perf_counter()
            answers = await asyncio.gather(*(client.post(body) for client, body in zip(clients, bodies)))
            assert all(status == 200 for status, _ in answers)
            rate = round(streams * length / (perf_counter() - begun))
        return rate

    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        command = [sys.executable, "-m", "longstride", "serve", folder, "--port", "0", "--kind", "text"]
        command += ["--streams", str(streams), "--device", str(next(model.parameters()).device)]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        try:
            assert process.stderr is not None
            line = process.stderr.readline()
            found = re.search(r"http://127\.0\.0\.1:(\d+)", line)
            assert found, line + process.stderr.read()
            rates = {
                f"http_{name}_bytes_per_second": asyncio.run(ask(int(found[1]), stream))
                for name, stream in (("whole", False), ("streamed", True))
            }
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()
            process.wait()
    return rates


async def compare(model: SparseTransformer, streams: int, length: int, count: int, exact: bool) -> int:
    """Returns how many of some requests get another answer alone than together."""
    engine = Engine(model, streams=streams, queue=streams, exact=exact)
    engine.start()

    async def ask(number: int) -> bytes:
        data = b""
        async for _, piece in engine.submit([make_job(7 * number % 190, length, number)]):
            data += piece.data
        return data

    together = await asyncio.gather(*map(ask, range(streams)))
    alone = [await ask(number) for number in range(min(count, streams))]
    await engine.stop()
    return sum(one != other for one, other in zip(together, alone))


if __name__ == "__main__":
    main()
