"""The names of the models that come with longstride; tests/commands/test_models.py runs the models themselves."""

from pathlib import Path

import pytest
import torch

from longstride.model import SparseTransformer, shipped
from longstride.model.saved_config import find_config, find_settings
from tests.model import small


@pytest.fixture
def places(tmp_path, monkeypatch):
    """A package with the model `text` and no repository; the working folder is empty."""
    small.model().save_pretrained(tmp_path / "package" / "text", "float16")
    monkeypatch.setitem(shipped.NAMES, "text", tmp_path / "package")
    for name in ("images32", "piano"):
        monkeypatch.setitem(shipped.NAMES, name, tmp_path / "nowhere")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path


def test_a_name_is_a_model(places):
    assert shipped.find_model("text") == places / "package/text"
    assert find_settings("sample", Path("text")) == places / "package/text/config.json"
    assert find_config("doctor", "text") == small.config()
    found = SparseTransformer.from_pretrained("text", precision="bfloat16")
    assert found.config.precision == "bfloat16"
    assert torch.equal(found.output.weight, small.model().output.weight.half().float())


def test_a_run_or_a_model_in_the_working_folder_comes_first(places):
    Path("text").mkdir()
    Path("text/book.txt").touch()
    assert shipped.find_model("text") == places / "package/text"  # A folder of data is no model.
    small.model(layers=2).save_pretrained("text")
    assert SparseTransformer.from_pretrained("text").config.layers == 2
    assert find_config("doctor", "text").layers == 2


def test_only_the_bare_name_is_one(places):
    for path in (Path("other/text"), places / "text", Path("Text"), Path("text/text")):
        assert shipped.find_model(path) == path


@pytest.mark.parametrize("name", ["images32", "piano"])
def test_a_model_of_the_repository_that_is_not_here(places, name):
    message = rf"{name} is not here: .*leaves out for its licence: take the folder models/{name} .*give its path"
    with pytest.raises(ValueError, match=rf"^sample: {message}"):
        find_settings("sample", Path(name))
    with pytest.raises(ValueError, match=rf"^from_pretrained: {message}"):
        SparseTransformer.from_pretrained(name)
    with pytest.raises(ValueError, match=rf"^doctor: {message}"):
        find_config("doctor", name)


def test_a_package_without_its_model(places, monkeypatch):
    monkeypatch.setitem(shipped.NAMES, "text", shipped.PACKAGE)
    monkeypatch.setattr(shipped, "is_here", lambda name: False)
    with pytest.raises(ValueError, match=r"text is not here: .*shipped/text is not there: install longstride again"):
        find_settings("sample", Path("text"))


def test_a_misspelt_name(places):
    with pytest.raises(ValueError, match=r"image32 is no run .* there is no such folder; did you mean 'images32'\?"):
        find_settings("sample", Path("image32"))


def test_the_package_has_only_what_is_free():
    """What is in the package's folder is in the wheel."""
    free = {name for name, folder in shipped.NAMES.items() if folder == shipped.PACKAGE}
    assert free == {"text"}
    assert {path.name for path in shipped.PACKAGE.iterdir() if path.is_dir()} <= {*free, "__pycache__"}
