import json
from math import inf, nan
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from longstride.model import SparseTransformer, pretrained
from tests.model.small import model, some_bytes


@pytest.fixture
def folder(tmp_path):
    model(dropout=0.1).save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


def test_a_model_comes_back(folder):
    first = model(dropout=0.1)
    second = SparseTransformer.from_pretrained(folder)
    assert second.config == first.config
    tokens = some_bytes()
    assert torch.equal(first.eval()(tokens), second.eval()(tokens))
    assert all(parameter.requires_grad for parameter in second.parameters())
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]


def test_a_checkpoint_has_its_runs_config(folder):
    """Unless it has one of its own, as a model that was saved there by hand."""
    checkpoint = folder / "checkpoints/step-5"
    other = model(seed=1, dropout=0.1)
    other.save_pretrained(checkpoint)
    for own in (True, False):
        (folder / "config.json").write_text(model(layers=2).config.to_json() if own else other.config.to_json())
        found = SparseTransformer.from_pretrained(checkpoint)
        assert found.config == other.config
        assert torch.equal(found.eval()(some_bytes()), other.eval()(some_bytes()))
        (checkpoint / "config.json").unlink(missing_ok=True)
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match=r"step-5 is no saved model: it has no config.json"):
        SparseTransformer.from_pretrained(checkpoint)


def test_what_leaves_the_weights_alone_can_be_changed(folder):
    changed = SparseTransformer.from_pretrained(folder, precision="bfloat16", recompute="on", dropout=0.0, chunk=4)
    assert (changed.config.precision, changed.config.recompute, changed.config.chunk) == ("bfloat16", "on", 4)
    with pytest.raises(ValueError, match="layers cannot be changed, only dropout, precision, recompute, chunk"):
        SparseTransformer.from_pretrained(folder, layers=4)


def broken(folder, change):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("norm.weight"), r"norm.weight is missing; config.json asks for it, of shape \[16\]"),
        (
            lambda w: w.update({"norm.weight": torch.zeros(3)}),
            r"norm.weight has shape \[3\]; config.json asks for \[16\]",
        ),
        (lambda w: w.update({"other": torch.zeros(3)}), "'other' is not a tensor of this model"),
        (lambda w: w.update({"norm.weight": torch.zeros(16, dtype=torch.int64)}), "'norm.weight' is torch.int64"),
        (
            lambda w: w.update({"norm.weight": torch.zeros(16).double()}),
            "'norm.weight' is torch.float64; weights must be one of float32, float16, bfloat16",
        ),
    ],
)
def test_tensors_are_checked(folder, change, message):
    broken(folder, change)
    with pytest.raises(ValueError, match=message):
        SparseTransformer.from_pretrained(folder)


def test_files_are_checked(folder, tmp_path):
    with pytest.raises(ValueError, match=r"is no saved model: it has no config.json"):
        SparseTransformer.from_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match="nowhere is no saved model: there is no such folder; by name there are text, images32"
    ):
        SparseTransformer.from_pretrained("nowhere")
    saved = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**saved, "layer": 1}))
    with pytest.raises(ValueError, match=r"config.json: there is no field 'layer'; did you mean 'layers'\?"):
        SparseTransformer.from_pretrained(folder)
    model().save_pretrained(folder)
    (folder / "model.safetensors").write_bytes(b"not what it should be")
    with pytest.raises(ValueError, match=r"model.safetensors cannot be read"):
        SparseTransformer.from_pretrained(folder)


@pytest.mark.parametrize("length", [0, 4, 100, -1])
def test_a_file_that_was_cut_off(folder, length):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(ValueError, match=r"model.safetensors cannot be read"):
        SparseTransformer.from_pretrained(folder)


def test_nothing_is_unpickled(folder, tmp_path):
    torch.save({"norm.weight": torch.zeros(16)}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"model.safetensors cannot be read"):
        SparseTransformer.from_pretrained(folder)


def test_saved_weights_replace_each_other(tmp_path):
    for value in (1.0, 2.0):
        pretrained.save_weights(tmp_path, {"x": torch.full((2, 3), value, dtype=torch.float64).T})
    found = load_file(tmp_path / "model.safetensors")
    assert found["x"].dtype == torch.float32
    assert torch.equal(found["x"], torch.full((3, 2), 2.0))


def test_a_model_of_the_first_version_gives_the_logits_it_gave_then():
    """tests/model/old_model was saved, with these logits, by the first version that trains (commit 6bafcc3)."""
    folder = Path(__file__).with_name("old_model")
    recorded = json.loads((folder / "logits.json").read_text())
    loaded = SparseTransformer.from_pretrained(folder).eval()
    with torch.no_grad():
        logits = loaded(torch.tensor([recorded["bytes"]], dtype=torch.uint8))[0, -1, ::16]
    assert torch.allclose(logits, torch.tensor(recorded["last"]), rtol=0, atol=2e-6)


@pytest.mark.parametrize("value", [nan, inf, -inf])
def test_weights_that_are_not_finite_are_refused(folder, value):
    def spoil(weights):
        weights["blocks.1.ff.inner.weight"][3, 2] = value

    broken(folder, spoil)
    with pytest.raises(
        ValueError, match=rf"saved/model\.safetensors: 'blocks\.1\.ff\.inner\.weight' has a value of {value}; "
    ):
        SparseTransformer.from_pretrained(folder)


@pytest.mark.parametrize("kind", [torch.float32, torch.int16])
def test_a_name_without_end_is_cut_off(folder, kind):
    broken(folder, lambda weights: weights.update({"one\ntwo" * 10_000: torch.zeros(3, dtype=kind)}))
    with pytest.raises(ValueError, match=r"model.safetensors: 'one\\ntwo.*\.\.\. \(80,002 characters\) is") as caught:
        SparseTransformer.from_pretrained(folder)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_the_bytes(tmp_path, dtype):
    """Weights are rounded in the file, and float32 in the model; every tensor comes back as it was rounded."""
    whole = model()
    whole.save_pretrained(tmp_path / "whole")
    whole.save_pretrained(tmp_path / "half", dtype)
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("whole", "half")]
    assert sizes[0] - sizes[1] == pytest.approx(2 * whole.config.parameters, abs=100)  # The header varies.
    found = SparseTransformer.from_pretrained(tmp_path / "half")
    for name, x in whole.state_dict().items():
        assert found.state_dict()[name].dtype == torch.float32
        assert torch.equal(found.state_dict()[name], x.to(getattr(torch, dtype)).float())


def test_weights_too_large_for_half_precision_are_refused(tmp_path):
    large = model()
    with torch.no_grad():
        large.norm.weight[3] = 70_000
    with pytest.raises(ValueError, match=r"'norm\.weight' has values that are too large for float16"):
        large.save_pretrained(tmp_path / "half", "float16")
    assert not (tmp_path / "half").exists()
    large.save_pretrained(tmp_path / "half", "bfloat16")
