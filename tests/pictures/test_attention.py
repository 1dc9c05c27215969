import json
import sys
from functools import partial

import numpy as np
import pytest
import torch

pytest.importorskip("matplotlib")

from PIL import Image

from longstride.data.store import write_store
from longstride.data.text import Text
from longstride.model import SparseTransformer
from longstride.model.inspection import evenly_spaced, inspect_attention
from longstride.pictures import attention
from longstride.pictures.attention import plot_attention
from longstride.pictures.attention_example import open_example
from longstride.pictures.attention_panels import (
    MATRIX_LEGEND,
    SEEN,
    UNKNOWN_GREY,
    UNSEEN,
    has_glyph,
    image_panel,
    largest_weights,
    matrix_legend,
    matrix_panel,
    to_rgb,
)
from longstride.training import train
from tests.pictures.small import saved, store
from tests.training.small import config

CPU = torch.device("cpu")


def size(path):
    with Image.open(path) as picture:
        assert len(picture.convert("RGB").getcolors(2**22)) > 20
        return picture.size


@pytest.mark.parametrize("kind", ["images", "text", "audio", "bytes"])
def test_a_picture_of_every_kind(kind, tmp_path):
    folder, data = saved(tmp_path, kind)
    path = tmp_path / "new/look.png"
    path.parent.mkdir()
    assert plot_attention(folder, data=data, out=path) == [path]
    wide, tall = size(path)
    with pytest.raises(ValueError, match=r"look\.png is there already; add --force to replace it"):
        plot_attention(folder, layers=[2], data=data, out=path)
    fewer = plot_attention(folder, layers=[2], data=data, out=path, force=True)[0]
    assert size(fewer)[0] == wide >= 1100
    panel, below = (2.1, 0) if kind == "images" else (2.7, 3 * 0.125 + 0.04)
    assert (tall - size(fewer)[1]) / 150 == pytest.approx(2 * (0.2 + panel + below + 0.14), abs=0.02)
    assert [found.name for found in path.parent.iterdir()] == ["look.png"]


def test_svg_names_layers_heads_and_patterns(tmp_path, monkeypatch):
    import matplotlib

    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")
    folder, data = saved(tmp_path, "text")
    (path,) = plot_attention(folder, [50], [0, 2], [1], data=data, out=tmp_path / "look.svg")
    text = path.read_text()
    shown = [word for word in ("layer 0", "layer 1", "layer 2", "head 0", "head 1") if f">{word}<" in text]
    assert shown == ["layer 0", "layer 2", "head 1"]
    assert "Summary(8, 2)" in text
    assert "Local(8)" not in text
    assert "prediction of byte 50" in text


def test_several_positions_get_a_picture_each(tmp_path):
    folder, data = saved(tmp_path, "text")
    paths = plot_attention(folder, [3, 0, 95], data=data, out=tmp_path / "look.png")
    assert [path.name for path in paths] == ["look-3.png", "look-0.png", "look-95.png"]
    assert all(path.is_file() for path in paths)


@pytest.mark.parametrize("position", [0, 1, 2, 74])
def test_first_and_last_positions_of_an_image(position, tmp_path):
    folder, data = saved(tmp_path, "images")
    assert size(plot_attention(folder, [position], data=data, out=tmp_path / "look.png")[0])


def test_what_the_panels_show_is_what_the_heads_weigh(tmp_path, monkeypatch):
    folder, data = saved(tmp_path, "text", pattern="interleave(strided(8))")
    drawn = []
    monkeypatch.setattr(
        attention, "_draw_panel", lambda figure, box, example, weights, pattern, size: drawn.append((weights, pattern))
    )
    plot_attention(folder, [61], [2, 1], data=data, split="train", item=1, out=tmp_path / "look.png")
    model = SparseTransformer.from_pretrained(folder)
    tokens = torch.from_numpy(np.fromfile(data / "train.bin", np.uint8)[96:192])
    expected = inspect_attention(model, tokens, 61).weights
    for (weights, pattern), (layer, head) in zip(drawn, [(2, 0), (2, 1), (1, 0), (1, 1)], strict=True):
        np.testing.assert_allclose(weights, expected[layer, head], rtol=1e-5)
        assert pattern == model.config.patterns(layer)[head]


def test_a_run_knows_its_data(tmp_path, monkeypatch):
    folder, data = saved(tmp_path, "text")
    config = folder / "config.json"
    config.write_text(json.dumps({"model": json.loads(config.read_text()), "data": str(data)}))
    assert plot_attention(folder, out=tmp_path / "look.png")[0].is_file()
    config.write_text(json.dumps({"model": json.loads(config.read_text())["model"], "data": "nowhere"}))
    with pytest.raises(ValueError, match=r"nowhere, which .* was trained on, is not here; give --data"):
        plot_attention(folder, out=tmp_path / "other.png")
    assert not (tmp_path / "other.png").exists()


def test_data_of_another_kind_is_drawn_with_a_remark(tmp_path, capsys):
    folder, data = saved(tmp_path, "text")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"model": config, "data": "gone"}))
    for kind, count in (("audio", 1), ("text", 0)):
        known = json.loads((data / "manifest.json").read_text()) | {"kind": kind, "rate": 4000 if kind == "audio" else None}
        known["splits"]["valid"]["sha256"] = "0" * 64
        (folder / "data.json").write_text(json.dumps(known))
        plot_attention(folder, data=data, out=tmp_path / f"{kind}.png")
        says = f"plot attention: {data} has text, and the model was trained on audio; give other --data unless you mean this"
        assert capsys.readouterr().err.splitlines().count(says) == count


def test_other_data_than_a_runs_must_be_asked_for(tmp_path):
    """It may lie where the run's was."""
    folder, data = saved(tmp_path, "text")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"model": config, "data": str(data)}))
    known = json.loads((data / "manifest.json").read_text())
    known["splits"]["valid"]["sha256"] = "0" * 64
    (folder / "data.json").write_text(json.dumps(known))
    with pytest.raises(
        ValueError, match=r"has other bytes in valid than when .* began; bring them back from a copy, or add --data"
    ):
        plot_attention(folder, out=tmp_path / "look.png")
    assert plot_attention(folder, data=data, out=tmp_path / "look.png")[0].is_file()


def test_a_run_without_weights(tmp_path):
    folder, data = saved(tmp_path, "text")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"model": config, "data": str(data)}))
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"plot attention: .* has no weights yet"):
        plot_attention(folder, out=tmp_path / "look.png")


def test_deep_models_are_thinned_evenly():
    assert evenly_spaced(3, 8) == [0, 1, 2]
    assert evenly_spaced(8, 8) == list(range(8))
    assert evenly_spaced(128, 8) == [0, 18, 36, 54, 73, 91, 109, 127]


def test_default_positions(tmp_path):
    folder, data = saved(tmp_path / "a", "images")
    assert open_example(folder, data, "valid", 0, CPU).default_position == (3 * 5 + 2) * 3
    folder, data = saved(tmp_path / "b", "text")
    assert open_example(folder, data, "valid", 0, CPU).default_position == 8 * 8 + 4


def test_image_panels_are_white_where_weights_are_and_black_ahead():
    weights = np.zeros(8, np.float32)  # byte 7: the second channel of pixel 2, which is at (1, 0)
    weights[[0, 1, 2]] = 0.3  # all of pixel 0
    weights[4] = 0.1
    panel = image_panel(weights, np.full(18, 255, np.uint8), (3, 2, 3))
    assert panel.shape == (3, 2, 3)
    assert np.allclose(panel[0, 0], 1)
    share = 0.1 / 0.9
    assert np.allclose(panel[0, 1], share + (1 - share) * 0.53, atol=1e-3)
    assert panel[1, 0].sum() > 0  # One of its channels is there.
    assert not panel[1, 1].any()
    assert not panel[2].any()


def test_a_pixel_that_is_not_complete_is_grey_in_the_image_so_far(tmp_path, monkeypatch):
    folder, data = saved(tmp_path, "images")
    drawn = []
    monkeypatch.setattr(attention, "write_figure", lambda figure, path: drawn.append(figure))
    width, channels = open_example(folder, data, "valid", 0, CPU).item[1:]
    plot_attention(folder, [channels * (width + 1) + 2], layers=[0], data=data, out=tmp_path / "look.png")
    image = drawn[0].axes[0].images[0].get_array()
    assert set(image[1, 1].tolist()) == {UNKNOWN_GREY}
    assert set(image[1, 0].tolist()) != {UNKNOWN_GREY}


def test_grey_images_and_ones_with_alpha_are_drawn_too():
    for channels in (1, 4):
        panel = image_panel(np.ones(channels, np.float32), np.zeros(4 * channels, np.uint8), (2, 2, channels))
        assert panel.shape == (2, 2, 3)
        assert np.allclose(panel[0, 0], 1)


def test_matrix_panels_say_what_is_seen_and_what_is_ahead():
    seen = np.array([True, False, True, True, True])
    weights = np.array([1, 0, 0, 0.25, 0], np.float32)
    panel = matrix_panel(weights, seen, context=9, columns=3)
    assert panel.shape == (3, 3, 3)
    assert np.allclose(panel[0, 0], 1)
    assert np.allclose(panel[0, 1], to_rgb(UNSEEN))
    assert np.allclose(panel[0, 2], to_rgb(SEEN))
    assert np.allclose(panel[1, 0], np.array(to_rgb(SEEN)) * 0.75 + 0.25)
    assert not panel[1, 2].any()
    assert not panel[2].any()


def test_the_legend_explains_the_colours_that_are_shown():
    blue, dark_blue, black = MATRIX_LEGEND
    all_seen, some_seen = np.ones(6, bool), np.arange(6) > 2
    even, sharp = np.full(6, 1 / 6, np.float32), np.array([0, 0, 0, 0.9, 0.1, 0], np.float32)
    assert matrix_legend(even, all_seen, context=6, columns=3) == []
    assert matrix_legend(even, all_seen, context=9, columns=3) == [black]
    assert matrix_legend(sharp, all_seen, context=6, columns=3) == [blue]
    assert matrix_legend(sharp, some_seen, context=9, columns=3) == [blue, dark_blue, black]


@pytest.fixture
def texts(monkeypatch):
    """The texts of the figures that were drawn."""
    drawn = []
    monkeypatch.setattr(
        attention, "write_figure", lambda figure, path: drawn.append([text.get_text() for text in figure.texts])
    )
    return drawn


def test_the_legend_explains_the_signs_that_are_shown(tmp_path, texts):
    folder, _ = saved(tmp_path, "text", context=32, pattern="heads(dense(), dense())")
    for number, text in enumerate(("plain ASCII", "lines\nof text\n", "one caf\u00e9\t", "\U00013000 ")):
        repeated = np.frombuffer(text.encode() * 20, np.uint8)
        data = write_store(tmp_path / f"data-{number}", "text", {"train": repeated, "valid": repeated})
        plot_attention(folder, [31], data=data.folder, out=tmp_path / f"look-{number}.png")
    legends = [" ".join(drawn[-1].split()) for drawn in texts]
    assert [legend.partition("predicts.")[2] for legend in legends[:3]] == [
        "", " \u21b5: a line end.", " \u203f: a further byte of a letter. \u2192: a tab.",
    ]  # fmt: skip
    assert legends[3].endswith("\u00b7: a byte of no letter that the font has.")
    assert not any("Black" in legend or "Dark blue" in legend for legend in legends)


def test_the_title_names_the_run_and_its_checkpoint(tmp_path, texts):
    train(config(tmp_path, steps=2, save_every=1))
    run = tmp_path / "run"
    for folder in (run, run / "checkpoints" / "step-1"):
        plot_attention(folder, [40], item=1, out=tmp_path / "look.png")
    assert [drawn[0] for drawn in texts] == [
        f"{name}: attention weights for the prediction of byte 40" for name in ("run", "run, step-1")
    ]
    assert texts[0][1].startswith("data, valid window 1.  It is ")


def test_long_matrices_keep_their_thin_lines():
    n, columns = 1024 * 1024, 1024
    seen = np.arange(n) % columns == 500
    weights = np.where(seen, 1 / 1024, 0).astype(np.float32)
    panel = matrix_panel(weights, seen, n, columns)
    assert max(panel.shape) <= 192
    assert (panel == 1).all(-1).any(1).all()
    assert (panel == 1).all(-1).sum(1).max() == 1


def test_words_name_the_byte_that_a_slot_has_read(tmp_path):
    folder, data = saved(tmp_path, "text")
    example = open_example(folder, data, "valid", 0, CPU)
    example.tokens[:20] = np.frombuffer(b"abc\ndefghijk$mnopqrs", np.uint8)
    weights = np.zeros(19, np.float32)
    weights[[0, 4, 18]] = 0.25, 0.05, 0.7
    assert largest_weights(example, weights) == [
        " 70%     1 back  ijk$mnop[q]",  # And no 'r', which is predicted.
        " 25%  the start",
        "5.0%    15 back       abc[↵]defghijk",
    ]


def test_text_that_is_no_ascii():
    text = "aé—b中😀\u0301ק".encode() + b"\xff\xe2\x82"
    tokens = np.frombuffer(text, np.uint8)
    spell = partial(Text().spell, tokens, has_glyph=has_glyph)
    shown = spell(0, len(tokens))
    assert shown == "aé‿—‿‿b" + "·" * (len(text) - 7)
    assert len(shown) == len(text)  # One letter for each byte.
    for first in range(len(text)):
        assert spell(first, len(tokens)) == shown[first:]
    assert spell(0, 4) == "aé‿·"  # What the rest of that one is, nobody knows yet.


def test_words_for_text_that_is_no_ascii(tmp_path):
    folder, data = saved(tmp_path, "text")
    example = open_example(folder, data, "valid", 0, CPU)
    example.tokens[:12] = np.frombuffer("één, één".encode(), np.uint8)
    weights = np.zeros(9, np.float32)
    weights[[4, 8]] = 0.4, 0.6
    assert largest_weights(example, weights) == [
        " 60%     1 back   é‿é‿n, [·]",  # Its second byte is what is predicted.
        " 40%     5 back       é‿é[‿]n, ·",
    ]


def test_words_for_sound_and_other_bytes(tmp_path):
    weights = np.zeros(19, np.float32)
    weights[7] = 1
    folder, data = saved(tmp_path, "audio")
    assert largest_weights(open_example(folder, data, "valid", 0, CPU), weights) == ["100%      1.0 ms back (12)"]
    example = open_example(folder, store(tmp_path / "other", "bytes"), "valid", 0, CPU)
    example.tokens[6] = 200
    assert largest_weights(example, weights) == ["100%    12 back  0xc8"]
    assert largest_weights(example, np.zeros(5, np.float32)) == []


def test_text_that_reads_like_a_formula(tmp_path):
    folder, data = saved(tmp_path, "text")
    (data / "valid.bin").write_bytes(b"$^$ \\frac{ $_$ " * 20)
    folder = folder.rename(tmp_path / "a$^$b")
    assert plot_attention(folder, data=data, out=tmp_path / "look.png")[0].is_file()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"positions": [96]}, "plot attention: position must be 0 to 95, got 96"),
        ({"positions": [3, -1]}, "plot attention: position must be at least 0, got -1"),
        ({"layers": [3]}, "plot attention: layers must be 0 to 2, got 3"),
        ({"heads": [2]}, "plot attention: heads must be 0 to 1, got 2"),
        ({"heads": [1, 1]}, "plot attention: heads must be one or more different ones"),
        ({"item": 3}, r"item must be 0 to 2, got 3"),
        ({"item": -1}, "item must be 0 to 2, got -1"),
        ({"split": "test"}, "there is no split 'test'; it has train, valid"),
        ({"data": None}, "--data must be given: .* is a saved model, which does not name its data"),
        ({"data": "nowhere"}, "nowhere does not exist"),
        ({"out": "look.gif"}, r"look.gif must end in .png or .svg"),
    ],
)
def test_mistakes_are_named_and_leave_nothing(options, says, tmp_path, monkeypatch):
    folder, data = saved(tmp_path, "text")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=says):
        plot_attention(folder, **{"data": data, "out": "look.png", **options})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "model"]


def test_images_of_another_size_are_refused(tmp_path):
    folder, _ = saved(tmp_path, "images")
    with pytest.raises(ValueError, match=r"text has text, and the model is for images of 5 x 5 x 3; give other --data"):
        plot_attention(folder, data=store(tmp_path / "text", "text"), out=tmp_path / "look.png")


def test_too_many_panels(tmp_path, monkeypatch):
    folder, data = saved(tmp_path, "text", layers=2)
    monkeypatch.setattr(attention, "MOST_PANELS", 3)
    with pytest.raises(ValueError, match="2 layers of 2 heads are 4 panels; name at most 3"):
        plot_attention(folder, data=data, out=tmp_path / "look.png")


def test_without_matplotlib_it_says_what_to_install(tmp_path, monkeypatch):
    folder, data = saved(tmp_path, "text")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match=r"plot attention needs .* pip install 'longstride\[plot\]'"):
        plot_attention(folder, data=data, out=tmp_path / "look.png")


@pytest.mark.parametrize(
    ("pattern", "columns"), [("heads(local(8), summary(12, 2))", 12), ("local(30)", 9), ("dense()", 9)], ids=str
)
def test_rotary_positions_are_shown_in_rows_of_the_longest_period(pattern, columns, tmp_path):
    example = open_example(*saved(tmp_path, "text", embedding="rotary", pattern=pattern), "valid", 0, CPU)
    assert (example.columns, example.rows) == (columns, -(-96 // columns))
