"""Weights that are converted together, beside those converted one by one."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from longstride.model import casts, residual
from tests.attention.error_rule import Ran
from tests.model.small import model, some_bytes

MODERN = {"norm": "rms", "qk_norm": True, "embedding": "rotary"}


@pytest.fixture(autouse=True)
def fused(monkeypatch):
    """The products of `residual.py`, as on a GPU."""
    monkeypatch.setattr(residual, "is_fused", lambda x: torch.is_grad_enabled())


def half(**changes):
    return model(precision="bfloat16", **changes)


def loss_and_gradients(made):
    made.zero_grad()
    torch.manual_seed(1)
    loss = made.loss(some_bytes())
    loss.backward()
    return [loss.detach(), *(x.grad for x in made.parameters())]


@pytest.mark.parametrize("changes", [{}, MODERN, {"dropout": 0.3}, {"recompute": "2*off + on"}], ids=str)
def test_the_bits_are_those_of_weights_converted_one_by_one(changes, monkeypatch):
    made = half(layers=3, **changes)
    with torch.no_grad():
        for x in made.parameters():
            x.normal_(0, 0.1)
    with Ran() as ran:
        together = loss_and_gradients(made)
    assert ran.ops.count("aten._foreach_copy_") == 1
    assert not casts._casts
    monkeypatch.setattr(casts, "_weights", lambda *_: [])
    with Ran() as alone:
        one_by_one = loss_and_gradients(made)
    assert "aten._foreach_copy_" not in alone.ops
    converted = 2 if "recompute" in changes else 3
    assert alone.ops.count("aten._to_copy") - ran.ops.count("aten._to_copy") >= 4 * converted
    assert all(map(torch.equal, together, one_by_one))


def test_each_pass_converts_anew():
    """A weight may have changed since the last, and an error may have ended it."""
    made = half()
    before = made.loss(some_bytes())
    with torch.no_grad():
        made.blocks[0].ff.inner.weight.add_(1)
        made.blocks[0].ff.outer.weight.add_(1)
    assert made.loss(some_bytes()) != before

    def fail(*_):
        assert casts._casts
        raise ZeroDivisionError

    made.blocks[-1].register_forward_pre_hook(fail)
    with pytest.raises(ZeroDivisionError):
        made.loss(some_bytes())
    assert not casts._casts


def test_what_is_converted():
    """Of layers as they were made, in blocks that keep everything."""

    class Doubled(nn.Module):
        def forward(self, weight):
            return 2 * weight

    made = half(layers=4, recompute="3*off + on")
    parametrize.register_parametrization(made.blocks[1].ff.inner, "weight", Doubled())
    made.blocks[2].compile(backend="eager")
    found = casts._weights(made.blocks, made.recomputed)
    own = [x for name, x in made.named_parameters() if name.startswith("blocks.0.") and "norm" not in name]
    assert {id(x) for x in own} <= {id(x) for x in found}
    others = [*made.blocks[1].ff.inner.parameters(), *made.blocks[2].parameters(), *made.blocks[3].parameters()]
    assert not {id(x) for x in others} & {id(x) for x in found}


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_where_nothing_is_converted(precision):
    """In the weights' own precision, and without gradients."""
    made = model(precision=precision)
    with Ran() as ran, torch.no_grad() if precision == "bfloat16" else torch.enable_grad():
        made.loss(some_bytes())
    assert "aten._foreach_copy_" not in ran.ops


def test_every_weight_begins_as_in_memory_of_its_own():
    made = half(width=24, heads=2)
    with casts.cast_together(made.blocks, made.recomputed, torch.bfloat16, True):
        found = [casts.cast(x, torch.bfloat16) for x in made.blocks[0].ff.parameters()]
        assert all(x.data_ptr() % 16 == 0 and x.is_contiguous() for x in found)
        assert casts.cast(made.blocks[0].ff.inner.weight, torch.float16).dtype == torch.float16
