import sys

import pytest

pytest.importorskip("matplotlib")

from PIL import Image

from longstride.training.curve import draw_bits, finish, plot_curve
from longstride.training.run import Run

ROWS = [
    {"step": 10, "bits_per_byte": 7.0, "learning_rate": 0.1},
    {"step": 20, "bits_per_byte": 6.0, "learning_rate": 0.2, "valid_bits_per_byte": 6.1234},
    {"step": 30, "bits_per_byte": float("nan"), "learning_rate": 0.1, "valid_bits_per_byte": float("nan")},
]


def run(folder, rows):
    made = Run(folder)
    folder.mkdir(parents=True)
    for row in rows:
        made.log(row)
    return folder


def test_a_picture_in_the_run(tmp_path):
    folder = run(tmp_path / "run", ROWS)
    assert plot_curve(folder) == folder / "curve.png"
    with Image.open(folder / "curve.png") as picture:
        assert (picture.format, picture.size) == ("PNG", (1200, 810))
        assert len(picture.convert("RGB").getcolors(2**20)) > 20
    assert sorted(path.name for path in folder.iterdir()) == ["curve.png", "metrics.jsonl"]


def test_svg_where_it_is_asked_for(tmp_path, monkeypatch):
    import matplotlib

    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")
    path = tmp_path / "new/curve.SVG"
    assert plot_curve(str(run(tmp_path / "run", ROWS)), str(path)) == path
    text = path.read_text()
    assert "<svg" in text
    assert all(f">{word}</text>" in text for word in ("run", "training", "validation", "learning rate", "step"))


def test_the_last_validation_has_its_number():
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    draw_bits(axes, ROWS[:2])
    assert [text.get_text() for text in axes.texts] == ["6.123"]


@pytest.mark.parametrize("rows", [ROWS[:1], ROWS[1:2]], ids=["no validation", "one row"])
def test_runs_that_have_just_begun(rows, tmp_path):
    assert plot_curve(run(tmp_path / "run", rows)).stat().st_size > 1000


def test_one_step_is_a_dot():
    """Of a run that is shorter than two lines of metrics."""
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    draw_bits(axes, ROWS[1:2])
    finish([axes])
    assert [line.get_marker() for line in axes.lines] == ["o", "o"]
    assert [step for step in axes.get_xticks() if step != round(step)] == []
    axes = Figure().subplots()
    draw_bits(axes, ROWS[:2])
    assert [line.get_marker() for line in axes.lines] == ["None", "o"]


def test_a_name_that_reads_like_a_formula(tmp_path):
    assert plot_curve(run(tmp_path / "a$^$b", ROWS)).exists()


@pytest.mark.parametrize("name", ["curve.gif", "curve"])
def test_another_ending_is_refused(name, tmp_path):
    with pytest.raises(ValueError, match=rf"{name} must end in \.png or \.svg"):
        plot_curve(run(tmp_path / "run", ROWS), tmp_path / name)
    assert not (tmp_path / name).exists()


def test_nothing_to_draw(tmp_path):
    with pytest.raises(ValueError, match=r"is no run: it has no metrics\.jsonl"):
        plot_curve(tmp_path)
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(ValueError, match="has no steps to draw yet"):
        plot_curve(tmp_path)
    assert not (tmp_path / "curve.png").exists()


def test_without_matplotlib_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match=r"pip install 'longstride\[plot\]'"):
        plot_curve(run(tmp_path / "run", ROWS))
