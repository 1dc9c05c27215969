"""longstride train, as a new user types it."""

import json

import numpy as np
import pytest

from longstride.commands.main import main

SMALL = ["--model.layers", "1", "--model.width", "16", "--batch", "1", "--validate-bytes", "1"]


@pytest.fixture
def digits(tmp_path, monkeypatch):
    monkeypatch.setenv("LONGSTRIDE_CACHE", str(tmp_path / "cache"))
    np.save(tmp_path / "digits.npy", np.random.default_rng(0).integers(0, 256, (40, 28, 28), dtype=np.uint8))
    return str(tmp_path / "digits.npy")


def test_images_of_another_size(capsys, tmp_path, digits):
    out = tmp_path / "run"
    main(["train", "image-small", "--data", digits, "--out", str(out), "--steps", "1", *SMALL])
    assert f"{digits} has images of 28 x 28 x 1; from that follow: context 784, embedding image" in capsys.readouterr().err
    model = json.loads((out / "config.json").read_text())["model"]
    assert (model["context"], model["pattern"]) == (784, "column(28) + 3*local(28)")
    main(["train", "image-small", "--out", str(out), "--resume", "--steps", "2"])
    said = capsys.readouterr()
    assert "run is extended from 1 to 2 steps; from step 2 on it has the learning rates of a run of 2 steps" in said.err
    assert f"{out}: step 2, all steps are done" in said.out
    main(["train", "image-small", "--data", digits, "--out", str(tmp_path / "next"), "--steps", "1", "--init-from", str(out),
          *SMALL])  # fmt: skip
    assert f"next begins from the weights of {out}" in capsys.readouterr().err


def test_a_field_that_is_given_stays(capsys, tmp_path, digits):
    words = ["train", "image-small", "--data", digits, "--out", str(tmp_path / "run"), "--steps", "1", *SMALL]
    main([*words, "--model.pattern", "dense()"])
    assert "from that follow: context 784, embedding image(28, 28, 1)\n" in capsys.readouterr().err


def test_a_preset_for_other_data(capsys, tmp_path, digits):
    with pytest.raises(SystemExit) as ended:
        main(["train", "text-small", "--data", digits, "--out", str(tmp_path / "run"), *SMALL])
    assert ended.value.code == 2
    assert "presets for images: image-small, cifar10, imagenet64" in capsys.readouterr().err
