import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("tyro")

from longstride.commands.parser import parse, whole_number_from


def verb(
    source: str,
    steps: int = 3,
    rate: float = 0.5,
    most: int | None = None,
    sizes: tuple[int, ...] = (1,),
    kind: str = "text",
    flag: bool = False,
) -> None:
    """A verb."""
    CALLS.append((source, steps, rate, most, sizes, kind, flag))


CALLS: list[tuple[object, ...]] = []


def error(*words):
    with pytest.raises(ValueError, match=r"^try: ") as caught:
        parse(verb, "longstride try", words)
    message = str(caught.value)
    assert "\n" not in message
    return message.removeprefix("try: ").removesuffix("; longstride try --help lists the flags")


def test_whole_numbers_in_scientific_notation():
    CALLS.clear()
    words = "--source a --steps 1e3 --most 2E2 --sizes 1 1e1 1_000 --rate 1e-3"
    parse(verb, "longstride try", words.split(" "))()
    assert CALLS == [("a", 1000, 0.001, 200, (1, 10, 1000), "text", False)]
    assert whole_number_from("1.5e1") == 15
    assert whole_number_from("-2e0") == -2


@pytest.mark.parametrize("text", ["1.5e0", "abc", "1.0", "1e-1", "nan", "inf", "1e999999999", "", "9" * 5000, "e"])
def test_what_is_no_whole_number(text):
    with pytest.raises(ValueError, match="must be a whole number, got "):
        whole_number_from(text)


def test_nothing_runs_before_all_is_read():
    CALLS.clear()
    call = parse(verb, "longstride try", ["--source", "a"])
    assert CALLS == []
    call()
    assert len(CALLS) == 1


def test_the_nearest_flag_is_named():
    assert error("--source", "a", "--stesp", "4") == "there is no flag --stesp; did you mean --steps?"
    assert error("--source", "a", "--no-flg") == "there is no flag --no-flg; did you mean --no-flag?"
    assert error("--source", "a", "--Steps=4") == "there is no flag --Steps; did you mean --steps?"
    assert error("--source", "a", "--zzz") == "there is no flag --zzz"
    assert error("--source", "a", "-x") == "there is no flag -x"


def test_what_the_parser_refuses_is_one_line():
    assert error().endswith("must be given")
    assert error("--source", "a", "--steps", "abc") == "--steps must be a whole number, got 'abc'"
    assert error("--source", "a", "--most", "abc") == "--most must be a whole number, got 'abc'"
    assert error("--source", "a", "--rate", "x") == "--rate must be a number, got 'x'"
    assert error("--source", "a", "--steps") == "--steps needs a value"
    assert error("--source", "a", "b") == "unexpected 'b'"
    assert error("--source", "a", "--sizes", "1", "b") == "--sizes cannot be '1', 'b'"


def test_no_path_is_empty():
    """Such as of a shell variable that is not set: it would be the current folder."""

    def verb(run: Path, out: Path | None = None) -> None:
        """A verb."""

    for words, flag in ((["--run", ""], "--run"), (["--run", "a", "--out", ""], "--out")):
        with pytest.raises(ValueError, match=f"verb: {flag} must be a path, got ''"):
            parse(verb, "longstride verb", words)
    call = parse(verb, "longstride verb", ["--run", ".", "--out", "b"])
    assert call.keywords == {"run": Path("."), "out": Path("b")}


def test_errors_are_the_same_in_a_narrow_window(monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    assert error("--source", "a", "--stesp", "4") == "there is no flag --stesp; did you mean --steps?"
    assert error("--source", "a", "--steps", "abc") == "--steps must be a whole number, got 'abc'"


def test_optional_flags_are_read_without_typeguard():
    """Its import takes longer than that of tyro."""
    program = "import sys; from longstride.commands.main import main; main(['train', '--help'])"
    done = subprocess.run([sys.executable, "-X", "importtime", "-c", program], capture_output=True, text=True, check=True)
    assert "--until INT" in done.stdout
    assert "tyro" in done.stderr
    assert "typeguard" not in done.stderr
