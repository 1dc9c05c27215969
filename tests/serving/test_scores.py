from math import log

import numpy as np
import pytest
import torch

from longstride.evaluation import bits_per_byte
from longstride.model.inspection import inspect_attention
from longstride.serving import scores
from longstride.serving.scores import LARGEST, look_at, passes, score_pass
from tests.model.small import model, some_bytes


def data_of(n, seed=1):
    return bytes(some_bytes(1, n, seed)[0].tolist())


def all_bits(made, data):
    return np.concatenate([score_pass(made, data, part) for part in passes(made.config, len(data))])


def test_bits_are_those_of_the_model():
    made, data = model().eval(), data_of(24)
    nats = made.nats(torch.tensor([list(data)]))[0].detach().numpy()
    assert np.allclose(all_bits(made, data), nats / log(2), atol=1e-6)


@pytest.mark.parametrize("n", [1, 23, 25, 60, 61])
def test_bits_of_a_long_text_are_those_of_the_evaluation(n, monkeypatch):
    monkeypatch.setattr(scores, "BYTES_PER_PASS", 50)  # Two windows at a time.
    made, data = model().eval(), data_of(n)
    bits = all_bits(made, data)
    assert len(bits) == n
    assert bits.mean() == pytest.approx(bits_per_byte(made, data, min_context=12).bits_per_byte)


def test_what_is_not_finite_is_nan():
    made = model().eval()
    with torch.no_grad():
        made.output.weight.fill_(float("nan"))
    assert np.isnan(all_bits(made, data_of(5))).all()


@pytest.mark.parametrize("position", [0, 5, 23, 24, 40, 59])
def test_a_look_agrees_with_the_bits(position):
    made, data = model().eval(), data_of(60)
    seen = look_at(made, data, position)
    assert -np.log2(seen.probabilities[data[position]]) == pytest.approx(all_bits(made, data)[position], abs=1e-5)
    assert seen.probabilities.sum() == pytest.approx(1)
    assert seen.levels.shape == (3, 2, position - seen.first + 1)


def test_levels_are_the_weights():
    made, data = model().eval(), data_of(20)
    for block in made.blocks:
        torch.nn.init.normal_(block.attention.query_key_value.weight)
    seen = look_at(made, data, 19)
    weights = inspect_attention(made, torch.tensor(list(data)), 19).weights.numpy()
    assert np.abs(seen.levels / LARGEST * seen.maxima[..., None] - weights).max() <= weights.max() / LARGEST
    assert (seen.levels.max(-1) == LARGEST).all()


def test_layers_are_chosen_and_limited(monkeypatch):
    made, data = model(layers=5).eval(), data_of(20)
    assert look_at(made, data, 10, [3]).layers == [3]
    monkeypatch.setattr(scores, "MOST_WEIGHTS", 2 * 11 * 3)
    assert look_at(made, data, 10).layers == [0, 2, 4]
    with pytest.raises(ValueError, match="look: 4 layers of 11 weights per head are too many; give at most 3"):
        look_at(made, data, 10, [0, 1, 2, 3])
    with pytest.raises(ValueError, match="layers"):
        look_at(made, data, 10, [5])


def test_a_head_that_sees_nothing_has_no_weights():
    made = model(pattern="summary(4, 1)").eval()
    seen = look_at(made, data_of(3), 1)
    assert not seen.maxima.any()
    assert not seen.levels.any()
