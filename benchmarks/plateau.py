"""Why young networks sit on a plateau of 4 to 5 bits per byte: one change at a time, on a CPU, on the bundled text.

python benchmarks/plateau.py --json benchmarks/results/plateau-cpu.json [--names base ...] [--seeds 0 1] [--steps 300]

Every run has two layers of width 128, a context of 256, and 300 steps of 8 x 256 bytes with a learning rate of 0.003.
Besides bits per byte it records how alike the network's hidden states are at different positions (the mean cosine of H_N
after its norm, over one batch): 1 is a network that has the same to say everywhere.
"""

import argparse
import json
from math import cos, log, pi
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from longstride.common.device import describe_machine
from longstride.data import samples
from longstride.model import ModelConfig, SparseTransformer
from longstride.model.recipes import apply_recipe
from longstride.training.config import OptimizerConfig
from longstride.training.optimizer import make_optimizers

CONTEXT, BATCH, WARMUP, RATE = 256, 8, 30, 0.003
BASE = ModelConfig(2, 128, 4, CONTEXT, "merged(fixed(16, 4))", "matrix(16)")
MODERN = apply_recipe(BASE, "modern")
SHOWN = (10, 30, 100, 300)
"""Steps at which the likeness of hidden states is recorded."""
VARIANTS: dict[str, dict[str, Any]] = {
    "base": {},
    "no clipping": {"clip": float("inf")},
    "beta2 0.95": {"beta2": 0.95},
    "warm-up of half the steps": {"warmup": 150},
    "init paper": {"model": {"init": "paper"}},
    "embeddings of std 0.1": {"embedding": 0.1},
    "output of std 0.02": {"output": 0.02},
    "output of std 0.1": {"output": 0.1},
    "rms norm": {"model": {"norm": "rms"}},
    "normalised queries and keys": {"model": {"qk_norm": True}},
    "rotary positions": {"model": {"embedding": "rotary"}},
    "last three bytes": {"model": {"last_bytes": 3}},
    "last three bytes, output of std 0.02": {"model": {"last_bytes": 3}, "output": 0.02},
    "init modern": {"model": {"init": "modern"}},
    "recipe modern": {"config": MODERN},
    "base, Muon": {"optimizer": "muon"},
    "output of std 0.02, Muon": {"optimizer": "muon", "output": 0.02},
    "recipe modern, Muon": {"config": MODERN, "optimizer": "muon"},
}


def run(name: str, seed: int, steps: int) -> dict[str, Any]:
    """Trains one variant. Returns validation bits per byte, the curve of training, and the likeness of hidden states."""
    change = VARIANTS[name]
    torch.manual_seed(seed)
    config = ModelConfig(**{**vars(change.get("config", BASE)), **change.get("model", {})})
    model = SparseTransformer(config)
    if "output" in change:
        nn.init.normal_(model.output.weight, std=change["output"])
    if "embedding" in change:
        nn.init.normal_(model.embedding.token.weight, std=change["embedding"])
    settings = OptimizerConfig(name=change.get("optimizer", "adamw"), beta2=change.get("beta2", 0.99))
    optimizers = make_optimizers(model, settings)
    text = torch.from_numpy(samples.text().copy())
    train, valid = text[:-65_536], text[-65_536:]
    offsets, curve, likeness = torch.arange(CONTEXT), [], {}
    for step in range(steps):
        rate = RATE * min(1, (step + 1) / change.get("warmup", WARMUP)) * 0.5 * (1 + cos(pi * step / steps))
        batch = train[torch.randint(len(train) - CONTEXT, (BATCH, 1)) + offsets]
        loss = model.loss(batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), change.get("clip", 1.0))
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad()
        curve.append(loss.item() / log(2))
        if step + 1 in SHOWN:
            likeness[step + 1] = round(_likeness(model, batch), 3)
    with torch.no_grad():
        rows = valid.view(-1, CONTEXT)
        bits = sum(model.loss(part).item() * len(part) for part in rows.split(32)) / len(rows) / log(2)
    tens = [round(sum(curve[at : at + 10]) / 10, 3) for at in range(0, steps, 10)]
    left = next((10 * at for at, value in enumerate(tens) if value < 4), None)
    return {
        "name": name,
        "seed": seed,
        "valid_bits": round(bits, 3),
        "below_4_bits": left,
        "likeness": likeness,
        "curve": tens,
    }


@torch.no_grad()
def _likeness(model: SparseTransformer, batch: Tensor) -> float:
    """Returns the mean cosine of the network's last states at two positions of a sequence."""
    states = nn.functional.normalize(model.norm(model.hidden(batch)), dim=-1)
    return float((states.mean(1).square().sum(-1)).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--names", nargs="*", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--seeds", nargs="*", type=int, default=[0])
    parser.add_argument("--steps", type=int, default=300)
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for seed in given.seeds:
        for name in given.names:
            rows.append(run(name, seed, given.steps))
            row = rows[-1]
            print(
                f"{name:40s} seed {seed}  {row['valid_bits']:.3f}  below 4 at {row['below_4_bits']}  {row['likeness']}",
                flush=True,
            )
            result = {"machine": describe_machine(torch.device("cpu")), "steps": given.steps, "rows": rows}
            given.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
