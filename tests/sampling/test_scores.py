"""Scores of bytes by logits."""

import pytest
import torch

from longstride.sampling.scores import empty_scores, score


@pytest.mark.parametrize("likely", [0, 1, 3, 256])
def test_scores(likely):
    logits = torch.randn(5, 256, generator=torch.Generator().manual_seed(0))
    logits[2, 40] = logits[2, 30] = logits[2].max() + 1  # Of two equal ones, the lower comes first.
    data = bytes([0, 9, 30, 255, 7])
    found = score(logits, data, likely)
    logprobs = logits.double().log_softmax(-1)
    for row, one in enumerate(found.listed()):
        assert one.logprob == float(logprobs[row, data[row]])
        order = sorted(range(256), key=lambda byte, row=row: (-float(logprobs[row, byte]), byte))
        assert one.likely == [(byte, float(logprobs[row, byte])) for byte in order[:likely]]
    assert found.listed(1, 3) == found.listed()[1:3]
    assert found.listed(4, 99) == found.listed()[4:]


def test_parts_in_a_row():
    logits = torch.randn(7, 256)
    whole, parts = score(logits, b"abcdefg", 2), empty_scores(7, 2)
    parts.put(3, logits[3:], b"defg")
    parts.put(0, logits[:3], b"abc")
    assert parts.listed() == whole.listed()
    assert whole.is_finite
    logits[3, 5] = torch.nan
    assert not score(logits, b"abcdefg", 0).is_finite
