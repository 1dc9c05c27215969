"""SIGINT at given moments of the start: a hook in sitecustomize sends it when a certain module is about to be imported."""

import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

pytest.importorskip("tyro")

from longstride.commands import interrupts
from longstride.commands.exits import exit_with_message
from longstride.commands.verbs import find_verbs

SITE = """if True:
    import os, signal, sys

    # A shell's background jobs start with SIGINT ignored, and pass that on.
    signal.signal(signal.SIGINT, signal.default_int_handler)

    class Hook:
        def find_spec(self, name, path=None, target=None):
            if name == os.environ["INTERRUPT_AT"]:
                sys.meta_path.remove(self)
                signal.raise_signal(signal.SIGINT)

    sys.meta_path.insert(0, Hook())
"""
SOURCES = Path(interrupts.__file__).parents[2]
AS_MODULE, AS_SCRIPT = ["-m", "longstride"], ["-c", "from longstride.__main__ import main; main()"]


def interrupted(tmp_path, start, words, module):
    """(exit code, standard output, standard error) of a process that gets SIGINT when it imports that module."""
    (tmp_path / "sitecustomize.py").write_text(SITE)
    path = os.pathsep.join([str(tmp_path), str(SOURCES), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "INTERRUPT_AT": module}
    command = [sys.executable, *start, *words.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=tmp_path)
    return done.returncode, done.stdout, done.stderr


WORDS = {
    "train": "text-small --data x --out y",
    "eval": "x",
    "sample": "x",
    "plot run": "x",
    "plot attention": "x",
    "data prepare": "x y",
    "data fetch": "enwik8",
    "completion": "bash",
}


@pytest.mark.parametrize("verb", find_verbs())
def test_every_verb_is_quiet_on_ctrl_c_while_it_starts(tmp_path, verb):
    words = f"{verb} {WORDS.get(verb, '')}"
    assert interrupted(tmp_path, AS_MODULE, words, "tyro") == (130, "", "longstride: interrupted\n")


@pytest.mark.parametrize(
    ("start", "words", "module"),
    [
        (AS_MODULE, "--help", "longstride.commands.main"),
        (AS_SCRIPT, "--help", "longstride.commands.main"),
        (AS_SCRIPT, "--version", "longstride.commands.exits"),
        (AS_MODULE, "presets", "rich"),
        (AS_SCRIPT, "train text-small --data sitecustomize.py --out y", "numpy"),
        (AS_MODULE, "train text-small --data sitecustomize.py --out y", "torch"),
        (AS_MODULE, "bench attention", "torch._C"),
        (AS_SCRIPT, "doctor", "torch.nn"),
        (AS_MODULE, "bench tune", "triton"),
        (AS_MODULE, "demo", "longstride.training"),
    ],
)
def test_ctrl_c_during_an_import_is_one_line(tmp_path, start, words, module):
    assert interrupted(tmp_path, start, words, module) == (130, "", "longstride: interrupted\n")


def test_the_installed_program_is_the_same():
    project = tomllib.loads((SOURCES.parent / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"longstride": "longstride.__main__:main"}


def test_only_the_main_process_prints(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert interrupted(tmp_path, AS_MODULE, "presets", "tyro") == (130, "", "")


@pytest.fixture
def handler():
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_outside_of_imports_it_is_an_exception_that_a_verb_can_catch(handler, monkeypatch, capsys):
    monkeypatch.setattr(os, "_exit", sys.exit)
    interrupts.quit_on_interrupt()
    caught = []
    with exit_with_message("sample"):
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            caught.append(1)
    assert caught == [1]
    with pytest.raises(SystemExit) as end, exit_with_message("sample"):
        signal.raise_signal(signal.SIGINT)
    assert (end.value.code, capsys.readouterr().err) == (130, "longstride: interrupted\n")
    with pytest.raises(SystemExit) as end:
        signal.raise_signal(signal.SIGINT)  # Nothing else is left to do.
    assert end.value.code == 130


def test_handlers_of_others_stay(handler):
    with exit_with_message("sample"):  # As a library: `quit_on_interrupt` was never called.
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # As nohup and a shell's background jobs have it.
    interrupts.quit_on_interrupt()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
