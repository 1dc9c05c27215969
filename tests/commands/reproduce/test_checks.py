from pathlib import Path

import pytest

from longstride.commands.reproduce.checks import check_settings
from longstride.commands.reproduce.settings import Reproduction, command_of


@pytest.mark.parametrize(
    ("experiment", "changes", "says"),
    [
        ("table2", {"out": None}, "--out must be given"),
        ("table2", {"steps": 0}, "steps must be at least 1"),
        ("table2", {"seconds": -1.0}, "seconds must be more than 0"),
        ("table2", {"seconds": 1.0, "steps": 1}, "give one of them"),
        ("table2", {"seeds": (1, 1)}, "seeds must be one or more different ones"),
        ("table2", {"data": (Path("nowhere"),)}, "nowhere"),
        ("table2", {"rows": ("text-modern",)}, "table2 has no row 'text-modern'"),
        ("table2", {"run": Path("nowhere")}, "nowhere"),
        ("table2", {"picture": Path("curves.txt")}, "must end in .png or .svg"),
        ("table2", {"read": Path("nowhere.json")}, "is no file"),
        ("table4", {"rows": ("65536",)}, "table4 has no --rows"),
        ("table4", {"most_bytes": 5}, "table4 has no --most-bytes"),
    ],
)
def test_what_cannot_be_run_is_refused(experiment, changes, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=says):
        check_settings(experiment, Reproduction(**{"out": tmp_path / "out", **changes}))
    assert not (tmp_path / "out").exists()


def test_several_processes_are_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="without torchrun"):
        check_settings("table2", Reproduction(out=tmp_path))


def test_the_command_has_what_differs_from_the_defaults():
    settings = Reproduction(data=(Path("a b"), Path("c")), out=Path("o"), most_bytes=5, seeds=(1, 2), force=True)
    assert command_of("table2", settings) == (
        "longstride reproduce table2 --data 'a b' c --out o --seeds 1 2 --most-bytes 5 --force"
    )
