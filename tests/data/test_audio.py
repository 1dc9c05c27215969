import lzma
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile

from longstride.data import audio
from tests.data.small import contents, made

CODES = np.arange(256, dtype=np.uint8)


def edge(code):
    """Where a code's cell begins."""
    y = code / 128 - 1
    return math.copysign((256 ** abs(y) - 1) / 255, y)


def tone(seconds, rate, frequency=440):
    return 0.5 * np.sin(2 * np.pi * frequency * np.arange(round(seconds * rate)) / rate)


def joined(store):
    return np.concatenate([store.split(name) for name in store.splits])


def test_every_code_comes_back():
    assert np.array_equal(audio.encode(audio.decode(CODES)), CODES)
    assert np.array_equal(audio.decode(CODES.tobytes()), audio.decode(CODES))


@pytest.mark.parametrize("code", range(256))
def test_decoded_within_the_cell(code):
    low, high = edge(code), edge(code + 1)
    x = audio.decode(CODES)[code]
    assert low < x < high
    inside = np.linspace(low, high, 101)[1:-1]
    assert (audio.encode(inside) == code).all()
    assert np.abs(audio.decode(audio.encode(inside)) - inside).max() <= high - low


def test_the_formula():
    x = np.random.default_rng(0).uniform(-1, 1, 1000)
    expected = [math.floor((math.copysign(math.log(1 + 255 * abs(v)), v) / math.log(256) + 1) * 128) for v in x]
    assert audio.encode(x).tolist() == expected
    assert audio.encode([-2, -1, 0, 1, 2]).tolist() == [0, 0, 128, 255, 255]


def test_the_middle_is_on_the_scale_of_mu_law():
    companded = np.sign(audio.decode(CODES)) * np.log1p(255 * np.abs(audio.decode(CODES))) / math.log(256)
    assert np.allclose((companded + 1) * 128, CODES + 0.5, atol=1e-9)


def test_to_wav_and_back(tmp_path):
    codes = np.tile(CODES, 8)
    audio.to_wav(codes.tobytes(), tmp_path / "a.wav")
    header = soundfile.info(tmp_path / "a.wav")
    assert (header.samplerate, header.channels, header.subtype, header.frames) == (12000, 1, "PCM_16", len(codes))
    assert np.array_equal(np.concatenate(list(audio.read(tmp_path / "a.wav"))), codes)
    assert np.array_equal(joined(made(audio.Audio.plan(tmp_path / "a.wav"), tmp_path / "made")), codes)


@pytest.mark.parametrize("ending", ["wav", "flac", "ogg", "mp3"])
def test_sound_is_mixed_and_resampled(tmp_path, ending):
    rate = 44100
    left, right = tone(1, rate), tone(1, rate, 1000)
    soundfile.write(tmp_path / f"a.{ending}", np.stack([left, right], -1), rate)
    store = made(audio.Audio.plan(tmp_path / f"a.{ending}"), tmp_path / "made")
    assert (store.kind, store.rate, store.item) == ("audio", 12000, ())
    wanted = (tone(1, 12000) + tone(1, 12000, 1000)) / 2
    found = audio.decode(joined(store))
    lossless = ending in ("wav", "flac")
    assert abs(len(found) - 12000) <= (1 if lossless else 1000)
    if lossless:
        assert np.abs(found[:12000] - wanted)[200:-200].max() < 0.02
    else:
        spectrum = np.abs(np.fft.rfft(found[:12000], 12000))
        assert set(np.argsort(spectrum)[-2:]) == {440, 1000}
    assert list(store.splits.values())[1:] == [len(found) * 5 // 100] * 2


def test_blocks_do_not_show(tmp_path, monkeypatch):
    soundfile.write(tmp_path / "a.wav", tone(1, 16000), 16000)
    whole = np.concatenate(list(audio.read(tmp_path / "a.wav")))
    monkeypatch.setattr(audio, "READ", 8 * 777)
    assert np.array_equal(np.concatenate(list(audio.read(tmp_path / "a.wav"))), whole)
    assert len(whole) == 12000


@pytest.mark.parametrize("name", ["a.u8", "a.ulaw", "a.u8.xz"])
def test_codes_are_taken_as_they_are(tmp_path, name):
    codes = np.random.default_rng(0).bytes(1000)
    (tmp_path / name).write_bytes(lzma.compress(codes) if name.endswith("xz") else codes)
    store = made(audio.Audio.plan(tmp_path / name), tmp_path / "made")
    assert contents(store) == {"train": codes[:900], "valid": codes[900:950], "test": codes[950:]}


def test_codes_that_look_packed(tmp_path):
    codes = b"\x1f\x8b" + bytes(98)
    (tmp_path / "a.u8").write_bytes(codes)
    assert joined(made(audio.Audio.plan(tmp_path / "a.u8"), tmp_path / "made")).tobytes() == codes


def test_files_stay_whole(tmp_path):
    (tmp_path / "set").mkdir()
    for number in range(40):
        (tmp_path / "set" / f"{number:02}.u8").write_bytes(bytes([number]) * 100)
    store = made(audio.Audio.plan(tmp_path / "set"), tmp_path / "made")
    assert contents(store) == {
        "train": b"".join(bytes([number]) * 100 for number in range(36)),
        "valid": bytes([36]) * 100 + bytes([37]) * 100,
        "test": bytes([38]) * 100 + bytes([39]) * 100,
    }
    assert "whole files, in sorted order" in store.source


@pytest.mark.parametrize(
    ("sizes", "counts"),
    [
        ([5, 5], {"train": 1, "valid": 1}),
        ([5, 5, 5], {"train": 1, "valid": 1, "test": 1}),
        ([900, 50, 50], {"train": 1, "valid": 1, "test": 1}),
        ([1000, 1, 1, 1], {"train": 1, "valid": 1, "test": 2}),
        ([100] * 100, {"train": 90, "valid": 5, "test": 5}),
    ],
)
def test_shares_of_whole_files(sizes, counts):
    given = {Path(f"{number:03}"): size for number, size in enumerate(sizes)}
    assigned = audio.assign_files(given)
    assert {name: len(paths) for name, paths in assigned.items()} == counts
    assert [path for paths in assigned.values() for path in paths] == list(given)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([1, 2, 1000], {"train": ["2"], "valid": ["1"], "test": ["0"]}),
        ([144, 397, 84], {"train": ["1"], "valid": ["0"], "test": ["2"]}),
        ([30, 20, 30, 20], {"train": ["0", "2"], "valid": ["1"], "test": ["3"]}),
        ([10, 70, 10, 10], {"train": ["0", "1"], "valid": ["2"], "test": ["3"]}),
        ([1, 1, 10, 100, 100], {"train": ["3", "4", "2"], "valid": ["0"], "test": ["1"]}),
        ([20, 100, 1, 100], {"train": ["1", "3"], "valid": ["0"], "test": ["2"]}),
    ],
)
def test_few_long_files_train(sizes, expected):
    """In sorted order, unless that would hold out most of the bytes."""
    assigned = audio.assign_files({Path(str(number)): size for number, size in enumerate(sizes)})
    assert {name: [str(path) for path in paths] for name, paths in assigned.items()} == expected


def test_named_files_are_the_splits(tmp_path):
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "piano-valid.u8").write_bytes(bytes(50))
    (tmp_path / "set" / "piano-train.u8").write_bytes(bytes(70))
    assert made(audio.Audio.plan(tmp_path / "set"), tmp_path / "made").splits == {"train": 70, "valid": 50}


def not_finite(path):
    samples = tone(0.1, 12000)
    samples[100] = np.nan
    soundfile.write(path, samples, 12000, subtype="FLOAT")


@pytest.mark.parametrize(
    ("name", "make", "message"),
    [
        ("a.wav", lambda p: p.write_text("no sound at all"), r"a.wav cannot be read as sound: .*Format not recognised"),
        ("a.flac", lambda p: p.write_bytes(b"fLaC" + bytes(50)), r"a.flac cannot be read as sound"),
        ("a.wav", lambda p: p.touch(), r"a.wav is empty: it holds no sound; remove it"),
        ("a.wav", lambda p: soundfile.write(p, np.zeros(0), 8000), r"a.wav is empty: it holds no sound; remove it"),
        ("a.u8", lambda p: p.touch(), r"a.u8 is empty"),
        ("a.u8", lambda p: p.write_bytes(b"ab"), r"a.u8 holds 2 samples; at least 3 are needed"),
        ("a.wav", not_finite, r"a.wav holds samples that are not finite numbers"),
        ("folder", lambda p: p.mkdir(), r"folder holds no sound; looked for .wav, .flac, .ogg, .mp3, .u8, .ulaw"),
    ],
)
def test_bad_sound_is_named(tmp_path, name, make, message):
    make(tmp_path / name)
    with pytest.raises(ValueError, match=message):
        made(audio.Audio.plan(tmp_path / name), tmp_path / "made")
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_without_the_libraries(tmp_path, monkeypatch):
    soundfile.write(tmp_path / "a.wav", tone(0.1, 8000), 8000)
    monkeypatch.setitem(sys.modules, "soxr", None)
    with pytest.raises(ValueError, match=r"a.wav: 8000 Hz to 12000 Hz needs soxr: pip install 'longstride\[data\]'"):
        audio.Audio.plan(tmp_path / "a.wav")
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(ValueError, match=r"a.wav: reading sound needs soundfile: pip install"):
        audio.Audio.plan(tmp_path / "a.wav")
