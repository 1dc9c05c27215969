"""docs/architecture.md: the walk of a byte is what a training step does, and the table of files is that of the tree."""

import os
import re
import sys
import threading
from contextlib import closing
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from longstride.attention import implementation
from longstride.data import samples
from longstride.data.loader import Prefetch
from longstride.data.store import write_store
from longstride.training import train_preset
from longstride.training.trainer import Trainer
from tests.file_map import PACKAGE, PAGE, file_map
from tests.pages import section

MOST_FILES, MOST_LINES = 12, 2000
CPU = torch.device("cpu")
INSIDE = f"{PACKAGE}{os.sep}"


def listed(name: str) -> list[str]:
    return re.findall(r"^\d+\. `([\w/]+\.py)`", section(PAGE, name), re.M)


def carries_data(value: Any) -> bool:
    """Whether a value is made of the data: bytes, or activations. Weights, indices and masks are not."""
    if isinstance(value, Tensor):
        return not isinstance(value, nn.Parameter) and (value.dtype == torch.uint8 or value.is_floating_point())
    if isinstance(value, list | tuple):
        return any(map(carries_data, value))
    return isinstance(value, np.ndarray) and value.dtype == np.uint8


class Walk:
    """Which files of the package have a function that is given data, or returns it, until the first loss is there."""

    def __init__(self) -> None:
        self.files: dict[str, None] = {}
        self.arrived = False

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        path = frame.f_code.co_filename
        if self.arrived or event not in ("call", "return") or not path.startswith(INSIDE):
            return
        values = list(frame.f_locals.values()) if event == "call" else [argument]
        if any(map(carries_data, values)):
            self.files.setdefault(path.removeprefix(INSIDE))
        if event == "return" and frame.f_code.co_qualname == "SparseTransformer.loss":
            self.arrived = True

    def __enter__(self) -> "Walk":
        threading.setprofile(self)
        sys.setprofile(self)
        return self

    def __exit__(self, *_: Any) -> None:
        sys.setprofile(None)
        threading.setprofile(None)


@pytest.fixture
def walk(tmp_path) -> Any:
    """One step of training of the paper's network on a CPU, traced."""
    text = samples.text()[:8000]
    write_store(tmp_path / "store", "text", {"train": text[:7000], "valid": text[7000:]}, source="bundled text")
    config = train_preset(
        "text-small", "paper", data=str(tmp_path / "store"), out=str(tmp_path / "run"), steps=1, batch=1, device="cpu"
    )

    def traced() -> list[str]:
        batch = (config.seed, config.batch, 0, 1)
        with Walk() as walk, closing(Trainer(config, False)) as trainer, Prefetch(trainer.training, *batch, CPU) as batches:
            trainer.take_step(next(iter(batches)))
        assert walk.arrived
        return list(walk.files)

    return traced


def test_the_walk_of_a_byte_is_as_listed(walk, monkeypatch):
    monkeypatch.setattr(implementation, "choose", lambda *_: implementation.Choice("reference", "the definition"))
    assert walk() == listed("walk")


def test_blocked_attention_takes_the_place_of_the_definition(walk):
    assert set(walk()) == set(listed("walk")) - {"attention/reference.py"} | set(listed("blocked"))


def test_the_walk_is_short():
    files = listed("walk")
    assert len(files) <= MOST_FILES
    assert sum(len((PACKAGE / file).read_text().splitlines()) for file in files) <= MOST_LINES


def test_the_table_of_files_is_that_of_the_tree():
    assert section(PAGE, "files") == file_map(), "run: python -m tests.file_map"
