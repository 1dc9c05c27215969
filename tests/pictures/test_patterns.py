import matplotlib.image
import numpy as np
import pytest
from PIL import Image

import longstride.pictures.patterns
from longstride.commands.bench import sampling
from longstride.patterns.notation import parse
from longstride.pictures.benchmarks import Figure, plot_rates
from longstride.pictures.patterns import Scheme, plot_patterns


def schemes(*texts):
    return [Scheme(text, parse(text)) for text in texts]


def test_writes_a_png_that_is_not_blank(tmp_path):
    plot_patterns(schemes("dense()", "strided(6)", "fixed(6, 1)"), tmp_path / "figure.png")
    image = matplotlib.image.imread(tmp_path / "figure.png")
    assert image.shape[0] > 500
    assert len(np.unique(image.reshape(-1, image.shape[-1]), axis=0)) > 10
    assert [path.name for path in tmp_path.iterdir()] == ["figure.png"]


def test_writes_an_svg_and_replaces_nothing_unasked(tmp_path):
    sizes = {"height": 3, "width": 4, "row": 2, "column": 0}
    path = tmp_path / "figure.svg"
    plot_patterns(schemes("strided(4)"), path, **sizes)
    assert "<svg" in path.read_text()
    path.write_text("mine")
    with pytest.raises(ValueError, match=r"plot patterns: .*figure\.svg is there already; add --force to replace it"):
        plot_patterns(schemes("strided(4)"), path, **sizes)
    assert path.read_text() == "mine"
    plot_patterns(schemes("strided(4)"), path, force=True, **sizes)
    assert "<svg" in path.read_text()
    with pytest.raises(ValueError, match=r"there is no folder .*new; make it first"):
        plot_patterns(schemes("strided(4)"), tmp_path / "new" / "figure.svg", **sizes)


@pytest.fixture
def drawn(monkeypatch):
    """What was handed to imshow: the image and the matrix of each scheme, as RGB."""
    pictures = []
    original = longstride.pictures.patterns.Axes.imshow

    def imshow(axes, picture, **options):
        pictures.append(np.asarray(picture))
        return original(axes, picture, **options)

    monkeypatch.setattr(longstride.pictures.patterns.Axes, "imshow", imshow)
    return pictures


def test_draws_what_the_heads_see(tmp_path, drawn):
    heads = parse("strided(6)")
    plot_patterns([Scheme("strided", heads)], tmp_path / "figure.png", height=6, width=6, row=4, column=3)
    image, matrix = drawn
    first, second, unseen, future = (
        longstride.pictures.patterns.to_rgb(colour)
        for colour in (
            *longstride.pictures.patterns.HEADS[:2],
            longstride.pictures.patterns.UNSEEN,
            longstride.pictures.patterns.FUTURE,
        )
    )
    for key, colour in {26: first, 9: second, 0: unseen, 28: future}.items():
        assert tuple(image[key // 6, key % 6]) == colour
    assert np.allclose(image[3, 3], np.add(first, second) / 2)  # a stride back, both heads see it
    assert matrix.shape == (36, 36, 3)
    for i in range(36):
        for j in range(36):
            seen = [colour for head, colour in zip(heads, (first, second)) if head.sees(i, j)]
            expected = np.mean(seen, axis=0) if seen else unseen if j <= i else future
            assert np.allclose(matrix[i, j], expected)


@pytest.mark.parametrize(
    ("text", "labels"),
    [
        ("strided(6)", ["Local(6)", "Column(6)", "both heads"]),
        ("dense()", ["Dense()"]),
        (
            "block(6), summary(6, 2), local(1)",
            ["Block(6)", "Summary(6, 2)", "Local(1)", "several heads: their colours mixed"],
        ),
    ],
)
def test_the_legend_has_the_colour_of_keys_that_several_heads_see(tmp_path, monkeypatch, text, labels):
    legends = []
    original = longstride.pictures.patterns.Axes.legend
    monkeypatch.setattr(
        longstride.pictures.patterns.Axes,
        "legend",
        lambda axes, handles, **options: legends.append(handles) or original(axes, handles=handles, **options),
    )
    plot_patterns([Scheme("heads", parse(text))], tmp_path / "figure.png")
    (entries,) = legends
    assert [entry.get_label() for entry in entries] == labels
    if labels[-1] == "both heads":
        first, second, both = (np.array(entry.get_facecolor()) for entry in entries)
        assert np.allclose(both, (first + second) / 2)


def test_a_large_matrix_keeps_its_thin_lines(tmp_path, drawn):
    plot_patterns(schemes("column(50)"), tmp_path / "figure.png", height=50, width=50)
    _, matrix = drawn
    coloured = (matrix == longstride.pictures.patterns.to_rgb(longstride.pictures.patterns.HEADS[0])).all(-1)
    assert coloured.any(axis=1).all()


def test_thin_lines_have_pixels(tmp_path):
    """One column of 32, of a matrix that has more columns than its panel has pixels."""
    plot_patterns([Scheme("heads", parse("summary(32, 1)"))], tmp_path / "figure.png", height=32, width=32)
    with Image.open(tmp_path / "figure.png") as picture:
        row = np.asarray(picture.convert("RGB"))[picture.height * 6 // 7]
    cells = np.array(longstride.pictures.patterns.to_rgb(longstride.pictures.patterns.HEADS[0])) * 255
    blue = np.abs(row - cells).max(-1) < 2
    assert (blue[1:] & ~blue[:-1]).sum() >= 28


def test_each_pixel_of_the_image_has_its_borders(tmp_path, monkeypatch):
    borders = []

    def grid(axes, *_, which="major", **__):
        if which == "minor":
            borders.append([len(axis.get_minorticklocs()) for axis in (axes.xaxis, axes.yaxis)])

    monkeypatch.setattr(longstride.pictures.patterns.Axes, "grid", grid)
    plot_patterns(schemes("column(17)"), tmp_path / "figure.png", height=3, width=17)
    assert borders == [[18, 4]]


@pytest.mark.parametrize(
    ("texts", "options", "says"),
    [
        (["dense()"], {"path": "figure.pdf"}, "must end in .png or .svg"),
        ([], {}, "no patterns were given"),
        (["dense()"], {"height": 0}, "height must be at least 1, got 0"),
        (["dense()"], {"height": 400, "width": 400}, "160000 is too much .* 16384 at most"),
        (["dense()"], {"row": 6}, "row must be 0 to 5, got 6"),
        (["dense()"], {"column": -1}, "column must be 0 to 5, got -1"),
        (["grid(1000, 7)"], {}, "has 7 heads, and there are colours for 6"),
        ([f"local({l})" for l in range(13)], {}, "13 columns are too many .* at most 12"),
    ],
)
def test_mistakes_are_named_and_leave_nothing(tmp_path, texts, options, says):
    path = tmp_path / options.pop("path", "figure.png")
    with pytest.raises(ValueError, match=says):
        plot_patterns(schemes(*texts), path, **options)
    assert not list(tmp_path.iterdir())


def rates(batches, positions):
    return [
        sampling.Row(name, batch, position, bytes_per_second=rate * batch)
        for batch in batches
        for position in positions
        for name, rate in (("longstride", 3000.0), ("transformers", 16.0))
    ]


@pytest.mark.parametrize(
    ("rows", "titles", "points"),
    [
        (rates((1, 64), (200, 12_000)), ["streams: 1", "streams: 64"], [(200, 3000), (12_000, 3000)]),
        (rates((1, 64), (200,)), ["position 200"], [(1, 3000), (64, 192_000)]),
    ],
)
def test_draws_rates_by_position_or_by_batch(tmp_path, monkeypatch, rows, titles, points):
    drawn = []
    plot = longstride.pictures.patterns.Axes.plot

    def watched(axes, x, y, **options):
        drawn.append((options["label"], list(zip(x, y))))
        return plot(axes, x, y, **options)

    monkeypatch.setattr(longstride.pictures.patterns.Axes, "plot", watched)
    rows.append(sampling.Row("no cache", 1, rows[0].position, failure="too long"))
    plot_rates(rows, tmp_path / "rates.svg")
    text = (tmp_path / "rates.svg").read_text()
    for title in titles:
        assert f"<!-- {title} -->" in text
    assert drawn[0] == ("longstride", points)
    assert len(drawn) == 3 * len(titles)


def test_streams_are_counted_in_whole_numbers(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **options: (drawn.append(figure), path.touch()))
    plot_rates(rates((1,), (200,)), tmp_path / "rates.svg")
    assert all(tick.is_integer() for tick in drawn[0].axes[0].get_xticks())
