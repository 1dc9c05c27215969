"""Short learning runs on enwik8, to compare training recipes before they enter the package.

    python benchmarks/recipes.py enwik8.bin 45 out.jsonl 'wide width=768 layers=10' 'narrow width=512 layers=16'

Every argument after the third is a job: a name, and fields of `Recipe` that differ from the defaults. A job imports and
compiles while another one trains, and then waits for the GPU; so runs of fixed duration follow each other without a gap.
Each writes one line of JSON: validation bits per byte, steps, bytes seen, and its fields. A job with `steps=600` ends after
so many steps instead, whatever time they take.

The file holds enwik8's first 95 million bytes or more: 90 million are for training, the next 5 million for validation.
"""

import fcntl
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longstride import attend
from longstride.model.placement import place

TRAIN, VALID = 90_000_000, 5_000_000
WARM_CONTEXT = 512
"""Positions at the start of a validation window that are not scored; a quarter of shorter windows."""
PREPARED_TOGETHER = 3
NEWTON_SCHULZ = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
"""Coefficients of a quintic iteration that orthogonalizes a matrix in five steps (Muon)."""


@dataclass(frozen=True)
class Recipe:
    layers: int = 12
    width: int = 768
    head: int = 64
    ff_ratio: float = 4.0
    context: int = 8192
    batch: int = 8
    pattern: str = "local(512)+distinct(merged(fixed(128,8)))"
    positions: str = "rotary"
    """"rotary", or "matrix": learned embeddings of row and column, as in the paper."""
    stride: int = 128
    """Columns of the matrix of positions."""
    qk_norm: bool = True
    qk_scale: float = 3.0
    """Multiplies 1 / sqrt(head) where queries and keys are normalised."""
    last_bytes: int = 3
    """How many of the last bytes have an embedding; these are summed."""
    hashed: str = ""
    """Lengths of n-grams with hashed embeddings, such as "2-3-4"."""
    hash_size: int = 65_536
    activation: str = "gelu"
    """"gelu"; "relu2", the square of relu; or "swiglu", with gates beside: ff_ratio 8/3 then has as many weights."""
    convolutions: str = ""
    """Where each channel adds a learned sum of its last four positions: "a" before queries, keys and values, "b" after them,
    "c" before the feed-forward network."""
    dropout: float = 0.0
    """Of each block's two branches."""
    embedding_skip: bool = False
    """Each block adds a learned multiple of the embedding to its input."""
    value_skip: bool = False
    """Each block adds a learned multiple of the first block's values to its own."""
    shift: bool = False
    """Keys and values have a learned multiple of the previous slot's added, one for each channel."""
    float32_stream: bool = False
    """The residual stream is float32 on a GPU too."""
    weight_std: float = 0.5
    """Times 1 / sqrt(width). Projections into the residual stream begin at 0."""
    output_std: float = 0.02
    learning_rate: float = 0.004
    """Of Muon, for the blocks' matrices, in steps of Adam's size."""
    embedding_rate: float = 0.01
    """Of Adam, for embeddings."""
    other_rate: float = 0.004
    decay: float = 0.05
    momentum: float = 0.95
    warmup: int = 40
    flat: float = 0.3
    """The part of the time after which the learning rate falls, in a line to 2 per cent."""
    average: float = 0.0
    """If not 0, also validates a moving average of the weights, over this part of the steps so far."""
    graph: bool = False
    """A step is one CUDA graph, so that small batches do not wait for the host."""
    steps: int = 0
    """If not 0, ends after these, and not by the time."""
    train_bytes: int = TRAIN
    """How much of the training part is read, as ten slices evenly spaced."""
    profile: bool = False
    """Prints where the GPU's time goes in three more steps."""
    windows: int = 32
    """Validation windows, evenly spaced."""
    seed: int = 0

    @classmethod
    def parse(cls, words: list[str]) -> "Recipe":
        given = dict(word.split("=", 1) for word in words)
        kinds = {one.name: one.type for one in fields(cls)}
        return cls(**{name: text == "True" if kinds[name] is bool else kinds[name](text) for name, text in given.items()})


def norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],))


class Linear(nn.Module):
    """No bias; float32 weights, computed in the dtype of the input. `parts`: matrices side by side, such as of queries, keys
    and values, which Muon takes one by one."""

    def __init__(self, inputs: int, outputs: int, std: float, parts: int = 1) -> None:
        super().__init__()
        self.parts = parts
        self.weight = nn.Parameter(torch.randn(outputs, inputs) * std)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class Convolution(nn.Module):
    """x + a learned sum of the last positions of each channel, which begins as 0. [batch, n, width]"""

    def __init__(self, width: int, taps: int = 4) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(taps, width))

    def forward(self, x: Tensor) -> Tensor:
        n, taps = x.shape[1], len(self.weight)
        padded = F.pad(x, (0, 0, taps - 1, 0))
        return x + sum(padded[:, tap : tap + n] * weight.to(x.dtype) for tap, weight in enumerate(self.weight))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), -1).to(x.dtype)


class Block(nn.Module):
    def __init__(self, recipe: Recipe, patterns: tuple, first: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.recipe, self.patterns, self.dtype, width = recipe, patterns, dtype, recipe.width
        std, inner = recipe.weight_std / math.sqrt(width), int(recipe.ff_ratio * width)
        self.query_key_value, self.project = Linear(width, 3 * width, std, 3), Linear(width, width, 0.0)
        gates = 2 if recipe.activation == "swiglu" else 1
        self.inner = Linear(width, gates * inner, std, gates)
        self.outer = Linear(inner, width, 0.0)
        widths = {"a": width, "b": 3 * width, "c": width}
        self.convolutions = nn.ModuleDict({name: Convolution(widths[name]) for name in recipe.convolutions})
        self.query_scale = nn.Parameter(torch.ones(width // recipe.head, 1, 1)) if recipe.qk_norm else None
        self.skip = nn.Parameter(torch.tensor([1.0, 0.0])) if recipe.embedding_skip else None
        self.value_mix = nn.Parameter(torch.tensor([1.0, 0.0])) if recipe.value_skip and not first else None
        self.shift = nn.Parameter(torch.zeros(2, width // recipe.head, 1, recipe.head)) if recipe.shift else None

    def forward(self, h: Tensor, embedded: Tensor, values: Tensor | None, cos: Tensor | None, sin: Tensor | None):
        recipe, heads = self.recipe, self.recipe.width // self.recipe.head
        if self.skip is not None:
            h = (self.skip[0] * h + self.skip[1] * embedded).to(h.dtype)
        packed = self._convolve("b", self.query_key_value(self._convolve("a", norm(h).to(self.dtype))))
        q, k, v = packed.unflatten(-1, (3, heads, recipe.head)).permute(2, 0, 3, 1, 4)
        scale = recipe.head**-0.5
        if self.shift is not None:
            k, v = ((x + m * F.pad(x[:, :, :-1], (0, 0, 1, 0))).to(self.dtype) for x, m in zip((k, v), self.shift))
        if self.query_scale is not None:
            q, k, scale = (norm(q) * self.query_scale).to(self.dtype), norm(k), scale * recipe.qk_scale
        if cos is not None:
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if self.value_mix is not None:
            v = (self.value_mix[0] * v + self.value_mix[1] * values).to(self.dtype)
        seen = attend(q, k, v, self.patterns, scale=scale)
        h = h + F.dropout(self.project(seen.transpose(1, 2).flatten(2)), recipe.dropout, self.training)
        inner = self.inner(self._convolve("c", norm(h).to(self.dtype)))
        if recipe.activation == "gelu":
            inner = inner * torch.sigmoid(1.702 * inner)
        elif recipe.activation == "relu2":
            inner = F.relu(inner).square()
        else:
            inner, gate = inner.chunk(2, -1)
            inner = inner * F.silu(gate)
        return h + F.dropout(self.outer(inner), recipe.dropout, self.training), v

    def _convolve(self, name: str, x: Tensor) -> Tensor:
        return self.convolutions[name](x) if name in self.convolutions else x


class Network(nn.Module):
    """Slot t carries the bytes before t and predicts byte t."""

    def __init__(self, recipe: Recipe, dtype: torch.dtype) -> None:
        super().__init__()
        self.recipe, self.dtype, width = recipe, dtype, recipe.width
        self.lengths = [int(length) for length in recipe.hashed.split("-") if length]
        self.bytes = nn.ModuleList(nn.Embedding(256, width) for _ in range(recipe.last_bytes))
        self.hashes = nn.ModuleList(nn.Embedding(recipe.hash_size, width) for _ in self.lengths)
        rows = -(-recipe.context // recipe.stride)
        sizes = (rows, recipe.stride) if recipe.positions == "matrix" else ()
        self.matrix = nn.ModuleList(nn.Embedding(size, width) for size in sizes)
        self.start = nn.Parameter(torch.randn(width) * 0.3)
        for table in (*self.bytes, *self.matrix):
            nn.init.normal_(table.weight, std=0.3 / math.sqrt(recipe.last_bytes))
        for table in self.hashes:
            nn.init.normal_(table.weight, std=0.02)
        cycle = place(recipe.pattern, width // recipe.head)
        self.blocks = nn.ModuleList(Block(recipe, cycle[i % len(cycle)], i == 0, dtype) for i in range(recipe.layers))
        self.output = Linear(width, 256, recipe.output_std)

    def embed(self, tokens: Tensor) -> Tensor:
        tokens, n = tokens.long(), tokens.shape[1]
        h = sum(F.pad(table(tokens[:, : n - j - 1]), (0, 0, j + 1, 0)) for j, table in enumerate(self.bytes))
        for table, length in zip(self.hashes, self.lengths):
            key = torch.zeros_like(tokens[:, length - 1 : n - 1])
            for j in range(length):
                key = key * 257 + tokens[:, j : n - length + j] + 1
            h = h + F.pad(table(key * 2654435761 % 4294967291 % self.recipe.hash_size), (0, 0, length, 0))
        if self.matrix:
            position = torch.arange(n, device=tokens.device)
            h = h + self.matrix[0](position // self.recipe.stride) + self.matrix[1](position % self.recipe.stride)
        return torch.cat([h[:, :1] + self.start, h[:, 1:]], 1)

    def forward(self, tokens: Tensor) -> Tensor:
        """Nats of every byte, [batch, n]."""
        h = embedded = norm(self.embed(tokens)).to(torch.float32 if self.recipe.float32_stream else self.dtype)
        cos = sin = values = None
        if self.recipe.positions == "rotary":
            half = self.recipe.head // 2
            speed = 10_000.0 ** (-torch.arange(half, device=tokens.device) / half)
            angle = torch.arange(tokens.shape[1], device=tokens.device)[:, None] * speed
            cos, sin = angle.cos().to(self.dtype), angle.sin().to(self.dtype)
        for block in self.blocks:
            h, own = block(h, embedded, values, cos, sin)
            values = own if values is None else values
        return nats(h, self.output.weight, tokens, self.dtype)


def nats(h: Tensor, weight: Tensor, tokens: Tensor, dtype: torch.dtype) -> Tensor:
    logits = F.linear(norm(h).to(dtype), weight.to(dtype)).float()
    return F.cross_entropy(logits.flatten(0, 1), tokens.long().flatten(), reduction="none").view(tokens.shape)


class Muon:
    """Momentum, orthogonalized; matrices of one shape in one batch."""

    def __init__(self, blocks: nn.ModuleList, recipe: Recipe) -> None:
        self.recipe, self.groups = recipe, {}
        for block in blocks:
            for matrix, parts in ((part.weight, part.parts) for part in block.modules() if isinstance(part, Linear)):
                self.groups.setdefault((tuple(matrix.shape), parts), []).append(matrix)
        self.rate = torch.zeros((), device=matrix.device)
        self.momentum = {kind: torch.zeros(len(group), *kind[0], device=group[0].device)
                         for kind, group in self.groups.items()}  # fmt: skip

    @torch.no_grad()
    def step(self) -> None:
        recipe, rate = self.recipe, self.rate
        for (shape, parts), group in self.groups.items():
            gradient, momentum = torch.stack([p.grad for p in group]), self.momentum[shape, parts]
            momentum.lerp_(gradient, 1 - recipe.momentum)
            update = gradient.lerp(momentum, recipe.momentum)
            part = shape[0] // parts, shape[1]
            update = orthogonal(update.view(-1, *part)).view_as(gradient).float()
            torch._foreach_mul_(group, 1 - rate * recipe.decay)
            torch._foreach_add_(group, list((update * (rate * (-0.2 * math.sqrt(max(part))))).unbind()))


def orthogonal(x: Tensor) -> Tensor:
    x = x.to(torch.bfloat16 if x.is_cuda else x.dtype)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for a, b, c in NEWTON_SCHULZ:
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x.mT if tall else x


def train(data: Path, seconds: float, name: str, recipe: Recipe) -> dict:
    global nats
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(recipe.seed)
    network = Network(recipe, torch.bfloat16 if device.type == "cuda" else torch.float32).to(device)
    if device.type == "cuda":
        torch._dynamo.config.recompile_limit = 64
        nats = torch.compile(nats)
        for block in network.blocks:
            block.compile()
    muon = Muon(network.blocks, recipe)
    tables = [p for part in (network.bytes, network.hashes, network.matrix) for p in part.parameters()]
    taken = {id(p) for p in tables} | {id(p) for group in muon.groups.values() for p in group}
    others = [p for p in network.parameters() if id(p) not in taken]
    rates = (tables, recipe.embedding_rate), (others, recipe.other_rate)
    groups = [{"params": some, "rate": rate, "lr": torch.zeros((), device=device)} for some, rate in rates]
    fast = {"fused": True, "capturable": recipe.graph} if device.type == "cuda" else {}
    adam = torch.optim.AdamW(groups, betas=(0.9, 0.99), eps=1e-10, weight_decay=0.0, **fast)
    stream = torch.from_numpy(np.fromfile(data, np.uint8, TRAIN + VALID)).to(device)
    part = recipe.train_bytes // 10
    seen = torch.cat([stream[start : start + part] for start in range(0, TRAIN, TRAIN // 10)])
    held = stream[TRAIN:]
    window = torch.arange(recipe.context, device=device)
    tokens = seen[: recipe.batch * recipe.context].view(recipe.batch, -1).clone()

    def learn() -> Tensor:
        loss = network(tokens).mean()
        loss.backward()
        adam.step()
        muon.step()
        network.zero_grad(set_to_none=True)
        return loss.detach()

    replay = prepare(learn, recipe.graph)

    def step(scale: float) -> Tensor:
        start = torch.randint(0, len(seen) - recipe.context, (recipe.batch, 1), device=device)
        tokens.copy_(seen[start + window])
        for group in adam.param_groups:
            group["lr"].fill_(group["rate"] * scale)
        muon.rate.fill_(recipe.learning_rate * scale)
        return replay()

    def validate() -> float:
        network.eval()
        with torch.no_grad():
            starts = torch.linspace(0, len(held) - recipe.context - 1, recipe.windows).long().to(device)
            parts = [network(held[some[:, None] + window])[:, warm:] for some in starts.split(recipe.batch)]
        network.train()
        return round(torch.cat(parts).double().mean().item() / math.log(2), 4)

    warm = min(WARM_CONTEXT, recipe.context // 4)
    with torch.no_grad():
        network.eval()(tokens)  # Compiles for validation.
    network.train()
    synchronize(device)
    weights = [p.detach() for p in network.parameters()]
    averages = [p.clone() for p in weights] if recipe.average else []
    with (Path(tempfile.gettempdir()) / "recipes.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        step(0.0)
        for state in (*muon.momentum.values(), *(x for some in adam.state.values() for x in some.values())):
            state.zero_()
        synchronize(device)
        begun, steps, losses = time.perf_counter(), 0, []
        while (done := steps / recipe.steps if recipe.steps else (time.perf_counter() - begun) / seconds) < 1:
            fall = min(1.0, (1 - done) / (1 - recipe.flat))
            losses.append(step(min(1.0, (steps + 1) / recipe.warmup) * (0.02 + 0.98 * fall)))
            steps += 1
            if averages:
                torch._foreach_lerp_(averages, weights, min(1.0, 1 / (recipe.average * steps)))
            if len(losses) > 2:
                losses[-3] = losses[-3].item()  # Keeps the host at most two steps ahead.
        synchronize(device)
        taken_s = time.perf_counter() - begun
        results = {"valid_bits_per_byte": validate()}
        if averages:
            torch._foreach_copy_(weights, averages)
            results["valid_bits_per_byte_of_average"] = validate()
        if recipe.profile:
            profile(lambda: step(0.0))
    size = recipe.batch * recipe.context
    return {
        "name": name,
        **results,
        "seconds": round(taken_s, 1),
        "steps": steps,
        "million_bytes": round(steps * size / 1e6, 1),
        "million_parameters": round(sum(p.numel() for p in network.parameters()) / 1e6, 1),
        "training_bits_per_byte": [round(float(x) / math.log(2), 3) for x in losses[steps // 6 :: max(1, steps // 6)]],
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "recipe": asdict(recipe),
    }


def prepare(learn: Callable[[], Tensor], graph: bool) -> Callable[[], Tensor]:
    """Compiles by two calls, and returns what does a step: `learn`, or a CUDA graph of it."""
    if not graph:
        learn(), learn()
        return learn
    stream, captured = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        learn(), learn()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    with torch.cuda.graph(captured, stream=stream):
        loss = learn()

    def replay() -> Tensor:
        captured.replay()
        return loss.clone()

    return replay


def profile(step: Callable[[], Tensor], steps: int = 3) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    rows = [(row.self_device_time_total / 1e3 / steps, row.count // steps, row.key) for row in profiler.key_averages()]
    for milliseconds, count, name in sorted(rows, reverse=True)[:40]:
        print(f"{milliseconds:8.3f} ms a step in {count:4} x {name[:110]}", flush=True)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    if sys.argv[1] == "--job":
        data, seconds, out, name, *words = sys.argv[2:]
        torch.set_float32_matmul_precision("high")
        line = json.dumps(train(Path(data), float(seconds), name, Recipe.parse(words)))
        print(line, flush=True)
        with Path(out).open("a") as file:
            file.write(line + "\n")
        return
    data, seconds, out, *jobs = sys.argv[1:]
    alive: list[subprocess.Popen] = []
    for job in jobs:
        while len(alive := [one for one in alive if one.poll() is None]) >= PREPARED_TOGETHER:
            time.sleep(0.2)
        alive.append(subprocess.Popen([sys.executable, __file__, "--job", data, seconds, out, *job.split()]))
    for one in alive:
        one.wait()


if __name__ == "__main__":
    main()
