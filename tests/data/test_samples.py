import hashlib
import runpy
from importlib import resources
from pathlib import Path

import numpy as np
import pytest

from longstride.data import samples
from longstride.data.audio import encode
from longstride.model.presets import preset

READ = {"text": samples.text, "unseen-text": samples.unseen_text, "piano": samples.piano, "patches": samples.patches}
ROOT = Path(__file__).parents[2]
README = (resources.files("longstride.data.samples") / "README.md").read_text()


@pytest.mark.parametrize(
    ("name", "shape", "sha256"),
    [
        ("text", (1_000_000,), "24b0f545c36459e860d83648d646fd830ce8c7ea35473b39b1e68c19f687fcd8"),
        ("unseen-text", (65_536,), "8fc68e58ffb6ba0f6ffec5ed80f62f3c07af3f4bea85a397cde85de3bcab7515"),
        ("piano", (300_000,), "6e164284c2a7f1192abed9970862eb2a824db22a79752f93c75bc0a545b22bd1"),
        ("patches", (905, 32, 32, 3), "6c6fae3862b14c275f5759b426686626949c97b6a0c0f0266c3347fa470724a5"),
    ],
)
def test_they_are_what_was_packed(name, shape, sha256):
    sample = READ[name]()
    assert sample.dtype == np.uint8
    assert sample.shape == shape
    assert hashlib.sha256(sample.tobytes()).hexdigest() == sha256
    assert sample.flags.writeable


def test_there_is_one_reader_for_each_file():
    assert READ.keys() == samples.FILES.keys()
    folder = resources.files("longstride.data.samples")
    packed = {entry.name for entry in folder.iterdir() if entry.name.endswith(".xz")}
    assert packed == set(samples.FILES.values())
    assert samples.path("piano").read_bytes() == (folder / "piano.u8.xz").read_bytes()


@pytest.mark.parametrize(("read", "least"), [(samples.text, 5_000), (samples.unseen_text, 300)])
def test_text_is_text(read, least):
    text = read().tobytes().decode("utf-8", errors="replace")
    assert text.count("\ufffd") <= 1
    assert text.lstrip().startswith("<page>")
    assert text.count(" the ") > least


def test_unseen_text_is_no_part_of_the_other():
    assert samples.unseen_text()[:64].tobytes() not in samples.text().tobytes()


def test_piano_is_not_silent():
    level = np.abs(samples.piano().astype(float) - 127.5).reshape(-1, 12_000).mean(1)
    assert level.min() > 20
    entropy = np.bincount(samples.piano(), minlength=256) / 300_000
    assert -(entropy * np.log2(np.maximum(entropy, 1e-12))).sum() > 7


def test_the_notes_of_the_piano():
    script = runpy.run_path(str(ROOT / "benchmarks/piano_sample.py"))
    bars = script["BARS"].strip().splitlines()
    assert [script["pitch"](note) for note in ("A4", "C4", "F#3")] == pytest.approx([440, 261.626, 184.997], abs=1e-3)
    assert (len(bars), {len(bar.split()) for bar in bars}) == (10, {5})
    x = np.linspace(-0.999, 0.999, 999)
    assert np.array_equal(script["encode"](x), encode(x).ravel())
    # The first note is the loudest there, and its pitch is found in the bundled bytes.
    spectrum = np.abs(np.fft.rfft((samples.piano()[300:1800] - 127.5) * np.hanning(1500)))
    assert abs(spectrum.argmax() * 12_000 / 1500 - script["pitch"]("C4")) < 8


@pytest.mark.slow
def test_the_script_makes_the_piano():
    """Up to rounding in the last bit of a sine, which may differ between machines."""
    script = runpy.run_path(str(ROOT / "benchmarks/piano_sample.py"))
    assert np.mean(script["encode"](script["prelude"]()) == samples.piano()) > 0.999


@pytest.mark.parametrize("name", samples.FILES)
def test_a_store_of_a_sample(name, tmp_path, monkeypatch):
    monkeypatch.setenv("LONGSTRIDE_CACHE", str(tmp_path))
    for _ in range(2):  # The second time it is there.
        store = samples.store(name)
        assert store.split("valid").tobytes() == READ[name]().tobytes()
    assert store.kind == {"patches": "images", "piano": "audio"}.get(name, "text")
    assert store.item == READ[name]().shape[1:]
    assert len(list((tmp_path / "data").iterdir())) == 1


@pytest.mark.parametrize("word", ["BY-NC", "non-commercial", "not for commercial"])
def test_all_may_be_used_commercially(word):
    assert word.lower() not in README.lower()


def test_patches_are_pictures():
    images = samples.patches().astype(float)
    # Neighbours in a picture are alike, more than any two pixels of it.
    assert np.abs(np.diff(images, axis=2)).mean() < images.std() / 4


def test_the_small_presets_can_train_on_them():
    assert samples.text().size > 100 * preset("text-small").context
    assert samples.piano().size > 30 * preset("audio-small").context
    config = preset("image-small")
    assert samples.patches()[0].size == config.context
    assert config.embedding == "image({}, {}, {})".format(*samples.patches().shape[1:])


@pytest.mark.parametrize("name", samples.FILES)
def test_the_licence_of_each_is_written_down(name):
    section = README.split(f"## {samples.FILES[name]}\n")[1].split("\n## ")[0]
    for word in ("Source:", "Authors:", "Licence:", "How it was made:", "Changes:"):
        assert section.count(f"- {word}") == 1
    assert f"| `{samples.FILES[name]}` | {samples.path(name).stat().st_size:,} |" in README


def test_an_unknown_sample_is_named():
    with pytest.raises(ValueError, match="there is no sample 'patch'; did you mean 'patches'"):
        samples.path("patch")
