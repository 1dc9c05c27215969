"""Dropout masks follow from their seed, on a CPU and in the kernel."""

import pytest
import torch

from longstride.model.dropout import draw_mask, draw_seeds
from longstride.model.dropout_kernel import COUNTERS, fill_mask
from tests.model.small import model, some_bytes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def by_kernel(size, keep, seed, device=DEVICE):
    """The kernel's mask; without a GPU in Triton's interpreter."""
    guarded = torch.ones(size + 7, dtype=torch.uint8, device=device)
    mask = guarded[:size].view(torch.bool)
    fill_mask(mask, torch.tensor(seed, device=device), keep)
    assert (guarded[size:] == 1).all()
    return mask.cpu()


def by_operator(size, keep, seed):
    return draw_mask(torch.empty(size), 1 - keep, torch.tensor(seed))


@pytest.mark.parametrize("draw", [by_kernel, by_operator])
def test_a_seed_gives_one_mask(draw):
    size, seed = 4 * COUNTERS * 3 + 5, 2**62 + 12_345
    mask = draw(size, 0.6, seed)
    assert torch.equal(mask, draw(size, 0.6, seed))
    for other in (seed + 1, seed - 2**20, 0):
        assert (mask != draw(size, 0.6, other)).float().mean() == pytest.approx(0.48, abs=0.03)


@pytest.mark.parametrize("draw", [by_kernel, by_operator])
@pytest.mark.parametrize("keep", [0.6, 0.99])
def test_the_share_that_is_kept(draw, keep):
    """Of all, and of every part: no part repeats another."""
    mask = draw(4 * COUNTERS * 16, keep, 7).float()
    assert mask.mean() == pytest.approx(keep, abs=5 * (keep * (1 - keep) / len(mask)) ** 0.5)
    parts = mask.view(-1, COUNTERS)
    assert len(parts.unique(dim=0)) == len(parts)


def test_seeds_differ_by_block_and_by_call():
    seeds = torch.stack([draw_seeds(30, torch.device("cpu")) for _ in range(2)])
    assert len(seeds.unique()) == seeds.numel()
    torch.manual_seed(3)
    first = draw_seeds(4, torch.device("cpu"))
    torch.manual_seed(3)
    assert torch.equal(first, draw_seeds(4, torch.device("cpu")))


def test_a_compiled_block_drops_the_same():
    losses = []
    for compiled in (False, True):
        made = model(dropout=0.5, layers=1, recompute="on")
        if compiled:
            made.blocks[0].compile(backend="aot_eager")
        torch.manual_seed(4)
        loss = made.loss(some_bytes())
        loss.backward()
        losses.append([loss.detach(), made.blocks[0].ff.inner.weight.grad])
    for eager, graph in zip(*losses):
        torch.testing.assert_close(graph, eager)
