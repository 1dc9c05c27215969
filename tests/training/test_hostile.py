"""Files by somebody who means harm, handed in as a checkpoint, a model or data: nothing is run, and all are refused."""

import io
import json
import os
import pickle
import struct
from math import inf, nan

import numpy as np
import pytest
import torch
from safetensors import safe_open

from longstride.common.tensor_file import save_file
from longstride.data.store import open_store, write_store
from longstride.model import SparseTransformer
from longstride.training import train
from longstride.training.manifest import check_manifest, write_manifest
from tests.training.saved import keeper, made, part, save
from tests.training.small import MODEL, config, store


class Harm:
    """Makes a folder when it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def pickled(marker):
    return pickle.dumps(Harm(marker))


def saved_by_torch(marker):
    file = io.BytesIO()
    torch.save({"norm.weight": Harm(marker)}, file)
    return file.getvalue()


def saved_by_numpy(marker):
    file = io.BytesIO()
    np.save(file, np.array([Harm(marker)], dtype=object), allow_pickle=True)
    return file.getvalue()


PICKLES = (pickled, saved_by_torch, saved_by_numpy)


def tensors(header, content=b""):
    """A safetensors file with that header, as text or as what JSON is made of."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + content


def one(shape, size, **metadata):
    return {"x": {"dtype": "F32", "shape": shape, "data_offsets": [0, size]}, "__metadata__": metadata}


def spread(parts):
    """What PyTorch reads of where the parts of a tensor lie."""
    return tensors(one([1], 4, DCP_SHARDING_INFO=parts), bytes(4))


DEEP = "[" * 100_000
TENSORS = {
    "empty": b"",
    "a header larger than any file": struct.pack("<Q", 2**63) + b"{}",
    "a header longer than the file": struct.pack("<Q", 1000) + b"{}",
    "a tensor larger than any memory": tensors(one([2**40, 2**40], 4), bytes(4)),
    "a tensor larger than the file": tensors(one([2**40], 2**42), bytes(4)),
    "a tensor of a size that is no number": tensors(one([0, 2**64 - 1], 0)),
    "a tensor that ends before it begins": tensors({"x": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}, bytes(4)),
    "a kind that nobody knows": tensors({"x": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}, bytes(1)),
    "a header without end": tensors(DEEP.encode()),
    "a header that is no text": tensors(b"\xff\xfe"),
    "parts without end": spread(DEEP),
    "parts that are none": spread("[]"),
    "parts of something else": spread("{}"),
    "a part that is none": spread('{"x": 3}'),
    "a part nowhere": spread('{"x": {"saved_offsets": ["a"]}}'),
    "a part infinitely far": spread('{"x": {"saved_offsets": [1e999]}}'),
    "a part before the first": spread('{"x": {"saved_offsets": [-1]}}'),
    "a tensor that was not asked for": tensors(one([1], 4), bytes(4)),
}
NUMBERS = {
    "empty": b"",
    "no text": b"\xff\xfe\x00",
    "a list": b"[]",
    "nothing": b"null",
    "no numbers": b"{}",
    "lists without end": DEEP.encode(),
    "names without end": b'{"version":' * 100_000,
    "a number of many digits": b'{"version": ' + b"9" * 5000 + b"}",
}


def refused(folder):
    """Sealed, as if it were ours; the manifest is no proof of who wrote it."""
    write_manifest(folder)
    check_manifest(folder)
    with pytest.raises(ValueError, match=r"step-1 (cannot be read|is not of this run's model and optimizer): [^\n]+$"):
        keeper(folder.parent).load(1, *made())


@pytest.mark.parametrize("write", PICKLES)
def test_these_pickles_do_harm(write, tmp_path):
    """Else what follows would show nothing."""
    marker = tmp_path / "harm"
    file = io.BytesIO(write(marker))
    if write is pickled:
        pickle.load(file)
    elif write is saved_by_torch:
        torch.load(file, weights_only=False)
    else:
        np.load(file, allow_pickle=True)
    assert marker.exists()


@pytest.mark.parametrize("write", PICKLES)
def test_a_checkpoint_is_not_unpickled(write, tmp_path):
    marker = tmp_path / "harm"
    folder = save(tmp_path, 1)
    for path in (folder / "model.safetensors", part(folder), folder / "state.json"):
        whole = path.read_bytes()
        path.write_bytes(write(marker))
        refused(folder)
        path.write_bytes(whole)
    # Files of other names are what other readers would look for.
    (folder / "state/.metadata").write_bytes(write(marker))
    (folder / "state/__0_0.distcp").write_bytes(write(marker))
    (folder / "state.pt").write_bytes(write(marker))
    write_manifest(folder)
    keeper(tmp_path).load(1, *made())
    assert not marker.exists()


@pytest.mark.parametrize("content", TENSORS.values(), ids=TENSORS)
def test_a_checkpoints_tensors_are_refused(content, tmp_path):
    folder = save(tmp_path, 1)
    for path in (folder / "model.safetensors", part(folder)):
        whole = path.read_bytes()
        path.write_bytes(content)
        refused(folder)
        path.write_bytes(whole)


@pytest.mark.parametrize("content", NUMBERS.values(), ids=NUMBERS)
def test_a_checkpoints_numbers_are_refused(content, tmp_path):
    folder = save(tmp_path, 1)
    (folder / "state.json").write_bytes(content)
    refused(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "state", "state.json"])
def test_folders_for_files_are_refused(name, tmp_path):
    folder = save(tmp_path, 1)
    inside = part(folder) if name == "state" else folder / name
    inside.unlink()
    inside.mkdir()
    refused(folder)


def test_a_run_stops_at_one(tmp_path):
    marker = tmp_path / "harm"
    planned = config(tmp_path, steps=4, validate_every=4)
    train(planned, until=2)
    folder = tmp_path / "run/checkpoints/step-2"
    part(folder).write_bytes(pickled(marker))
    write_manifest(folder)
    with pytest.raises(ValueError, match="step-2 cannot be read"):
        train(planned, resume=True)
    assert not marker.exists()


@pytest.mark.parametrize("write", PICKLES)
def test_a_model_is_not_unpickled(write, tmp_path):
    marker, folder = tmp_path / "harm", tmp_path / "model"
    for name in ("model.safetensors", "config.json"):
        SparseTransformer(MODEL).save_pretrained(folder)
        (folder / name).write_bytes(write(marker))
        with pytest.raises(ValueError, match=r"."):
            SparseTransformer.from_pretrained(folder)
    assert not marker.exists()


@pytest.mark.parametrize("write", PICKLES)
def test_data_is_not_unpickled(write, tmp_path):
    """As bytes of a split it is data like any other; as a manifest it is refused."""
    marker, content = tmp_path / "harm", write(tmp_path / "harm")
    harmful = np.frombuffer(content * (1 + 1000 // len(content)), np.uint8)
    folder = tmp_path / "data"
    write_store(folder, "text", {"train": harmful, "valid": harmful})
    assert train(config(tmp_path, data=str(folder), steps=1)).step == 1
    (folder / "manifest.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"manifest.json is (not JSON|no UTF-8 text)"):
        open_store(folder)
    assert not marker.exists()


@pytest.mark.parametrize("name", NUMBERS)
def test_a_manifest_of_data_is_refused(name, tmp_path):
    folder = tmp_path / "data"
    store(folder)
    (folder / "manifest.json").write_bytes(NUMBERS[name])
    with pytest.raises(
        ValueError, match=r"manifest.json (is (not JSON|no UTF-8 text|no manifest of prepared data)|must hold a JSON object)"
    ):
        open_store(folder)


def rewrite(path, change):
    """Changes the tensors of a file."""
    with safe_open(path, framework="pt") as file:
        about, found = file.metadata(), {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118
    change(found)
    save_file(found, path, about)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("norm.weight", nan, r"model\.safetensors: 'norm\.weight' has a value of nan; all must be finite"),
        ("norm.weight", -inf, r"model\.safetensors: 'norm\.weight' has a value of -inf; all must be finite"),
        ("average.norm.weight", inf, r"state: 'average\.norm\.weight' has a value of inf; all must be finite"),
        ("state.norm.weight.exp_avg", nan, r"state: 'state\.norm\.weight\.exp_avg' has a value of nan; all must be finite"),
        ("state.norm.weight.exp_avg_sq", -1, r"state: 'state\.norm\.weight\.exp_avg_sq' has a value of -1.0; squares"),
    ],
)
def test_a_checkpoint_that_is_not_finite_is_refused(name, value, says, tmp_path):
    """By its name and that of the tensor, before a step fails or the weights are lost."""
    planned = config(tmp_path, steps=4, ema=0.9, model={"layers": 1})
    train(planned, until=2)
    folder = tmp_path / "run/checkpoints/step-2"
    path = folder / "model.safetensors" if name == "norm.weight" else part(folder)
    rewrite(path, lambda found: found[name].view(-1)[:1].fill_(value))
    write_manifest(folder)
    before = sorted((path.name, path.stat().st_mtime_ns) for path in folder.parent.parent.iterdir() if path.name != ".lock")
    with pytest.raises(ValueError, match=rf"run/checkpoints/step-2/{says}"):
        train(planned, resume=True)
    after = sorted((path.name, path.stat().st_mtime_ns) for path in folder.parent.parent.iterdir() if path.name != ".lock")
    assert after == before


def test_a_wider_kind_of_number_is_no_way_around(tmp_path):
    """A finite float64 that is infinite as the float32 that it is copied to."""
    folder = save(tmp_path, 1)
    large = {"norm.weight": torch.full((32,), 1e300, dtype=torch.float64)}
    rewrite(folder / "model.safetensors", lambda found: found.update(large))
    write_manifest(folder)
    with pytest.raises(ValueError, match=r"'norm\.weight' has a value of inf"):
        keeper(tmp_path).load(1, *made())


@pytest.mark.parametrize("count", [-1.0, -2.0, 0.5, 2.0, 1e30, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["adamw", "adafactor", "muon"])
def test_an_optimizer_that_counts_wrongly_is_refused(name, count, tmp_path):
    """It would divide by zero, or take roots of what is negative."""
    folder = save(tmp_path, 1, given=made(name, steps=1))
    rewrite(part(folder), lambda found: [x.fill_(count) for key, x in found.items() if key.endswith(".step")])
    write_manifest(folder)
    with pytest.raises(ValueError, match="an optimizer's step must be from 0 to 1, got "):
        keeper(tmp_path).load(1, *made(name))
