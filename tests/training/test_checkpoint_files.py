from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch

from longstride.model import SparseTransformer
from longstride.training import train
from longstride.training.checkpoint_files import CpuStager
from longstride.training.trainer import Trainer
from tests.training.small import MODEL, config, same

CPU = torch.device("cpu")


def test_copies_are_made_anew_in_the_same_memory():
    copies, x, model = CpuStager(CPU), torch.zeros(3), SparseTransformer(MODEL)
    found = []
    for number in (1.0, 2.0):
        x.fill_(number)
        with torch.no_grad():
            model.norm.weight.fill_(number)
        state, weights = copies.stage({"x": x}), copies.weights(model, True)
        assert weights.keys() == model.state_dict().keys()
        assert same(weights, model.state_dict())
        found.append((state["x"].data_ptr(), weights["norm.weight"].data_ptr(), state["x"].tolist()))
    assert found[0][:2] == found[1][:2]
    assert found[1][2] == [2.0] * 3
    assert {x.data_ptr(), model.norm.weight.data_ptr()}.isdisjoint(found[0][:2])


def test_weights_are_copied_where_they_are_wanted():
    assert CpuStager(CPU).weights(SparseTransformer(MODEL), False) == {}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_memory_is_pinned_for_the_device_that_the_run_has(device, monkeypatch):
    """Not for one that is there and not used."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert CpuStager(torch.device(device))._stager.pin_memory == (device == "cuda")


@pytest.mark.parametrize("error", [KeyboardInterrupt, FloatingPointError, None])
def test_a_run_lets_go_of_the_memory_when_it_ends(error, tmp_path):
    """If it is stopped at once it does not: what is under way may still be written from there."""
    step = patch.object(Trainer, "take_step", side_effect=error) if error else nullcontext()
    ends = pytest.raises(error) if error else nullcontext()
    with patch.object(CpuStager, "close", autospec=True, side_effect=CpuStager.close) as close, step, ends:
        train(config(tmp_path, steps=2))
    assert close.call_count == (error is not KeyboardInterrupt)
