import re
from dataclasses import replace

import pytest

from longstride.data import samples
from longstride.data.store import write_store
from longstride.model import preset
from longstride.training import preflight, train, train_preset
from longstride.training.config import FITTED, fields_to_fit
from longstride.training.preflight import check_settings, fit_to_data, resolve_precision
from longstride.training.ranks import SINGLE_RANK, Ranks
from longstride.training.run import Run
from tests.training.small import TEXT, config

SMALL = {"layers": 2, "width": 16}


@pytest.fixture
def digits(tmp_path):
    """Grey images of 28 x 28."""
    folder = tmp_path / "digits"
    write_store(folder, "images", {"train": TEXT[: 8 * 784], "valid": TEXT[: 2 * 784]}, (28, 28, 1))
    return str(folder)


def fitted(made, fit=FITTED, resume=False):
    said = []
    return fit_to_data(made, fit, resume, SINGLE_RANK, said.append), said


def test_a_preset_for_images_takes_the_size_of_the_datas(digits, tmp_path):
    made, said = fitted(train_preset("image-small", data=digits, out=str(tmp_path / "run")))
    sizes = {"context": 784, "embedding": "image(28, 28, 1)", "pattern": "column(28) + 3*local(28)"}
    assert made.model == replace(preset("image-small"), **sizes)
    assert said == [
        f"{digits} has images of 28 x 28 x 1; from that follow: context 784, embedding image(28, 28, 1), "
        "pattern column(28) + 3*local(28)"
    ]
    assert fitted(made) == (made, [])
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "pattern"), [("imagenet64", "interleave(strided(28))"), ("cifar10-dense", "dense()")]
)  # fmt: skip
def test_patterns_of_other_presets(name, pattern, digits, tmp_path):
    made, _ = fitted(train_preset(name, data=digits, out=str(tmp_path / "run")))
    assert made.model.pattern == pattern


def test_what_is_given_stays(digits, tmp_path):
    made = train_preset("image-small", data=digits, out=str(tmp_path / "run"), model={"pattern": "dense()"})
    assert fields_to_fit(["--model.pattern=dense()", "--model.layers", "3"]) == ["context", "embedding"]
    assert fields_to_fit(["--model.context", "5"]) == ["embedding", "pattern"]
    assert fitted(made, ["context", "embedding"])[0].model.pattern == "dense()"
    assert fitted(made, ["context", "embedding"])[0].model.context == 784
    with pytest.raises(ValueError, match="train: fit must name some of context, embedding, pattern, got 'stride'"):
        fitted(made, ["stride"])


def test_nothing_follows_from_data_that_fits(tmp_path):
    write_store(tmp_path / "data", "images", {"train": samples.patches(), "valid": samples.patches()}, (32, 32, 3))
    made = train_preset("image-small", data=str(tmp_path / "data"), out=str(tmp_path / "run"))
    assert fitted(made) == (made, [])


def test_the_folder_is_looked_at_before_the_data(digits, tmp_path):
    made = train_preset("image-small", data=str(tmp_path / "nowhere"), out=digits)
    with pytest.raises(ValueError, match="is not an empty folder"):
        fitted(made)


def test_a_run_of_such_images_goes_on(digits, tmp_path):
    """Also by processes that were started anew, with the preset's own sizes."""
    made = train_preset("image-small", data=digits, out=str(tmp_path / "run"), steps=2, batch=1, model=SMALL)
    assert train(made, until=1, fit=FITTED).step == 1
    assert train(made, resume="auto", fit=FITTED).step == 2
    made = resolve_precision(made, True, SINGLE_RANK)
    assert Run.resumed(fitted(made, resume=True)[0]).steps_before is None


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        (
            "cifar10", "text",
            "has text, and the model is for images of 32 x 32 x 3; presets for text: text-small, text-medium, enwik8, "
            "text-modern",
        ),
        (
            "text-small", "digits",
            "has images of 28 x 28 x 1, and the model's context of 512 bytes is not one image; presets for images: "
            "image-small, image-medium, cifar10, imagenet64",
        ),
        (
            "image-small", "digits",
            "has images of 28 x 28 x 1, and the model is for images of 32 x 32 x 3; give --model.context 784 "
            "--model.embedding 'image(28, 28, 1)' --model.pattern 'column(28) + 3*local(28)'",
        ),
    ],
)  # fmt: skip
def test_data_that_a_preset_is_not_for(name, data, says, digits, tmp_path):
    write_store(tmp_path / "text", "text", {"train": TEXT[:8000], "valid": TEXT[:8000]})
    made = train_preset(name, data=str(tmp_path / data), out=str(tmp_path / "run"), model=SMALL)
    with pytest.raises(ValueError, match=f"^train: {re.escape(f'{tmp_path / data} {says}')}$"):
        train(made)
    assert not (tmp_path / "run").exists()


def test_images_as_a_stream_of_bytes_are_no_mistake(digits, tmp_path):
    made = config(tmp_path, data=digits, steps=1, model={"context": 784, "embedding": "matrix(28)"})
    assert train(made).step == 1


def test_shards_refuse_blocks_in_parts(tmp_path):
    made = config(tmp_path, parallel="fsdp", model={"recompute": "on + parts"})
    check_settings(made, SINGLE_RANK)
    with pytest.raises(ValueError, match="recompute = 'on \\+ parts' is not possible with --parallel fsdp; use off, "):
        check_settings(made, Ranks(count=2))


@pytest.mark.parametrize(("prefers", "precision"), [(True, "bfloat16"), (False, "float32")])
def test_precision_that_suits_the_device(prefers, precision, tmp_path, monkeypatch):
    """A resumed run keeps its own, on any device."""
    monkeypatch.setattr(preflight, "prefers_bfloat16", lambda device: prefers)
    made = config(tmp_path, model={"precision": "auto"}, steps=2, device="cpu")
    train(made, until=1)
    (saved,) = re.findall(r'"precision": "(\w+)"', (tmp_path / "run" / "config.json").read_text())
    assert saved == precision
    monkeypatch.setattr(preflight, "prefers_bfloat16", lambda device: not prefers)
    assert resolve_precision(made, True, SINGLE_RANK).model.precision == precision
    assert train(made, resume=True).done
    given = replace(made, model=replace(made.model, precision="float16"))
    assert resolve_precision(given, False, SINGLE_RANK) is given


def test_processes_on_other_devices_agree_on_a_precision(tmp_path, monkeypatch):
    class Two(Ranks):
        def any(self, flag):
            return True  # Of the other process.

        def run_on_all(self, function):
            return function()

    monkeypatch.setattr(preflight, "prefers_bfloat16", lambda device: True)
    made = config(tmp_path, model={"precision": "auto"}, device="cpu")
    assert resolve_precision(made, False, Two(count=2)).model.precision == "float32"
