"""BatchedMuon does what torch.optim.Muon does, for matrices of one shape together."""

import pytest
import torch
from torch import nn
from torch.optim import Muon

from longstride.training import muon
from longstride.training.muon import BatchedMuon, orthogonalize

SHAPES = [(8, 24), (24, 8), (8, 24), (16, 16), (24, 8), (8, 24)]


def parameters(shapes=SHAPES):
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def set_gradients(some, step):
    for number, x in enumerate(some):
        x.grad = torch.randn(x.shape, generator=torch.Generator().manual_seed(100 * step + number))


@pytest.mark.parametrize(
    "options", [{}, {"nesterov": False}, {"adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.3}], ids=str
)
@pytest.mark.parametrize("largest", [2**26, 2 * 8 * 24, 1])
def test_the_same_numbers_to_rounding(options, largest, monkeypatch):
    monkeypatch.setattr(muon, "LARGEST_STACK", largest)
    ours, theirs = parameters(), parameters()
    batched, plain = BatchedMuon(ours, lr=0.02, **options), Muon(theirs, lr=0.02, **options)
    for step in range(5):
        set_gradients(ours, step)
        set_gradients(theirs, step)
        ours[3].grad = theirs[3].grad = None if step == 2 else ours[3].grad
        batched.step_in_stacks()
        plain.step()
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b, rtol=0, atol=0.02 * 5 * 0.02)
    for a, b in zip(batched.state_dict()["state"].values(), plain.state_dict()["state"].values(), strict=True):
        assert a.keys() == b.keys()
        torch.testing.assert_close(a["momentum_buffer"], b["momentum_buffer"])


@pytest.mark.parametrize("rows", [(8, 8, 8), (4, 4, 16)], ids=str)
def test_a_matrix_of_several_is_updated_like_those(rows):
    options = {"lr": 0.02, "weight_decay": 0.3, "adjust_lr_fn": "match_rms_adamw"}
    (joined, other), (_, same) = parameters([(24, 8), (8, 24)]), parameters([(24, 8), (8, 24)])
    apart = [nn.Parameter(part.clone()) for part in joined.detach().split(rows)]
    optimizer = BatchedMuon([{"params": [joined], "rows": rows}, {"params": [other]}], **options)
    plain = Muon([*apart, same], **options)
    for step in range(3):
        set_gradients([joined, other], step)
        for x, gradient in zip([*apart, same], [*joined.grad.split(rows), other.grad], strict=True):
            x.grad = gradient.clone()
        optimizer.step()
        plain.step()
    torch.testing.assert_close(joined, torch.cat(apart), rtol=0, atol=0.02 * 3 * 0.02)
    torch.testing.assert_close(other, same, rtol=0, atol=0.02 * 3 * 0.02)


def test_states_go_from_one_to_the_other():
    ours, theirs = parameters(), parameters()
    batched, plain = BatchedMuon(ours, lr=0.02), Muon(theirs, lr=0.02)
    set_gradients(theirs, 0)
    plain.step()
    batched.load_state_dict(plain.state_dict())
    for a, b in zip(batched.state_dict()["state"].values(), plain.state_dict()["state"].values(), strict=True):
        assert torch.equal(a["momentum_buffer"], b["momentum_buffer"])


def test_matrices_become_orthogonal():
    stack = torch.randn(3, 8, 20, generator=torch.Generator().manual_seed(0)).bfloat16()
    for x in (stack, stack.mT):
        values = torch.linalg.svdvals(orthogonalize(x, (3.4445, -4.775, 2.0315), 5, 1e-7).float())
        assert values.min() > 0.5
        assert values.max() < 1.5
    one_by_one = torch.cat([orthogonalize(x[None], (3.4445, -4.775, 2.0315), 5, 1e-7) for x in stack])
    torch.testing.assert_close(orthogonalize(stack, (3.4445, -4.775, 2.0315), 5, 1e-7), one_by_one, rtol=0.02, atol=0.02)


def test_on_a_cpu_pytorchs_own_loop_runs(monkeypatch):
    monkeypatch.setattr(BatchedMuon, "step_in_stacks", None)
    ours, theirs = parameters(), parameters()
    for some, kind in ((ours, BatchedMuon), (theirs, Muon)):
        set_gradients(some, 0)
        kind(some, lr=0.02).step()
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs))
