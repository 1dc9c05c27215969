import pytest

from longstride.pictures import reproduced
from longstride.pictures.reproduced import plot_contexts, plot_curves
from tests.commands.reproduce.rows import row


def test_each_kind_of_data_has_two_panels(tmp_path, monkeypatch):
    drawn = []
    write = reproduced.write_figure
    monkeypatch.setattr(reproduced, "write_figure", lambda figure, path: (drawn.append(figure), write(figure, path)))
    rows = [
        row(step_seconds=2.0),
        row(seed=1),
        row("enwik8-dense"),
        row("cifar10-dense", data="images"),
        row(steps=0, validation_steps=[]),
    ]
    plot_curves(rows, tmp_path / "curves.png", "table 2")
    bytes_of_text, seconds_of_text, *images = drawn[0].axes
    assert len(images) == 2
    assert [line.get_color() for line in bytes_of_text.lines] == ["C0", "C0", "C1"]
    assert list(bytes_of_text.lines[0].get_xdata()) == pytest.approx([200 / 1e6, 400 / 1e6])
    assert list(seconds_of_text.lines[0].get_xdata()) == [4.0, 8.0]
    assert [text.get_text() for text in seconds_of_text.get_legend().get_texts()] == ["enwik8-fixed", "enwik8-dense"]
    assert images[0].get_ylabel() == "bits per dim"


def test_without_curves_there_is_no_picture(tmp_path):
    with pytest.raises(ValueError, match="no row has been trained"):
        plot_curves([row(validation_steps=[])], tmp_path / "curves.png", "table 2")


def test_without_times_bytes_have_the_one_panel(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(reproduced, "write_figure", lambda figure, path: drawn.append(figure))
    plot_curves([row(step_seconds=None), row("enwik8-dense", step_seconds=None)], tmp_path / "curves.png", "ablations")
    (panel,) = drawn[0].axes
    assert panel.get_xlabel() == "training bytes, million"
    assert len(panel.lines) == len(panel.get_legend().get_texts()) == 2


def test_least_contexts_have_the_papers_scores_beside_ours(tmp_path, monkeypatch):
    drawn = []
    write = reproduced.write_figure
    monkeypatch.setattr(reproduced, "write_figure", lambda figure, path: (drawn.append(figure), write(figure, path)))
    lines = [("$ours^$", [1.4, 1.3, None]), ("paper", [None, 0.99, 0.98])]
    plot_contexts(["0", "192", "288"], lines, tmp_path / "contexts.png", "table 3")
    (axes,) = drawn[0].axes
    ours, paper = ([one for one in line.get_ydata() if one == one] for line in axes.lines)
    assert (ours, paper) == ([1.4, 1.3], [0.99, 0.98])
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["$ours^$", "paper"]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["0", "192", "288"]
    with pytest.raises(ValueError, match="no row has been scored"):
        plot_contexts(["0"], [("ours", [None]), ("paper", [1.0])], tmp_path / "none.png", "table 3")
