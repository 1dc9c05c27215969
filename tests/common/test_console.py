import io
import sys

import pytest
from rich.console import Console

from longstride.common.console import Progress, StandardError, format_count, format_duration, with_noun


def console(terminal=False, width=200):
    return Console(file=io.StringIO(), force_terminal=terminal, width=width)


@pytest.mark.parametrize(
    ("x", "text"),
    [(0, "0 "), (999, "999 "), (1000, "1.0 k"), (12_345, "12.3 k"), (2.5e6, "2.5 M"), (1e9, "1.0 G"), (3e12, "3000.0 G")],
)
def test_count(x, text):
    assert format_count(x) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (9.4, "0:09"), (59.7, "1:00"), (61, "1:01"), (3599.9, "1:00:00"), (90_061, "25:01:01")],
)
def test_duration(seconds, text):
    assert format_duration(seconds) == text


def test_a_count_has_its_noun_in_the_right_number():
    assert [with_noun(count, "step") for count in (0, 1, 2, 5000)] == ["0 steps", "1 step", "2 steps", "5,000 steps"]


def test_bytes_are_a_live_line_on_a_terminal_and_lines_elsewhere():
    for terminal in (True, False):
        out = console(terminal)
        with Progress(400, out, name="a [file]") as progress:
            for _ in range(20):
                progress.advance(20)
        text = out.file.getvalue()
        assert "a [file]  400 of 400 bytes  " in text
        assert " bytes/s  0:00 left" in text
        assert ("\x1b" in text) is terminal
        if not terminal:
            assert len(text.splitlines()) == 10
        else:
            assert text.endswith("\x1b[2K")  # The line is removed.


def test_a_note_replaces_the_rate():
    out = console()
    with Progress(1000, out, name="min context 0") as progress:
        progress.update(1000, "1.4427 bits/byte")
    assert out.file.getvalue() == "min context 0  1,000 of 1,000 bytes  1.4427 bits/byte  0:00 left\n"


def test_the_rate_counts_what_was_done_here():
    progress = Progress(1000, console(), done=600)
    progress.begun, progress.ended = 0.0, 4.0
    progress.update(800)
    assert progress.line == "800 of 1,000 bytes  50 bytes/s  0:04 left"
    assert progress.summary() == "800 bytes in 0:04, 50 bytes/s"
    assert Progress(1, console(), done=1).summary().startswith("1 byte in ")


def test_a_total_of_zero_and_one_that_was_too_small():
    """Totals may be estimates."""
    for total in (0, 5):
        out = console()
        with Progress(total, out) as progress:
            progress.advance(10)
        assert f"10 of {total} bytes" in out.file.getvalue()
        assert "0:00 left" in out.file.getvalue()


@pytest.mark.parametrize("options", [{"shown": False}, {"plain_lines": False}])
def test_nothing_is_printed_where_it_is_not_wanted(options):
    out = console()
    with Progress(10, out, **options) as progress:
        progress.advance(10)
    assert out.file.getvalue() == ""
    with Progress(10, console(terminal=True), **options) as progress:
        assert (progress.live is not None) is options.get("shown", True)


def test_steps_are_plain_lines_where_there_is_no_terminal():
    """A line each, however long, and no control characters."""
    out = console(width=20)
    with Progress(100, out, steps=True) as progress:
        progress.update(1)
        progress.log(20, "2.885 bits/byte  validation 3.000")
        progress.log(100, "1.000 bits/byte")
        progress.say("pip install 'longstride[plot]'")
    lines = ["step 20/100  2.885 bits/byte  validation 3.000", "step 100/100  1.000 bits/byte"]
    assert out.file.getvalue().splitlines() == [*lines, "pip install 'longstride[plot]'"]


def test_steps_are_one_live_line_on_a_terminal():
    out = console(terminal=True)
    with Progress(100, out, done=10, steps=True) as progress:
        progress.log(20, "2.885 bits/byte")
        progress.update(21)
    text = out.file.getvalue()
    assert "21/100  2.885 bits/byte" in text
    assert "step 20/100" not in text
    assert text.count("\n") <= 2
    assert "\x1b[?25h" in text  # The cursor is there again.


def test_it_goes_to_standard_error(capsys):
    with Progress(100) as progress:
        progress.say("hello")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "hello\n")


def test_a_line_that_the_disk_has_no_room_for_is_left_out(monkeypatch):
    class Disk(io.StringIO):
        full = True

        def write(self, text):
            if self.full:
                raise OSError(28, "No space left on device")
            return super().write(text)

    monkeypatch.setattr(sys, "stderr", disk := Disk())
    with Progress(100, StandardError(), steps=True) as progress:
        progress.log(10, "lost")
        disk.full = False
        progress.log(20, "kept")
    assert disk.getvalue() == "step 20/100  kept\n"
