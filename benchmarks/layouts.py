"""Times of packed documents, grouped queries, and a Llama of transformers with our attention.

python benchmarks/layouts.py --json benchmarks/results/layouts-h200.json [--parts documents lengths groups llama] [--tiny]

documents: a row of documents beside one sequence as long as all of them, beside the share of its time that their pairs
           predict, and beside a batch of them, if they are equal
lengths:   documents of two lengths in turns, by their mean, on a walk and on the general kernels
groups:    shared keys beside repeated ones, with the repetition inside the time and outside
llama:     a training step of about 100 million parameters, beside the network's own SDPA

Calls of `attend` are GPU time from a cold cache; steps are wall time. Medians; contenders take turns. `--tiny` runs all of
it on a CPU in seconds, to test the script.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from longstride import attend
from longstride.commands.bench.measure import peak_bytes, seconds_each
from longstride.common.device import describe_machine
from longstride.patterns import Pattern
from longstride.patterns.notation import parse

PARTS = ("documents", "lengths", "groups", "llama")
Row = dict[str, Any]


class Sizes(NamedTuple):
    mixes: dict[str, list[int]]
    document_heads: int
    document_width: int
    document_patterns: tuple[str, ...]
    length_rows: int
    length_means: tuple[int, ...]
    length_pattern: str
    group_heads: tuple[int, int]
    group_widths: tuple[int, ...]
    group_lengths: tuple[int, ...]
    group_patterns: tuple[str, ...]
    llama: dict[str, int]
    key_heads: tuple[int, ...]
    context: int
    stride: int


FULL = Sizes(
    mixes={
        "8 x 4,096": [4096] * 8,
        "64 x 512": [512] * 64,
        "halves of 32,768": [16384, 8192, 4096, 2048, 1024, 512, 256, 256],
        "1 x 24,576, 64 x 128": [24576, *[128] * 64],
        "31 of 100 to 3,100": [*range(100, 3200, 200), *range(3000, 0, -200)],
    },
    document_heads=16,
    document_width=64,
    document_patterns=("local(128)", "local(128) | column(128)", "block(128) | summary(128, 32)"),
    length_rows=32768,
    length_means=(16, 32, 64, 128, 256, 512),
    length_pattern="local(128)",
    group_heads=(32, 8),
    group_widths=(64, 128),
    group_lengths=(8192, 16384),
    group_patterns=("local(128)", "local(128) | column(128)"),
    llama={"hidden_size": 768, "intermediate_size": 2560, "num_hidden_layers": 12, "num_attention_heads": 12},
    key_heads=(12, 4),
    context=32768,
    stride=128,
)
TINY = Sizes(
    mixes={"4 x 64": [64] * 4, "halves of 256": [128, 64, 32, 16, 8, 8]},
    document_heads=2,
    document_width=16,
    document_patterns=("local(8)", "local(8) | column(8)", "block(8) | summary(8, 2)"),
    length_rows=64,
    length_means=(8, 16),
    length_pattern="local(8)",
    group_heads=(4, 2),
    group_widths=(16,),
    group_lengths=(128,),
    group_patterns=("local(8)",),
    llama={"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
    key_heads=(4, 2),
    context=256,
    stride=16,
)


class Bench(NamedTuple):
    sizes: Sizes
    device: torch.device
    dtype: torch.dtype
    repeats: int

    def some(self, batch: int, heads: int, n: int, d: int) -> Tensor:
        """As projections make it: [batch, n, heads, d] in memory."""
        return torch.randn(batch, n, heads, d, device=self.device, dtype=self.dtype).transpose(1, 2)

    def inputs(self, batch: int, heads: int, key_heads: int, n: int, d: int) -> list[Tensor]:
        shapes = (heads, key_heads, key_heads)
        return [self.some(batch, count, n, d).requires_grad_() for count in shapes]

    def times(self, calls: dict[str, tuple[Callable[..., Tensor], Sequence[Tensor]]]) -> dict[str, dict[str, float]]:
        """The time of each call of q, k and v, by direction: forward alone, and with backward."""
        slopes = {name: torch.randn_like(call(*given).detach()) for name, (call, given) in calls.items()}

        def both(name: str) -> Callable[[], Any]:
            call, given = calls[name]
            return lambda: torch.autograd.grad(call(*given), given, slopes[name])

        def forward(name: str) -> Callable[[], Any]:
            call, given = calls[name]
            return lambda: call(*given)

        with torch.no_grad():
            alone = seconds_each({name: forward(name) for name in calls}, self.repeats, self.device)
        whole = seconds_each({name: both(name) for name in calls}, self.repeats, self.device)
        return {"forward": alone, "with backward": whole}


def measure_documents(bench: Bench) -> list[Row]:
    rows = []
    for text in bench.sizes.document_patterns:
        (pattern,) = parse(text)
        for mix, lengths in bench.sizes.mixes.items():
            heads, d, n = bench.sizes.document_heads, bench.sizes.document_width, sum(lengths)
            row = bench.inputs(1, heads, heads, n, d)
            calls = {
                "packed": (_attend(pattern, lengths), row),
                "whole": (_attend(pattern), row),
            }
            if len(set(lengths)) == 1:
                calls["batch"] = (_attend(pattern), bench.inputs(len(lengths), heads, heads, lengths[0], d))
            share = sum(map(pattern.pairs, lengths)) / pattern.pairs(n)
            for direction, times in bench.times(calls).items():
                over = {
                    "over pairs": times["packed"] / (times["whole"] * share),
                    "over whole": times["packed"] / times["whole"],
                    "over batch": times["packed"] / times["batch"] if "batch" in times else None,
                }
                case = {"pattern": text, "mix": mix, "direction": direction, "share of pairs": share}
                rows.append({**case, **_ms(times), "batch ms": 1e3 * times["batch"] if "batch" in times else None, **over})
                print_row(rows, ("pattern", "mix", "direction"))
    return rows


def measure_lengths(bench: Bench) -> list[Row]:
    from longstride.attention.kernels import call, general
    from longstride.attention.kernels.hopper import choice

    rows = []
    heads, d, n = bench.sizes.document_heads, bench.sizes.document_width, bench.sizes.length_rows
    (pattern,) = parse(bench.sizes.length_pattern)
    row = bench.inputs(1, heads, heads, n, d)
    scales = {"walk": d**-0.5, "general": d**-0.5 * 1.001}
    for mean in bench.sizes.length_means:
        lengths = [mean * 3 // 4, mean * 5 // 4] * (n // mean // 2)
        calls = {name: (_attend(pattern, lengths, scale), row) for name, scale in scales.items()}
        # The first call makes a plan, and the scale is a part of its key.
        with patch.object(choice, "LEAST_DOCUMENT", 0):
            _run(*calls["walk"])
        with patch.object(call, "backends", lambda device: (general,)):
            _run(*calls["general"])
        for direction, times in bench.times(calls | {"whole": (_attend(pattern), row)}).items():
            over = {"walk over general": times["walk"] / times["general"], "walk over whole": times["walk"] / times["whole"]}
            rows.append({"mean": mean, "direction": direction, **_ms(times), **over})
            print_row(rows, ("mean", "direction"))
    return rows


def _run(function: Callable[..., Tensor], given: Sequence[Tensor]) -> None:
    output = function(*given)
    torch.autograd.grad(output, given, torch.randn_like(output))


def measure_groups(bench: Bench) -> list[Row]:
    rows = []
    heads, key_heads = bench.sizes.group_heads
    group = heads // key_heads
    for text in bench.sizes.group_patterns:
        (pattern,) = parse(text)
        plain = _attend(pattern)

        def repeating(q: Tensor, k: Tensor, v: Tensor, plain: Callable[..., Tensor] = plain) -> Tensor:
            return plain(q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1))

        for d in bench.sizes.group_widths:
            for n in bench.sizes.group_lengths:
                q, k, v = bench.inputs(1, heads, key_heads, n, d)
                repeated = [x.detach().repeat_interleave(group, 1).requires_grad_() for x in (k, v)]
                calls = {
                    "grouped": (plain, [q, k, v]),
                    "repeating": (repeating, [q, k, v]),
                    "repeated": (plain, [q, *repeated]),
                }
                for direction, times in bench.times(calls).items():
                    over = {
                        "over repeating": times["grouped"] / times["repeating"],
                        "over repeated": times["grouped"] / times["repeated"],
                    }
                    rows.append({"pattern": text, "d": d, "n": n, "direction": direction, **_ms(times), **over})
                    print_row(rows, ("pattern", "d", "n", "direction"))
    return rows


def measure_llama(bench: Bench, compiled: bool) -> list[Row]:
    from transformers import LlamaConfig, LlamaForCausalLM

    from longstride.transformers import set_attention_pattern

    rows = []
    sizes, stride = bench.sizes, bench.sizes.stride
    tokens = torch.randint(256, (1, sizes.context), device=bench.device)
    layers = sizes.llama["num_hidden_layers"]
    patterns: dict[str, str | list[str] | None] = {
        "sdpa": None,
        "merged": f"local({stride}) | column({stride})",
        "interleaved": [(f"local({stride})", f"column({stride})")[layer % 2] for layer in range(layers)],
    }
    for key_heads in sizes.key_heads:
        steps, parameters = {}, 0
        for name, pattern in patterns.items():
            config = LlamaConfig(
                vocab_size=256, num_key_value_heads=key_heads, max_position_embeddings=sizes.context, use_cache=False,
                attn_implementation="sdpa", **sizes.llama,
            )  # fmt: skip
            model = LlamaForCausalLM(config).to(bench.device, bench.dtype).train()
            if pattern is not None:
                set_attention_pattern(model, pattern)
            parameters = sum(map(torch.numel, model.parameters()))
            steps[name] = _training_step(model, tokens, compiled)
        times = seconds_each(steps, bench.repeats, bench.device, clock=_step_seconds)
        for name, seconds in times.items():
            peak = peak_bytes(steps[name], bench.device) if bench.device.type == "cuda" else None
            rows.append(
                {
                    "key heads": key_heads, "attention": name, "pattern": patterns[name], "parameters": parameters,
                    "context": sizes.context, "compiled": compiled, "step ms": seconds * 1e3,
                    "times faster": times["sdpa"] / seconds, "peak GB": None if peak is None else peak / 1e9,
                }
            )  # fmt: skip
            print_row(rows, ("key heads", "attention"), hidden=("pattern", "compiled"))
    return rows


def _training_step(model: Any, tokens: Tensor, compiled: bool) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    if compiled:  # Layers by themselves: the code of one serves all, or with a list of patterns is compiled for each.
        torch._dynamo.config.recompile_limit = 64
        for layer in model.model.layers:
            layer.compile(fullgraph=True)

    def step() -> None:
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _step_seconds(step: Callable[[], object], device: torch.device) -> float:
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    synchronize()
    start = perf_counter()
    step()
    synchronize()
    return perf_counter() - start


def _attend(pattern: Pattern, documents: list[int] | None = None, scale: float | None = None) -> Callable[..., Tensor]:
    return lambda q, k, v: attend(q, k, v, pattern, documents=documents, scale=scale)


def _ms(times: dict[str, float]) -> Row:
    return {f"{name} ms": seconds * 1e3 for name, seconds in times.items()}


def print_row(rows: list[Row], names: Sequence[str], hidden: Sequence[str] = ()) -> None:
    """Prints the last row, and headings above the first one."""
    columns = [name for name in rows[-1] if name not in hidden]
    widths = {name: 30 if name in ("pattern", "mix") else max(len(name), 13) for name in columns}
    if len(rows) == 1:
        print("  ".join(name.ljust(widths[name]) if name in names else name.rjust(widths[name]) for name in columns))
    cells = []
    for name in columns:
        value = rows[-1].get(name)
        shown = "" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)
        cells.append(shown.ljust(widths[name]) if name in names else shown.rjust(widths[name]))
    print("  ".join(cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    parser.add_argument("--json", type=Path, help="a file for the results, written after each part")
    parser.add_argument("--repeats", type=int, help="measurements of each call (default 11, 5 for steps)")
    parser.add_argument("--compile", action="store_true", help="compile the layers of the Llama, ours and its own")
    parser.add_argument("--key-heads", type=int, nargs="+", help="of the Llama (default 12 and 4)")
    parser.add_argument("--tiny", action="store_true", help="small shapes on a CPU, to test the script")
    given = parser.parse_args()
    device = torch.device("cpu" if given.tiny else "cuda")
    sizes, dtype = (TINY, torch.float32) if given.tiny else (FULL, torch.bfloat16)
    if given.key_heads:
        sizes = sizes._replace(key_heads=tuple(given.key_heads))
    result: Row = {"machine": describe_machine(device), "seconds": {}}
    for part in given.parts:
        torch.manual_seed(0)
        start = perf_counter()
        bench = Bench(sizes, device, dtype, given.repeats or (5 if part == "llama" else 11))
        print(f"\n{part}", flush=True)
        if part == "documents":
            result[part] = measure_documents(bench)
        elif part == "lengths":
            result[part] = measure_lengths(bench)
        elif part == "groups":
            result[part] = measure_groups(bench)
        else:
            result[part] = measure_llama(bench, given.compile)
        result["seconds"][part] = round(perf_counter() - start, 1)
        print(f"{part}: {result['seconds'][part]} s")
        if given.json is not None:
            given.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
