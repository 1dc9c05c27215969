import hashlib
from importlib import resources

import numpy as np
import pytest

from longstride.data import samples
from longstride.model.presets import preset

READ = {"text": samples.text, "piano": samples.piano, "patches": samples.patches}
README = (resources.files("longstride.data.samples") / "README.md").read_text()


@pytest.mark.parametrize(
    ("name", "shape", "sha256"),
    [
        ("text", (1_000_000,), "24b0f545c36459e860d83648d646fd830ce8c7ea35473b39b1e68c19f687fcd8"),
        ("piano", (300_000,), "b2f819bf877e2345cd5146dae3a9ce45c853cc2625180cd249c12935e1276735"),
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


def test_text_is_text():
    text = samples.text().tobytes().decode("utf-8", errors="replace")
    assert text.count("\ufffd") <= 1
    assert text.lstrip().startswith("<page>")
    assert text.count(" the ") > 5_000


def test_piano_is_not_silent():
    level = np.abs(samples.piano().astype(float) - 127.5).reshape(-1, 12_000).mean(1)
    assert level.min() > 20
    entropy = np.bincount(samples.piano(), minlength=256) / 300_000
    assert -(entropy * np.log2(np.maximum(entropy, 1e-12))).sum() > 7


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
