"""From data to samples by the commands alone: a small network learns ten things by heart, and says them again, exactly."""

import json
from math import log2

import numpy as np
import pytest

from longstride.commands import main as cli
from longstride.data import audio, samples
from longstride.data.image_files import from_png
from longstride.data.store import open_store, write_store

COUNT, SIZE, KNOWN = 10, 32, 8
"""Texts and sounds of 32 bytes, the first eight of which say which it is."""
ITEM = (6, 6, 3)
NETWORK = (
    "--model.layers 2 --model.width 64 --model.heads 2 --model.pattern merged(strided(8)) --optimizer.learning-rate 0.01 "
    "--optimizer.warmup 10 --log-every 1000 --validate-every 1000 --device cpu"
)


def learn(folder, items, steps, kind, item=(), rate=None):
    """The run, and its bits per byte of what it has read."""
    data = np.stack([np.frombuffer(one, np.uint8) for one in items]).reshape(-1)
    if not item:  # A stream, whose windows begin anywhere. Twice, so that each thing is followed by another.
        data = np.tile(data, 2)
    write_store(folder / "data", kind, {"train": data, "valid": data}, item, rate)
    embedding = f"image{item}" if item else "matrix(8)"
    run = folder / "run"
    words = f"--data {folder / 'data'} --out {run} --steps {steps} --batch {10 if item else 16} {NETWORK}"
    shape = ["--model.context", str(len(items[0])), "--model.embedding", embedding]
    preset = "audio-small" if kind == "audio" else "text-small"
    cli.main(["train", preset, *words.split(), *shape])
    cli.main(["eval", str(run), "--device", "cpu"])
    return run, json.loads((run / "eval-valid.json").read_text())["rows"][0]["bits_per_byte"]


def test_ten_texts(capfd, tmp_path):
    """Each from its first eight bytes, to its last one."""
    text = samples.text().tobytes()
    texts = [text[start : start + SIZE] for start in range(1000, 91_000, 9000)]
    run, bits = learn(tmp_path, texts, 200, "text")
    # Windows of the evaluation are these texts, whose first bytes alone have to be guessed: of 320 places.
    assert bits < log2(COUNT * SIZE) / SIZE + 0.1
    for number, one in enumerate(texts):
        capfd.readouterr()
        cli.main(["sample", str(run), "--prompt", one[:KNOWN].decode(), "--top-k", "1", "--device", "cpu"])
        assert capfd.readouterr().out == one.decode(), f"text {number}"


def test_ten_sounds(tmp_path):
    """The same, from wav files to wav files."""
    time = np.arange(SIZE)
    sounds = [audio.encode(0.8 * np.sin(time * (pitch + 2) / 10 * (1 + time / 200))).tobytes() for pitch in range(COUNT)]
    run, bits = learn(tmp_path, sounds, 200, "audio", rate=audio.RATE)
    assert bits < log2(COUNT * SIZE) / SIZE + 0.1
    for number, one in enumerate(sounds):
        audio.to_wav(one, tmp_path / "sound.wav")
        words = ["--prompt-file", str(tmp_path / "sound.wav"), "--seconds", str(KNOWN / audio.RATE), "--top-k", "1"]
        cli.main(["sample", str(run), *words, "--device", "cpu"])
        found = b"".join(piece.tobytes() for piece in audio.read(run / "sample.wav"))
        assert found == one, f"sound {number}"


@pytest.mark.parametrize("words", [["--temperature", "1"], ["--top-k", "1"]], ids=["drawn", "likeliest"])
def test_ten_images_from_their_upper_third(pictures, tmp_path, words):
    """All bytes below it, drawn as the network has learned them, too: it needs about 0.1 bits for 108 of them."""
    run, known, bits = pictures
    assert bits < log2(COUNT) / 108 + 0.001
    np.save(tmp_path / "known.npy", np.frombuffer(b"".join(known), np.uint8).reshape(COUNT, *ITEM))
    words = [*words, "--prompt-file", str(tmp_path / "known.npy"), "--keep-top", "0.33", "--out", str(tmp_path / "made")]
    cli.main(["sample", str(run), *words, "--device", "cpu"])
    made = [from_png(tmp_path / f"made/sample-{number}.png")[0] for number in range(COUNT)]
    assert made == known


def test_images_from_nothing_are_among_those_it_knows(pictures, tmp_path):
    """All of them, and not one alone."""
    run, known, _ = pictures
    cli.main(["sample", str(run), "--count", "20", "--out", str(tmp_path / "made"), "--device", "cpu"])
    made = [from_png(path)[0] for path in sorted((tmp_path / "made").glob("sample-*.png"))]
    assert len(made) == 20
    assert set(made) <= set(known)
    assert len(set(made)) > 4


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    known = [one.tobytes() for one in samples.patches()[::90][:COUNT, :30:5, :30:5]]
    run, bits = learn(folder, known, 200, "images", item=ITEM)
    assert open_store(folder / "data").item == ITEM
    return run, known, bits
