"""Trains text-small on bundled text and compares its bits per byte with gzip and xz: longstride demo"""

import gzip
import lzma
from pathlib import Path

from rich.console import Console
from rich.table import Table

from longstride.commands.ending import describe_ending, exit_if_interrupted
from longstride.common.checks import whole_number
from longstride.common.console import with_noun
from longstride.data import samples
from longstride.data.store import Store, open_store, write_store
from longstride.evaluation import bits_per_byte
from longstride.model import SparseTransformer
from longstride.training import train, train_preset

HELD_OUT = 195 * 512
"""Bytes at the end of the text for the test split: whole sequences of text-small."""
VALIDATION = 50_000
"""Bytes before them for the validation split, which selects the best weights."""


def demo(folder: Path, steps: int, console: Console | None = None) -> float:
    """Trains `text-small` on the bundled text, and returns its bits per byte on bytes that it has never seen."""
    whole_number("demo", "steps", steps, 1)
    console = console or Console()
    store = _store(folder / "wikipedia")
    run = _next_run_folder(folder)
    console.print(f"Training text-small on {store.splits['train']:,} bytes of Wikipedia, {with_noun(steps, 'step')}.")
    config = train_preset("text-small", data=str(store.folder), out=str(run), steps=steps, validate_every=steps // 4 or 1)
    summary = train(config, console=console, preset="text-small")
    if not summary.done:
        for line in describe_ending("text-small", summary):
            console.print(line, soft_wrap=True, markup=False, highlight=False)
        exit_if_interrupted(summary)
    bits = held_out_bits(SparseTransformer.from_pretrained(run), store)

    console.print(f"The last {HELD_OUT:,} bytes of the text, which no step has seen:")
    table = Table()
    table.add_column("")
    table.add_column("bits per byte", justify="right")
    for name, size in {f"text-small after {summary.seconds:.0f} s": bits, **compressed_bits(store)}.items():
        table.add_row(name, f"{size:.3f}")
    console.print(table)
    files = "curve.png, sample-data.txt, sample-model.txt, model.safetensors, metrics.jsonl"
    console.print(f"The run is {run}: {files}", soft_wrap=True, markup=False)
    console.print(f"Let it write:            longstride sample {run} --prompt 'The '", soft_wrap=True, markup=False)
    console.print("Next, on your own bytes: longstride train text-small --data FILE --out RUN --steps 2000", soft_wrap=True)
    console.print("The paper's networks:    longstride presets")
    return bits


def held_out_bits(model: SparseTransformer, store: Store) -> float:
    """Bits per byte of the test split, in sequences as long as the context, each without bytes before it."""
    return bits_per_byte(model, store.split("test"), batch=8).bits_per_byte


def compressed_bits(store: Store) -> dict[str, float]:
    """Bits per byte of gzip and xz on the test split; of xz also when it has compressed the training text before."""
    test, training = store.split("test").tobytes(), store.split("train").tobytes()
    after_training = len(lzma.compress(training + test, preset=9)) - len(lzma.compress(training, preset=9))
    sizes = {
        "gzip -9": len(gzip.compress(test, 9)),
        "xz -9": len(lzma.compress(test, preset=9)),
        "xz -9 that has read the training text": after_training,
    }
    return {name: 8 * size / len(test) for name, size in sizes.items()}


def _store(folder: Path) -> Store:
    if folder.exists():
        return open_store(folder)
    text = samples.text()
    end = len(text) - HELD_OUT
    splits = {"train": text[: end - VALIDATION], "valid": text[end - VALIDATION : end], "test": text[end:]}
    return write_store(folder, "text", splits, source="a part of enwik8, bundled with longstride")


def _next_run_folder(folder: Path) -> Path:
    """The first of run-1, run-2, ... that does not exist."""
    number = 1
    while (folder / f"run-{number}").exists():
        number += 1
    return folder / f"run-{number}"
