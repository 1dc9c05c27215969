"""A GPT-2 of transformers trained with dense attention, switched to sparse patterns, and fine-tuned with them.

python examples/finetune_transformers.py --steps 1500 --more 300 --json finetune.json

Prints bits per byte of held-out text: after dense training, right after the switch, and after more steps with the pattern;
beside them, after as many more dense steps on the same bytes. Takes six minutes of one core.
"""

import argparse
import copy
import json
from math import log
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from longstride.common.device import describe_machine
from longstride.data import samples
from longstride.transformers import set_attention_pattern

LAYERS, WIDTH, HEADS, CONTEXT, BATCH, HELD_OUT = 2, 128, 4, 256, 8, 65_536
PATTERNS = {"merged": "local(16) | column(16)", "a pattern per layer": ["local(16)", "column(16)"]}


def fit(model: GPT2LMHeadModel, text: torch.Tensor, steps: int, rate: float, seed: int) -> None:
    """Trains on random pieces of the text, with Muon for the matrices of blocks; learning rates fall to 0."""
    matrices = {name: x for name, x in model.named_parameters() if ".h." in name and x.dim() == 2}
    others = [x for name, x in model.named_parameters() if name not in matrices]
    optimizers = [
        torch.optim.Muon(matrices.values(), 0.02 * rate, weight_decay=0.0),
        torch.optim.AdamW(others, 0.003 * rate, betas=(0.9, 0.95)),
    ]
    schedules = [
        torch.optim.lr_scheduler.OneCycleLR(x, x.defaults["lr"], steps + 1, pct_start=0.1, cycle_momentum=False)
        for x in optimizers
    ]
    chosen = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        starts = torch.randint(len(text) - CONTEXT, (BATCH, 1), generator=chosen)
        batch = text[starts + torch.arange(CONTEXT)]
        model(batch, labels=batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for step in (*optimizers, *schedules):
            step.step()
        model.zero_grad()


@torch.no_grad()
def bits_per_byte(model: GPT2LMHeadModel, text: torch.Tensor) -> float:
    """Of all bytes but the first of each piece of CONTEXT."""
    pieces = text[: len(text) // CONTEXT * CONTEXT].view(-1, CONTEXT)
    nats = sum(model(part, labels=part).loss.item() * len(part) for part in pieces.split(16))
    return nats / len(pieces) / log(2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1500, help="with dense attention")
    parser.add_argument("--more", type=int, default=300, help="after the switch")
    parser.add_argument("--held-out", type=int, default=HELD_OUT, help="bytes that are scored")
    parser.add_argument("--json", type=Path, help="a file for the results")
    options = parser.parse_args()
    torch.manual_seed(0)
    text = torch.frombuffer(bytearray(samples.text()), dtype=torch.uint8).long()
    train, valid = text[:-HELD_OUT], text[-HELD_OUT:][: options.held_out]
    results: dict[str, float] = {}

    def report(name: str, model: GPT2LMHeadModel) -> None:
        results[name] = round(bits_per_byte(model, valid), 4)
        print(f"{name:40} {results[name]:.3f} bits per byte", flush=True)

    dense = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=256, n_positions=CONTEXT, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, attn_pdrop=0.0,
            embd_pdrop=0.0, resid_pdrop=0.0, bos_token_id=None, eos_token_id=None,
        )
    )  # fmt: skip
    fit(dense, train, options.steps, 1.0, seed=0)
    report("dense", dense)
    for name, pattern in PATTERNS.items():
        sparse = copy.deepcopy(dense)
        set_attention_pattern(sparse, pattern)
        report(f"{name}, switched", sparse)
        fit(sparse, train, options.more, 0.3, seed=1)
        report(f"{name}, fine-tuned", sparse)
    fit(dense, train, options.more, 0.3, seed=1)
    report("dense, as many more steps", dense)
    if options.json is not None:
        result = {
            "machine": describe_machine(torch.device("cpu")),
            "settings": {
                "steps": options.steps, "more": options.more, "held_out": len(valid), "layers": LAYERS, "width": WIDTH,
                "heads": HEADS, "context": CONTEXT, "batch": BATCH, "patterns": PATTERNS,
            },
            "bits_per_byte": results,
        }  # fmt: skip
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
