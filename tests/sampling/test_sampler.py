from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longstride.sampling.params import SamplingParams
from longstride.sampling.sampler import pick_bytes, probabilities, random_state, uniform

LOGITS = torch.tensor([[2.0, 1.0, 1.0, 0.0, -1.0] + [-torch.inf] * 251])


def test_an_unmodified_softmax_by_default():
    assert torch.equal(probabilities(LOGITS, SamplingParams()), LOGITS.double().softmax(-1))


def test_a_low_temperature_makes_likely_bytes_likelier():
    cold = probabilities(LOGITS, SamplingParams(temperature=0.5))
    assert torch.allclose(cold, (LOGITS.double() * 2).softmax(-1))


@pytest.mark.parametrize(("top_k", "left"), [(1, [0]), (2, [0, 1]), (3, [0, 1, 2]), (256, [0, 1, 2, 3, 4])])
def test_only_the_most_likely_and_of_equals_the_smaller(top_k, left):
    found = probabilities(LOGITS, SamplingParams(top_k=top_k))
    assert found.nonzero()[:, 1].tolist() == left
    assert torch.equal(found[0, left], LOGITS.double().softmax(-1)[0, left])


@pytest.mark.parametrize(("top_p", "left"), [(0.01, [0]), (0.5, [0]), (0.6, [0, 1]), (0.8, [0, 1, 2]), (1, [0, 1, 2, 3, 4])])
def test_the_fewest_that_have_a_probability(top_p, left):
    assert probabilities(LOGITS, SamplingParams(top_p=top_p)).nonzero()[:, 1].tolist() == left


@pytest.mark.parametrize("number", [Fraction(1, 2), torch.tensor(0.5), np.float32(0.5), np.array(0.5)], ids=repr)
def test_numbers_of_any_type(number):
    assert SamplingParams(number, top_p=number) == SamplingParams(0.5, top_p=0.5)


def test_top_p_is_of_what_top_k_leaves():
    assert probabilities(LOGITS, SamplingParams(top_k=3, top_p=0.65)).nonzero()[:, 1].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"temperature": 0.0}, "temperature must be at least 0.001, got 0.0; top_k = 1 takes"),
        ({"temperature": 1e-310}, "temperature must be at least 0.001, got 1e-310"),
        ({"temperature": -1.0}, "temperature must be at least 0.001, got -1.0$"),
        ({"temperature": float("nan")}, "temperature must be a finite number, got nan"),
        ({"temperature": float("inf")}, "temperature must be a finite number, got inf"),
        ({"temperature": "1"}, "temperature must be a finite number, got '1'"),
        ({"temperature": True}, "temperature must be a finite number, got True"),
        ({"temperature": 10**400}, "temperature must be a finite number, got 1000"),
        ({"temperature": torch.ones(2)}, "temperature must be a finite number, got tensor"),
        ({"top_k": 0}, "top_k must be at least 1, got 0"),
        ({"top_k": 257}, "top_k must be at most 256, as there are no more bytes, got 257"),
        ({"top_p": "1"}, "top_p must be a finite number, got '1'"),
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1, got 0.0"),
        ({"top_p": 1.5}, "top_p must be above 0 and at most 1, got 1.5"),
    ],
)
def test_what_makes_no_sense_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**given)


@given(st.integers(0, 2**64 - 1), st.integers(0, 1000), st.integers(0, 2**20))
def test_a_random_number_depends_on_seed_sample_and_position_alone(seed, sample, position):
    def number(seed, sample, position):
        return float(uniform(random_state(seed, torch.tensor([sample])), position))

    here = number(seed, sample, position)
    assert 0 <= here < 1
    beside = uniform(random_state(seed, torch.arange(sample, sample + 3)), position)
    assert float(beside[0]) == here
    assert here not in (
        number(seed, sample + 1, position),
        number(seed, sample, position + 1),
        number(seed + 1, sample, position),
    )


def test_random_numbers_are_even():
    found = torch.stack([uniform(random_state(3, torch.arange(100)), position) for position in range(200)])
    counts = torch.histc(found.float(), 20, 0, 1)
    assert counts.sum() == 20_000
    assert ((counts - 1000) ** 2 / 1000).sum() < 44  # chi squared, 19 degrees of freedom: 1 in 1000 is above 43.8


def test_picks_by_the_sum_of_probabilities():
    likely = torch.tensor([[0.0, 0.5, 0.0, 0.25, 0.25] + [0.0] * 251], dtype=torch.float64)
    cases = {0.0: 1, 0.4999: 1, 0.5: 3, 0.7499: 3, 0.75: 4, 1 - 2.0**-32: 4}
    for number, byte in cases.items():
        assert int(pick_bytes(likely, torch.tensor([number], dtype=torch.float64))) == byte


def test_bytes_come_as_often_as_they_are_likely():
    likely = probabilities(LOGITS, SamplingParams())
    numbers = uniform(random_state(0, torch.arange(20_000)), 5)
    counts = pick_bytes(likely.expand(20_000, -1), numbers).long().bincount(minlength=256)
    expected = likely[0] * 20_000
    assert (counts[5:] == 0).all()
    assert ((counts - expected)[:5] ** 2 / expected[:5]).sum() < 18.5  # 4 degrees of freedom
