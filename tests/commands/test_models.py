"""The models that come with longstride and are here: files, card, figures and samples. Others are listed as missing."""

import io

import pytest
from rich.console import Console

from longstride.commands.evaluate import evaluate
from longstride.commands.main import main
from longstride.commands.models import show
from longstride.common.files import file_sha256
from longstride.data import samples
from longstride.model import SparseTransformer, shipped
from longstride.model.card import card_page, read_card
from longstride.model.shipped import NAMES, is_here, model_folder

HERE = [name for name in NAMES if is_here(name)]
MOST = 10_500_000
"""Bytes of the weights."""
TOLERANCE = 0.01
"""Bits per byte."""


def printed(width=120):
    out = io.StringIO()
    show(Console(file=out, width=width))
    return out.getvalue()


def test_every_name_is_listed_or_missing():
    text = printed()
    for name in NAMES:
        assert (f"{name} is not here: " in text) == (name not in HERE)
        assert (f"{name}: {model_folder(name)}" in text) == (name in HERE)


def test_missing_ones_say_why(monkeypatch, tmp_path):
    for name in NAMES:
        monkeypatch.setitem(shipped.NAMES, name, tmp_path)
    text = printed()
    assert text.count(" is not here: ") == len(NAMES)
    assert "take the folder models/piano of the repository" in text


def test_nothing_is_cut_off_in_a_narrow_terminal():
    assert "\u2026" not in printed(width=40)


@pytest.mark.parametrize("name", HERE)
def test_the_files_are_those_of_the_card(name):
    folder = model_folder(name)
    card, model = read_card(folder), SparseTransformer.from_pretrained(name)
    weights = folder / "model.safetensors"
    assert (card.name, card.dtype, card.parameters) == (name, "float16", model.parameter_count())
    assert (card.size, card.sha256) == (weights.stat().st_size, file_sha256(weights))
    assert card.size <= MOST
    assert all((card.title, card.data, card.licence, card.terms, card.command, card.samples, card.limits, card.figures))
    assert (folder / "README.md").read_text() == card_page(card, model.config)
    assert (folder / "train.json").is_file()


@pytest.mark.parametrize("name", HERE)
def test_it_evaluates_to_the_figure_of_its_card(name, monkeypatch, tmp_path):
    monkeypatch.setenv("LONGSTRIDE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    check = read_card(model_folder(name)).check
    assert check.data in samples.FILES
    (found,) = evaluate(shipped.find_model(name), most_bytes=check.bytes, device="cpu")
    assert found.bits_per_byte == pytest.approx(check.bits_per_byte, abs=TOLERANCE)


@pytest.mark.parametrize("name", HERE)
def test_it_samples(name, monkeypatch, tmp_path, capfd):
    """Without --kind: the card says what the bytes are."""
    monkeypatch.chdir(tmp_path)
    length = [] if name == "images32" else ["--length", "20"]
    prompt = ["--prompt", "The "] if name == "text" else []
    if name == "images32":  # All but the last row are given.
        from longstride.data.images import to_png

        to_png(samples.patches()[0].tobytes(), (32, 32, 3), tmp_path / "given.png")
        prompt = ["--prompt-file", "given.png", "--keep-top", "0.97"]
    main(["sample", name, *prompt, *length])
    made = {"text": None, "images32": "sample.png", "piano": "sample.wav"}[name]
    assert "The " in capfd.readouterr().out if made is None else (tmp_path / made).stat().st_size > 40
