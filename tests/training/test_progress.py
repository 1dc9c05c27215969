import io
import sys
import types

import pytest
from rich.console import Console

from longstride.training import train
from longstride.training.progress import Reporter, count, describe, duration
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


def console(terminal=False, width=60):
    return Console(file=io.StringIO(), force_terminal=terminal, width=width)


def test_describe():
    assert describe(ROW) == LINE
    assert describe({"step": 1, "bits_per_byte": 8.0}) == "8.000 bits/byte"
    assert describe({"step": 1}) == ""


@pytest.mark.parametrize(
    ("x", "text"),
    [(0, "0 "), (999, "999 "), (1000, "1.0 k"), (12_345, "12.3 k"), (2.5e6, "2.5 M"), (1e9, "1.0 G"), (3e12, "3000.0 G")],
)
def test_count(x, text):
    assert count(x) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (9.4, "0:09"), (59.7, "1:00"), (61, "1:01"), (3599.9, "1:00:00"), (90_061, "25:01:01")],
)
def test_duration(seconds, text):
    assert duration(seconds) == text


def test_plain_lines_where_there_is_no_terminal(tmp_path):
    """A line each, however long, and no control characters."""
    out = console()
    with Reporter(100, 0, tmp_path, False, out) as reporter:
        reporter.advance(1)
        reporter.row(ROW)
        reporter.row({"step": 100, "bits_per_byte": 1.0})
        reporter.say("pip install 'longstride[plot]'")
    assert out.file.getvalue() == f"step 20/100  {LINE}\nstep 100/100  1.000 bits/byte\npip install 'longstride[plot]'\n"


def test_one_live_line_on_a_terminal(tmp_path):
    out = console(terminal=True, width=200)
    with Reporter(100, 10, tmp_path, False, out) as reporter:
        reporter.advance(19)
        reporter.row(ROW)
    text = out.file.getvalue()
    assert "20/100" in text
    assert "2.885 bits/byte" in text
    assert "step 20/100" not in text
    assert text.count("\n") <= 2
    assert "\x1b[?25h" in text  # The cursor is there again.


def test_it_goes_to_standard_error(tmp_path, capsys):
    with Reporter(100, 0, tmp_path, False) as reporter:
        reporter.say("hello")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "hello\n")


def test_a_run_reports_every_logged_step(tmp_path):
    out = console()
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
    with Reporter(9, 0, tmp_path, True, console()) as reporter:
        reporter.row({"step": 3, "loss": 1.5, "skipped": 0})
    assert written == [str(tmp_path / "tensorboard"), ("loss", 1.5, 3), ("skipped", 0, 3), "closed"]
