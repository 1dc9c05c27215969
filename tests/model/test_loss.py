from math import log

import torch
import torch.nn.functional as F

from longstride.model.loss import logits, nats
from tests.model.small import model, some_bytes


def test_chunks_change_nothing():
    hidden, weight = torch.randn(2, 13, 8), torch.randn(256, 8)
    targets = some_bytes(2, 13)
    whole = F.cross_entropy(logits(hidden, weight).flatten(0, 1), targets.flatten(), reduction="none").view(2, 13)
    for chunk in (1, 5, 26, 100):
        torch.testing.assert_close(nats(hidden, weight, targets, chunk), whole)


def test_gradients_pass_through_chunks():
    hidden = torch.randn(2, 13, 8, requires_grad=True)
    weight = torch.randn(256, 8, requires_grad=True)
    targets = some_bytes(2, 13)
    ours = torch.autograd.grad(nats(hidden, weight, targets, 5).sum(), (hidden, weight))
    plain = F.cross_entropy(logits(hidden, weight).flatten(0, 1), targets.flatten(), reduction="sum")
    for our, true in zip(ours, torch.autograd.grad(plain, (hidden, weight))):
        torch.testing.assert_close(our, true)


def test_no_more_logits_than_a_chunk_are_there():
    """What is kept for the backward pass has nothing of size [n, 256]."""
    hidden, weight = torch.randn(1, 64, 8, requires_grad=True), torch.randn(256, 8, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (kept.append(x.numel()), x)[1], lambda x: x):
        nats(hidden, weight, some_bytes(1, 64), 8)
    assert max(kept) <= max(weight.numel(), hidden.numel())


def test_the_first_loss_is_that_of_a_uniform_guess():
    found = model(output=False).nats(some_bytes())
    assert torch.equal(found, torch.full_like(found, log(256)))


def test_loss_is_the_mean_of_nats():
    made = model()
    tokens = some_bytes()
    assert torch.equal(made.loss(tokens), made.nats(tokens).mean())
    expected = -made(tokens).log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    torch.testing.assert_close(made.nats(tokens), expected)
