import json

import numpy as np
import pytest

from longstride.data import samples
from longstride.data.audio import Audio
from longstride.data.images import Images
from longstride.data.text import Text
from longstride.model.card import Card, Figure
from longstride.model.presets import preset
from longstride.serving import about
from longstride.serving.about import bundled_samples, config_in_words, describe_model, describe_run
from tests.model.small import config


def test_a_model_in_words():
    card = Card("small", "text", licence="MIT", figures=(Figure("some text", 10, 0, 2.5),))
    described = describe_model("small", preset("text-small"), Text(), card, None)
    assert described["run"] is None
    assert described["columns"] == 32
    assert described["card"]["figures"][0]["bits_per_byte"] == 2.5
    assert len(described["patterns"]) == 2
    assert described["patterns"][0][0] == "Local(32)"
    words = dict(described["config"])
    assert words["Network"] == "2 layers of width 192, 4 heads each"
    assert words["Embedding"] == "of the last 3 bytes, summed"
    json.dumps(described, allow_nan=False)


def test_positions_in_words():
    assert "image(32, 32, 3): row, column and channel" in dict(config_in_words(preset("image-small")))["Positions"]
    assert "matrix(4): row and column" in dict(config_in_words(config()))["Positions"]


def test_the_curve_of_a_run(tmp_path):
    assert describe_run(tmp_path) is None
    rows = [{"step": step, "bits_per_byte": 8 / step, "valid_bits_per_byte": None} for step in (1, 2, 4)]
    rows[-1]["valid_bits_per_byte"] = 3.0
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    described = describe_run(tmp_path)
    assert described["training"] == [(1, 8.0), (2, 4.0), (4, 2.0)]
    assert described["validation"] == [(4, 3.0)]
    assert dict(described["summary"])["best validation"] == "3.0000 bits per byte, at step 4"


def test_long_curves_are_thinned_up_to_the_last_point(monkeypatch):
    monkeypatch.setattr(about, "MOST_POINTS", 10)
    points = about.curve_points([{"step": step, "x": 1.0} for step in range(1, 96)], "x")
    assert len(points) == 10
    assert points[-1] == (95, 1.0)


def test_damaged_metrics_name_no_path(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("no json\n")
    nothing = {"training": [], "validation": [], "summary": []}
    assert describe_run(tmp_path) == {**nothing, "note": "The run's files are damaged."}


def test_samples_of_text_are_articles_that_leave_room():
    given = bundled_samples(preset("text-small"), Text())
    assert [sample["name"] for sample in given][:2] == ["Hoosier Hysteria", "Hardcore"]
    assert all(len(sample["bytes"]) == 256 for sample in given)
    assert all(bytes(sample["bytes"]) in samples.unseen_text().tobytes() for sample in given)


def test_samples_of_images_are_patches():
    given = bundled_samples(preset("image-small"), Images((32, 32, 3)))
    assert len(given) == 16
    patches = {image.tobytes() for image in samples.patches()}
    assert all(bytes(sample["bytes"]) in patches for sample in given)
    assert all(np.std(sample["bytes"]) >= 50 for sample in given)


@pytest.mark.parametrize("context", [1, 2048, 65_536])
def test_samples_of_sound_are_pieces_of_the_piano(context):
    given = bundled_samples(config(context=context, embedding="rotary"), Audio(rate=12_000))
    assert len(given) == 4
    assert len(given[0]["bytes"]) == min(12_000, max(1, context // 2))
    assert given[1]["bytes"][0] == samples.piano()[75_000]
