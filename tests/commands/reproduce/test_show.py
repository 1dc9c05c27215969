from pathlib import Path

import pytest

from longstride.commands.bench.memory_results import read_memory
from longstride.commands.bench.report import save
from longstride.commands.main import main
from longstride.commands.reproduce.results import Reproduced, ScoreRow
from longstride.pictures import reproduced
from tests.commands.reproduce.rows import row

KEPT = Path(__file__).parents[3] / "benchmarks" / "results"


def test_results_are_read_again_and_drawn(tmp_path, capsys):
    path, picture = tmp_path / "table2.json", tmp_path / "curves.png"
    save(Reproduced("table2", "", [row(), row("cifar10-fixed", data="images")]), path)
    main(["reproduce", "table2", "--read", str(path), "--picture", str(picture)])
    out = capsys.readouterr().out
    assert "enwik8-fixed" in out
    assert f"wrote {picture}" in out
    assert picture.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SystemExit):
        main(["reproduce", "table2", "--read", str(path), "--picture", str(picture)])
    assert "add --force" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["reproduce", "contest", "--read", str(path)])
    assert "has table2, and contest is asked for" in capsys.readouterr().err


def test_the_picture_of_table_3_has_its_scores(tmp_path, monkeypatch):
    """Also those of a run that was given, which has no curve."""
    drawn = []
    monkeypatch.setattr(reproduced, "plot_contexts", lambda *given: drawn.append(given))
    scores = [ScoreRow(least, 1.3 - place / 10, 500, 2, 0.1) for place, least in enumerate((0, 192))]
    save(Reproduced("table3", "", [row(scores=scores, settings={"run": "mine"}, validation_steps=[])]), tmp_path / "a.json")
    main(["reproduce", "table3", "--read", str(tmp_path / "a.json"), "--picture", str(tmp_path / "a.png")])
    ((contexts, (ours, paper), _, title),) = drawn
    assert contexts[:3] == ["0", "192", "9,216"]
    assert ours == ("mine", [1.3, 1.2, *[None] * 5])
    assert (paper[0], paper[1][:2], title) == ("paper", [None, 0.9952], "table 3: bits per byte by least context")


@pytest.mark.parametrize("path", sorted(KEPT.glob("memory-*.json")), ids=lambda path: path.stem)
def test_table_4_reads_results_that_are_kept(path, tmp_path, capsys):
    main(["reproduce", "table4", "--read", str(path), "--picture", str(tmp_path / "memory.png")])
    row = "8,388,608    154.7      -" if path.stem.endswith("longest") else "1,048,576    152.6      3"
    assert row in capsys.readouterr().out
    assert (tmp_path / "memory.png").is_file()


def test_table_4_is_bench_memory(tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "table4.json").write_text("of an earlier call")
    main(["reproduce", "table4", "--scale", "tiny", "--out", str(tmp_path / "out"), "--steps", "1"])
    assert [row.context for row in read_memory(tmp_path / "out" / "table4.json").rows] == [64, 256]
    assert "steps in limited memory, and table 4" in capsys.readouterr().out
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"table4.json", "table4.png"}


def test_a_picture_that_cannot_be_drawn_costs_no_results(tmp_path, monkeypatch, capsys):
    def fail(*_):
        raise ValueError("no matplotlib")

    monkeypatch.setattr(reproduced, "plot_curves", fail)
    out = str(tmp_path / "out")
    main(["reproduce", "contest", "--scale", "tiny", "--out", out, "--rows", "dense-1024", "--steps", "1"])
    assert "the picture is not drawn: no matplotlib" in capsys.readouterr().out
    assert (tmp_path / "out" / "contest.json").is_file()
