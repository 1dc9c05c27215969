"""longstride train, as a new user types it."""

import json
import re

import numpy as np
import pytest

from longstride.commands.main import main
from longstride.data.store import write_store

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


def test_a_run_is_resumed_with_its_own_preset(capsys, tmp_path, digits):
    out = tmp_path / "run"
    main(["train", "image-small", "--data", digits, "--out", str(out), "--steps", "1", *SMALL])
    config = (out / "config.json").read_text()
    assert json.loads((out / "run.json").read_text())["preset"] == "image-small"
    capsys.readouterr()
    for preset in ("image-small-dense", "enwik8"):
        for resume in (["--resume"], ["--resume", "auto"]):
            with pytest.raises(SystemExit) as ended:
                main(["train", preset, "--out", str(out), *resume, "--steps", "2"])
            assert ended.value.code == 2
            says = f"train: {out} began with the preset 'image-small', and '{preset}' is given; give the same, or another"
            assert says in capsys.readouterr().err
    assert (out / "config.json").read_text() == config
    # Runs of earlier versions do not say which preset they began with.
    known = json.loads((out / "run.json").read_text())
    (out / "run.json").write_text(json.dumps({"version": 1, "id": known["id"]}))
    main(["train", "enwik8", "--out", str(out), "--resume"])
    assert f"{out}: step 1, all steps are done" in capsys.readouterr().out


def test_a_run_is_resumed_without_naming_its_preset(capsys, tmp_path, digits):
    out = tmp_path / "run"
    main(["train", "image-small", "--data", digits, "--out", str(out), "--steps", "1", *SMALL])
    capsys.readouterr()
    main(["train", "--resume", "--out", str(out)])
    assert f"to train longer: longstride train image-small --out {out} --resume --steps 2" in capsys.readouterr().out
    main(["train", "--resume", "--out", str(out), "--steps", "2"])
    assert f"{out}: step 2, all steps are done" in capsys.readouterr().out
    known = json.loads((out / "run.json").read_text())
    (out / "run.json").write_text(json.dumps({"version": 1, "id": known["id"]}))
    main(["train", f"--out={out}", "--resume", "auto"])
    assert f"{out}: step 2, all steps are done" in capsys.readouterr().out
    for words in (["--out", str(out)], ["--out", str(tmp_path / "other"), "--resume"]):
        with pytest.raises(SystemExit) as ended:
            main(["train", *words])
        assert ended.value.code == 2
        assert "train: a preset comes first" in capsys.readouterr().err


def test_a_field_that_is_given_stays(capsys, tmp_path, digits):
    words = ["train", "image-small", "--data", digits, "--out", str(tmp_path / "run"), "--steps", "1", *SMALL]
    main([*words, "--model.pattern", "dense()"])
    assert "from that follow: context 784, embedding image(28, 28, 1)\n" in capsys.readouterr().err


def test_a_preset_for_other_data(capsys, tmp_path, digits):
    with pytest.raises(SystemExit) as ended:
        main(["train", "text-small", "--data", digits, "--out", str(tmp_path / "run"), *SMALL])
    assert ended.value.code == 2
    assert "presets for images: image-small, image-medium, cifar10, imagenet64" in capsys.readouterr().err


@pytest.mark.parametrize(("kind", "preset", "fitting"), [
    ("audio", "text-small", "audio-small, audio-medium, music-65536, music-262144, music-1048576"),
    ("audio", "enwik8-dense", "audio-small, audio-medium, music-65536, music-262144, music-1048576"),
    ("text", "audio-small", "text-small, text-medium, enwik8, text-modern"),
    ("text", "image-small", "text-small, text-medium, enwik8, text-modern"),
    ("bytes", "image-small", "text-small, text-medium, enwik8, text-modern"),
])  # fmt: skip
def test_a_preset_for_another_kind_of_data_is_refused(capsys, tmp_path, kind, preset, fitting):
    stream = np.random.default_rng(0).integers(0, 256, 8000, dtype=np.uint8)
    data, out = tmp_path / "data", tmp_path / "run"
    write_store(data, kind, {"train": stream, "valid": stream}, rate=8000 if kind == "audio" else None)
    with pytest.raises(SystemExit) as ended:
        main(["train", preset, "--data", str(data), "--out", str(out), "--steps", "1", *SMALL])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"longstride: train: {data} has {kind}, and ")
    assert error.endswith(f"; presets for {kind}: {fitting}\n")
    assert not out.exists()


@pytest.mark.parametrize(("kind", "preset"), [("bytes", "audio-small"), ("audio", "audio-small")])
def test_bytes_fit_every_preset_for_streams(capsys, tmp_path, kind, preset):
    stream = np.random.default_rng(0).integers(0, 256, 8000, dtype=np.uint8)
    write_store(tmp_path / "data", kind, {"train": stream, "valid": stream}, rate=8000 if kind == "audio" else None)
    words = ["--data", str(tmp_path / "data"), "--out", str(tmp_path / "run"), "--steps", "1", "--model.context", "64"]
    main(["train", preset, *words, *SMALL])
    assert "step 1, all steps are done" in capsys.readouterr().out


def test_a_run_that_patience_stopped_is_extended(capsys, tmp_path):
    stream = np.random.default_rng(0).integers(0, 256, 8000, dtype=np.uint8)
    write_store(tmp_path / "data", "text", {"train": stream, "valid": stream})
    words = ["--data", str(tmp_path / "data"), "--out", str(tmp_path / "run"), "--steps", "9", "--model.context", "64"]
    worse = ["--patience", "2", "--validate-every", "1", "--optimizer.learning-rate", "3"]
    main(["train", "text-small", *words, *worse, *SMALL])
    said = capsys.readouterr().out
    step = int(re.search(r"run: step (\d), no improvement in the last 2 validations", said)[1])
    assert said.splitlines()[-1] == (
        f"to go on all the same: longstride train text-small --out {tmp_path / 'run'} --resume --patience 0"
    )
    resume = ["train", "text-small", "--out", str(tmp_path / "run"), "--resume"]
    main(resume)
    assert f"run: step {step}, no improvement in the last 2 validations" in capsys.readouterr().out
    main([*resume, "--steps", "10"])
    assert f"run: step {step + 2}, no improvement in the last 2 validations" in capsys.readouterr().out
    main([*resume, "--patience", "0"])
    assert "run: step 10, all steps are done" in capsys.readouterr().out
