"""Checks before a run begins and before it writes anything."""

from collections.abc import Sequence
from pathlib import Path

from longstride.common.files import real_path
from longstride.data.prepare import open_data
from longstride.data.store import Store, verify_once
from longstride.training.config import TrainConfig
from longstride.training.ranks import Ranks


def check_settings(config: TrainConfig, ranks: Ranks) -> None:
    """Raises ValueError if these processes cannot train this config."""
    if not config.data:
        raise ValueError("train: --data must be given: a prepared store, or files to make one of")
    if config.out and real_path(config.data) in (real_path(config.out), *real_path(config.out).parents):
        raise ValueError(f"train: --out {config.out} lies in --data {config.data}, and would become data; give another")
    if config.parallel == "fsdp" and config.optimizer.name == "adafactor" and ranks.count > 1:
        raise ValueError("train: PyTorch's Adafactor cannot work on parts of weights; use --parallel ddp, or adamw or muon")
    if config.batch % (ranks.count * config.accumulate):
        raise ValueError(
            f"train: batch = {config.batch} must be a multiple of {ranks.count} processes times "
            f"accumulate = {config.accumulate}"
        )


def open_verified(data: str | Path, ranks: Ranks, splits: Sequence[str] = ("train", "valid")) -> Store:
    """Opens the store of the data and compares the bytes of these splits with its manifest, in one process per machine.
    Files that have not changed since the last comparison are not read again."""
    store = open_data(data)
    for split in splits:
        store.path(split)
    if ranks.local_rank == 0:
        verify_once(store, splits, progress=ranks.is_main)
    return store
