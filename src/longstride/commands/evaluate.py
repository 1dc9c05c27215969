"""Bits per byte of a run or a saved model on a split, a row for each minimum context: the paper's table 3.

longstride eval RUN --split test --min-context 0 256 384
"""

import hashlib
import io
from collections.abc import Sequence
from dataclasses import asdict
from math import log
from pathlib import Path
from time import perf_counter

import torch
from rich.console import Console
from rich.table import Table

from longstride.common.checks import whole_number
from longstride.common.console import Bar, StandardError, duration
from longstride.common.device import machine
from longstride.common.files import check_run_folder
from longstride.data.store import Store
from longstride.evaluation.results import Results
from longstride.evaluation.scoring import Bytes, Score, bits_per_byte, check_min_context
from longstride.model import ModelConfig, SparseTransformer
from longstride.model.pretrained import read_config, settings_path
from longstride.training.preflight import open_verified
from longstride.training.ranks import Ranks, joined
from longstride.training.source import WEIGHTS, Source, is_the_runs, open_source, run_data


def evaluate(
    folder: Path,
    data: Path | None = None,
    split: str = "valid",
    min_context: Sequence[int] = (0,),
    checkpoint: str | None = None,
    batch: int | None = None,
    device: str = "auto",
    precision: str | None = None,
    most_bytes: int | None = None,
    results: Path | None = None,
    force: bool = False,
) -> list[Score]:
    """Scores the split once for each minimum context, prints a table, and writes JSON. `longstride eval --help` has more.

    Processes started by torchrun share the windows; the first one prints and writes.
    """
    source = open_source("eval", folder, checkpoint)
    with joined(device) as ranks:
        place = ranks.device(device, "eval")
        read = run_data("eval", source) if data is None else data
        store = ranks.run_first_per_machine(lambda: open_verified(read, ranks, [split]))
        model = SparseTransformer.from_pretrained(source.weights, **({"precision": precision} if precision else {}))
        _check_data_fits(store, model.config)
        contexts = [check_min_context("eval", given, model.config.context, bool(store.item)) for given in min_context]
        if len(set(contexts)) < max(1, len(contexts)):
            raise ValueError(f"eval: min_context must be one or more different ones, got {contexts}")
        if batch is not None:
            whole_number("eval", "batch", batch, 1)
        data_bytes = _bytes_to_score(store, split, most_bytes)
        own = is_the_runs("eval", source, store, asked_for=data is not None)
        about = {
            "evaluated": str(source.weights),
            "weights_sha256": _digest(source.weights / WEIGHTS, ranks),
            "model": asdict(model.config),
            "data": {"path": str(store.folder), "kind": store.kind, "split": split, "sha256": store.sha256[split]},
            "bytes": data_bytes.size,
        }
        how = {"batch": batch, "processes": ranks.count, "machine": machine(place)}
        given = results is not None
        if results is None and own:
            checkpoint_part = f"-{source.checkpoint}" if source.checkpoint else ""
            size_part = f"-first-{data_bytes.size}" if data_bytes.size < store.splits[split] else ""
            precision_part = (
                "" if precision in (None, read_config(settings_path(source.weights)).precision) else f"-{precision}"
            )
            check_run_folder("eval", source.folder)
            results = source.folder / f"eval-{split}{checkpoint_part}{size_part}{precision_part}.json"
        file = None if results is None else ranks.run_on_first(lambda: Results(results, about, not given, force))
        model = model.to(place)
        console = StandardError() if ranks.first else Console(file=io.StringIO())
        rows: list[Score] = []
        for context in contexts:
            with Meter(console, f"min context {context:,}", data_bytes.size, ranks.count) as meter:
                rows.append(bits_per_byte(model, data_bytes, min_context=context, batch=batch, ranks=ranks, progress=meter))
            if file is not None:
                file.add({**asdict(rows[-1]), **how})
        if ranks.first:
            _show(source, store, split, rows)
            if file is not None:
                print(f"wrote {file.path}")
    return rows


class Meter(Bar):
    """Progress of an evaluation."""

    def __init__(self, console: Console, name: str, total: int, processes: int) -> None:
        super().__init__(console, line=name)
        self.name, self.bytes, self.processes = name, total, processes
        self.begun = perf_counter()

    def __call__(self, share: float, scored: int, nats: float) -> None:
        """Shows the progress of this process times the number of processes: all are about equally far."""
        left = (perf_counter() - self.begun) * (1 - share) / share
        done = min(scored * self.processes, self.bytes)
        bits = f"{nats / scored / log(2):.4f} bits/byte" if scored else ""
        self.show(share, f"{self.name}  {done:,} of {self.bytes:,} bytes  {bits}  {duration(left)} left")


def _check_data_fits(store: Store, config: ModelConfig) -> None:
    if store.item_bytes is not None and store.item_bytes != config.context:
        raise ValueError(
            f"eval: {store.folder} has images of {store.item_bytes:,} bytes, and the model's context is {config.context:,}"
        )
    sizes = config.positions.sizes
    if len(sizes) == 3 and store.item != sizes:
        have = f"images of {' x '.join(map(str, store.item))}" if store.item else store.kind
        raise ValueError(f"eval: {store.folder} has {have}, and the model is for images of {' x '.join(map(str, sizes))}")


def _bytes_to_score(store: Store, split: str, most: int | None) -> Bytes:
    """The split, or its first bytes; images are never cut, [images, bytes]."""
    scored: Bytes = store.split(split)
    if most is not None:
        most = whole_number("eval", "most_bytes", most, store.item_bytes or 1)
        scored = scored[: most - most % (store.item_bytes or 1)]
    return scored if store.item_bytes is None else scored.reshape(-1, store.item_bytes)


def _digest(path: Path, ranks: Ranks) -> str:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    # A run in progress may have replaced its best weights.
    if len(set(ranks.gather(torch.tensor(int(digest[:15], 16))).tolist())) > 1:
        raise ValueError(f"eval: {path} changed while it was read; evaluate once more")
    return digest


def _show(source: Source, store: Store, split: str, rows: Sequence[Score]) -> None:
    console = Console()
    scored = f"{rows[0].bytes:,} of {store.splits[split]:,}"
    console.print(f"{source.weights} on {split} of {store.folder}: {scored} bytes", highlight=False, soft_wrap=True)
    table = Table()
    for name in ("min context", "bits per dim = bits per byte" if store.item else "bits per byte", "windows", "time"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(f"{row.min_context:,}", f"{row.bits_per_byte:.4f}", f"{row.windows:,}", duration(row.seconds))
    console.print(table)
