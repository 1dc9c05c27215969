"""Checks before a run begins, and before anything is written."""

from collections.abc import Sequence
from pathlib import Path

from longstride.common.files import real_path
from longstride.data.prepare import open_data
from longstride.data.store import Store, verify_once
from longstride.training.config import TrainConfig
from longstride.training.ranks import Ranks


def check_settings(config: TrainConfig, ranks: Ranks) -> None:
    """Whether these processes can train what the config says."""
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
    """The store of that data, after the bytes of these splits were compared with its manifest, by one process of each
    machine. Files that have not changed since they were compared are not read again."""
    store = open_data(data)
    for split in splits:
        store.path(split)
    if ranks.local == 0:
        verify_once(store, splits, progress=ranks.first)
    return store
