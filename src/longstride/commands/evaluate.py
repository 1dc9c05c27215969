"""Bits per byte of a run or a saved model on a split, a row for each minimum context: the paper's table 3.

longstride eval RUN --split test --min-context 0 256 384
"""

import io
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from math import log
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from longstride.common.checks import whole_number
from longstride.common.console import Progress, StandardError, format_duration, print_line
from longstride.common.device import describe_machine
from longstride.common.files import check_run_folder, file_sha256
from longstride.data.store import Store
from longstride.evaluation.results import Results
from longstride.evaluation.scoring import Bytes, Score, bits_per_byte, check_min_context
from longstride.model import SparseTransformer
from longstride.model.saved_config import read_config, settings_path
from longstride.training.preflight import open_verified
from longstride.training.ranks import Ranks, join_process_group
from longstride.training.run import WEIGHTS
from longstride.training.source import Source, open_source, open_source_data


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
    with join_process_group(device) as ranks:
        place = ranks.device(device, "eval")
        model = SparseTransformer.from_pretrained(source.weights, **({"precision": precision} if precision else {}))
        opened = open_source_data(
            "eval", source, model.config, data,
            lambda path: ranks.run_first_per_machine(lambda: open_verified(path, ranks, [split])),
        )  # fmt: skip
        store = opened.store
        contexts = [check_min_context("eval", given, model.config.context, bool(store.item)) for given in min_context]
        if len(set(contexts)) < max(1, len(contexts)):
            raise ValueError(f"eval: min_context must be one or more different ones, got {contexts}")
        if batch is not None:
            whole_number("eval", "batch", batch, 1)
        data_bytes = _bytes_to_score(store, split, most_bytes)
        about = {
            "evaluated": str(source.weights),
            "weights_sha256": _digest(source.weights / WEIGHTS, ranks),
            "model": asdict(model.config),
            "data": {"path": str(opened.path), "kind": store.kind, "split": split, "sha256": store.sha256[split]},
            "bytes": data_bytes.size,
        }
        how = {"batch": batch, "processes": ranks.count, "machine": describe_machine(place)}
        given = results is not None
        if results is None and opened.is_training_data:
            checkpoint_part = f"-{source.checkpoint}" if source.checkpoint else ""
            size_part = f"-first-{data_bytes.size}" if data_bytes.size < store.splits[split] else ""
            own_precision = read_config(settings_path(source.weights)).precision
            precision_part = "" if precision in (None, own_precision) else f"-{precision}"
            check_run_folder("eval", source.folder)
            results = source.folder / f"eval-{split}{checkpoint_part}{size_part}{precision_part}.json"
        file = None if results is None else ranks.run_on_first(lambda: Results(results, about, not given, force))
        model = model.to(place)
        console = StandardError() if ranks.is_main else Console(file=io.StringIO())
        if opened.remark:
            print_line(console, opened.remark)
        rows: list[Score] = []
        for context in contexts:
            with Progress(data_bytes.size, console, name=f"min context {context:,}") as progress:
                report = partial(show_score, progress, ranks.count == 1)
                rows.append(bits_per_byte(model, data_bytes, min_context=context, batch=batch, ranks=ranks, progress=report))
            if file is not None:
                file.add({**asdict(rows[-1]), **how})
        if ranks.is_main:
            _show(source, store, split, rows)
            if file is not None:
                print(f"wrote {file.path}")
    return rows


def show_score(progress: Progress, alone: bool, share: float, scored: int, nats: float) -> None:
    """Shows the bits per byte so far; one process of several knows only its own. `share`: of this process's work; others
    have done about as much."""
    progress.update(share * progress.total, f"{nats / scored / log(2):.4f} bits/byte" if alone and scored else "")


def _bytes_to_score(store: Store, split: str, most: int | None) -> Bytes:
    """The split, or its first bytes; images are never cut, [images, bytes]."""
    scored: Bytes = store.split(split)
    if most is not None:
        most = whole_number("eval", "most_bytes", most, store.item_bytes or 1)
        scored = scored[: most - most % (store.item_bytes or 1)]
    return scored if store.item_bytes is None else scored.reshape(-1, store.item_bytes)


def _digest(path: Path, ranks: Ranks) -> str:
    digest = file_sha256(path)
    # A run in progress may have replaced its best weights.
    if len(set(ranks.gather(torch.tensor(int(digest[:15], 16))).tolist())) > 1:
        raise ValueError(f"eval: {path} changed while it was read; evaluate once more")
    return digest


def _show(source: Source, store: Store, split: str, rows: Sequence[Score]) -> None:
    console = Console()
    scored = f"{rows[0].bytes:,} of {store.splits[split]:,}"
    print_line(console, f"{source.weights} on {split} of {store.shown}: {scored} bytes")
    table = Table()
    for name in ("min context", "bits per dim = bits per byte" if store.item else "bits per byte", "windows", "time"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(f"{row.min_context:,}", f"{row.bits_per_byte:.4f}", f"{row.windows:,}", format_duration(row.seconds))
    console.print(table)
