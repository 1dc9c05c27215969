"""Shows the text model that comes with longstride, trains another, and compares both with gzip and xz: longstride demo"""

import gzip
import lzma
from codecs import getincrementaldecoder
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from itertools import chain
from pathlib import Path

from rich.console import Console
from rich.table import Table

from longstride.commands.ending import describe_ending, exit_if_interrupted
from longstride.common.checks import printable, whole_number
from longstride.common.console import Progress, with_noun
from longstride.data import samples
from longstride.data.store import Store, open_store, write_store
from longstride.evaluation import bits_per_byte
from longstride.model import SparseTransformer
from longstride.model.card import read_card
from longstride.model.shipped import is_here, model_folder, why_absent
from longstride.sampling import generate
from longstride.training import train, train_preset

NAME = "text"
"""The model that comes with longstride."""
PROMPT, LENGTH, TEMPERATURE = b"The ", 400, 0.8
"""What it continues, by how many bytes, and how boldly."""
UNSEEN = 32_768
"""Bytes of text that it reads: half a minute on one core."""
HELD_OUT = 195 * 512
"""Bytes at the end of the text for the test split: whole sequences of text-small."""
VALIDATION = 50_000
"""Bytes before them for the validation split, which selects the best weights."""


def demo(folder: Path, steps: int, console: Console | None = None) -> float:
    """Shows the model that comes with longstride. Then trains `text-small` on the bundled text, and returns the bits per
    byte of bytes that it has never seen."""
    whole_number("demo", "steps", steps, 1)
    console = console or Console()
    show_text_model(console)
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
    others = compressed_bits(store.split("test").tobytes(), store.split("train").tobytes())
    _show_bits(console, {f"text-small after {summary.seconds:.0f} s": bits, **others})
    files = "curve.png, sample-data.txt, sample-model.txt, model.safetensors, metrics.jsonl"
    console.print(f"The run is {run}: {files}", soft_wrap=True, markup=False)
    console.print(f"Let it write:            longstride sample {run} --prompt 'The '", soft_wrap=True, markup=False)
    console.print("Next, on your own bytes: longstride train text-small --data FILE --out RUN --steps 2000", soft_wrap=True)
    console.print("The paper's networks:    longstride presets")
    return bits


def show_text_model(console: Console) -> float | None:
    """Lets the model that comes with longstride write, and returns its bits per byte on text that it has never seen."""
    if not is_here(NAME):
        console.print(f"{NAME} is not here: {why_absent(NAME)}", soft_wrap=True, markup=False, highlight=False)
        return None
    folder = model_folder(NAME)
    model = SparseTransformer.from_pretrained(folder)
    card, data = read_card(folder), samples.unseen_text()[:UNSEEN]
    about = f", {card.parameters / 1e6:.1f} million weights, trained on {card.data.partition('. ')[0]}" if card else ""
    console.print(f"The model {NAME!r}, which comes with longstride{about}, writes:", highlight=False)
    decoder = getincrementaldecoder("utf-8")("replace")
    try:
        for new in chain([[PROMPT]], generate(model, [PROMPT], LENGTH, temperature=TEMPERATURE)):
            letters = printable(decoder.decode(new[0]), kept="\n\t")
            console.print(letters, end="", style="bold", soft_wrap=True, markup=False, highlight=False)
    finally:  # Also at Ctrl-C.
        console.print()
    with Progress(data.size, console, name="reading what it has not seen") as progress:
        score = bits_per_byte(model, data, batch=1, progress=lambda share, *_: progress.update(share * data.size))
    console.print(f"{data.size:,} bytes of Wikipedia that it has not seen, in sequences of {model.config.context:,}:")
    _show_bits(console, {f"{NAME}, {score.seconds:.0f} s": score.bits_per_byte, **compressed_bits(data.tobytes())})
    if zstd() is None:
        console.print("zstd is left out: it comes with Python 3.14, and with pip install zstandard.")
    console.print(f"Let it write more:       longstride sample {NAME} --prompt 'The '", highlight=False)
    return score.bits_per_byte


def held_out_bits(model: SparseTransformer, store: Store) -> float:
    """Bits per byte of the test split, in sequences as long as the context, each without bytes before it."""
    return bits_per_byte(model, store.split("test"), batch=8).bits_per_byte


def compressed_bits(data: bytes, training: bytes = b"") -> dict[str, float]:
    """Bits per byte of gzip, xz and, where there is one, zstd; of xz also when it has compressed `training` before."""
    sizes = {"gzip -9": len(gzip.compress(data, 9)), "xz -9": len(lzma.compress(data, preset=9))}
    if (compress := zstd()) is not None:
        sizes["zstd -19"] = len(compress(data, 19))
    if training:
        after = len(lzma.compress(training + data, preset=9)) - len(lzma.compress(training, preset=9))
        sizes["xz -9 that has read the training text"] = after
    return {name: 8 * size / len(data) for name, size in sizes.items()}


def zstd() -> Callable[[bytes, int], bytes] | None:
    """The compressor of Python 3.14, or of the package zstandard; None without them."""
    for name in ("compression.zstd", "zstandard"):
        with suppress(ImportError):
            compress: Callable[[bytes, int], bytes] = import_module(name).compress
            return compress
    return None


def _show_bits(console: Console, bits: dict[str, float]) -> None:
    table = Table()
    table.add_column("")
    table.add_column("bits per byte", justify="right")
    for name, size in bits.items():
        table.add_row(name, f"{size:.3f}")
    console.print(table)


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
