import io
import sys
import types

import pytest
from rich.console import Console

from longstride.training import train
from longstride.training.reporting import TensorBoard, describe
from tests.training.small import config

ROW = {
    "step": 20,
    "loss": 2.0,
    "bits_per_byte": 2.8854,
    "valid_bits_per_byte": 3.0,
    "bytes_per_second": 12_345.0,
    "matrix_share": 0.456,
    "memory_gib": 1.25,
    "gradient_norm": 0.5,
    "loss_scale": 65536.0,
    "seconds_left": 3661.0,
}
LINE = "2.885 bits/byte  validation 3.000  1:01:01 left  12.3 kB/s  46 % matrix  1.2 GiB  gradient 0.50  scale 65536"


def test_describe():
    assert describe(ROW) == LINE
    assert describe({"step": 1, "bits_per_byte": 8.0}) == "8.000 bits/byte"
    assert describe({"step": 1}) == ""


def test_a_run_reports_every_logged_step(tmp_path):
    out = Console(file=io.StringIO(), width=60)
    train(config(tmp_path, steps=7), console=out)
    lines = out.file.getvalue().splitlines()
    assert [line.split("  ")[0] for line in lines] == ["step 3/7", "step 6/7", "step 7/7"]
    assert ["validation" in line for line in lines] == [False, True, True]


def test_without_tensorboard_nothing_begins(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ValueError, match="--tensorboard needs the package: pip install tensorboard"):
        train(config(tmp_path, tensorboard=True))
    assert not (tmp_path / "run").exists()


def test_tensorboard_gets_every_number(tmp_path, monkeypatch):
    class Writer:
        def __init__(self, folder):
            written.append(folder)

        def add_scalar(self, *row):
            written.append(row)

        def close(self):
            written.append("closed")

    written = []
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", types.SimpleNamespace(SummaryWriter=Writer))
    with TensorBoard(tmp_path, enabled=True) as board:
        board.add({"step": 3, "loss": 1.5, "skipped": 0})
    assert written == [str(tmp_path / "tensorboard"), ("loss", 1.5, 3), ("skipped", 0, 3), "closed"]
