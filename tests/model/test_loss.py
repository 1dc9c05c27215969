from functools import partial
from math import log

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from longstride.model.loss import nats
from tests.model.small import model, some_bytes


def test_chunks_change_nothing():
    h, weight = torch.randn(2, 13, 8), torch.randn(256, 8)
    targets = some_bytes(2, 13)
    whole = F.cross_entropy((h @ weight.T).flatten(0, 1), targets.flatten(), reduction="none").view(2, 13)
    for chunk in (1, 5, 26, 100):
        torch.testing.assert_close(nats(h, partial(F.linear, weight=weight), targets, chunk), whole)


def test_gradients_pass_through_chunks():
    h, weight = torch.randn(2, 13, 8, requires_grad=True), torch.randn(256, 8, requires_grad=True)
    targets = some_bytes(2, 13)
    ours = torch.autograd.grad(nats(h, partial(F.linear, weight=weight), targets, 5).sum(), (h, weight))
    plain = F.cross_entropy((h @ weight.T).flatten(0, 1), targets.flatten(), reduction="sum")
    for our, true in zip(ours, torch.autograd.grad(plain, (h, weight))):
        torch.testing.assert_close(our, true)


class Largest(TorchDispatchMode):
    """The most numbers that any result has."""

    def __init__(self):
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else (result,):
            if isinstance(x, torch.Tensor):
                self.numbers = max(self.numbers, x.numel())
        return result


def test_logits_are_there_a_chunk_at_a_time():
    h, weight = torch.randn(1, 512, 2, requires_grad=True), torch.randn(256, 2, requires_grad=True)
    with Largest() as largest:
        nats(h, partial(F.linear, weight=weight), some_bytes(1, 512), 8).sum().backward()
    assert largest.numbers <= 8 * 256


def test_logits_of_a_chunk_are_not_kept_for_the_next():
    """What one chunk leaves behind is its nats alone: the logits' function is called again for the gradient."""
    called = []
    weight = torch.randn(256, 2, requires_grad=True)

    def logits(some):
        called.append(len(some))
        return F.linear(some, weight)

    loss = nats(torch.randn(1, 20, 2, requires_grad=True), logits, some_bytes(1, 20), 8).sum()
    assert called == [8, 8, 4]
    loss.backward()
    assert sorted(called) == [4, 4, 8, 8, 8, 8]


def test_the_first_loss_is_that_of_a_uniform_guess():
    found = model(output=False).nats(some_bytes())
    assert torch.equal(found, torch.full_like(found, log(256)))


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_loss_is_the_mean_of_nats(precision):
    made = model(precision=precision)
    tokens = some_bytes()
    assert made.nats(tokens).dtype == torch.float32
    assert torch.equal(made.loss(tokens), made.nats(tokens).mean())
    expected = -made(tokens).log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    torch.testing.assert_close(made.nats(tokens), expected)


def test_logits_are_not_rounded():
    """In half precision, too, they are float32 from the last norm on."""
    made = model(precision="bfloat16")
    logits = made(some_bytes())
    assert not torch.equal(logits, logits.bfloat16().float())
    h = made.hidden(some_bytes())
    assert h.dtype == torch.bfloat16
    torch.testing.assert_close(logits, F.layer_norm(h.float(), (16,)) @ made.output.weight.T)
