"""Weights that are converted together, beside those converted one by one."""

import threading

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
    assert not casts._casts.by_weight
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

    class Failing(nn.Module):
        def forward(self, *_):
            assert casts._casts.by_weight
            raise ZeroDivisionError

    made.blocks[-1].ff = Failing()
    with pytest.raises(ZeroDivisionError):
        made.loss(some_bytes())
    assert not casts._casts.by_weight


def test_an_interrupt_leaves_nothing(monkeypatch):
    """Also one that comes when the weights have just been converted."""

    class Interrupted(dict):
        def update(self, other):
            super().update(other)
            raise KeyboardInterrupt

    monkeypatch.setattr(casts._casts, "by_weight", Interrupted())
    with pytest.raises(KeyboardInterrupt):
        half().loss(some_bytes())
    assert not casts._casts.by_weight


def change(module, *_):
    with torch.no_grad():
        module.ff.inner.weight.mul_(0.5)


def change_data(module, *_):
    module.ff.inner.weight.data = 0.5 * module.ff.inner.weight


@pytest.mark.parametrize("changes", [change, change_data])
def test_weights_that_a_hook_changes_during_the_pass(changes, monkeypatch):
    def result():
        made = half()
        made.blocks[1].register_forward_pre_hook(changes)
        return loss_and_gradients(made)

    found = result()
    monkeypatch.setattr(casts, "_weights", lambda *_: [])
    assert all(map(torch.equal, found, result()))


def test_what_is_converted():
    """Of layers as they were made, in blocks that keep everything."""

    class Doubled(nn.Module):
        def forward(self, weight):
            return 2 * weight

    made = half(layers=4, recompute="3*off + on")
    parametrize.register_parametrization(made.blocks[1].ff.inner, "weight", Doubled())
    made.blocks[2].compile(backend="eager")
    found = casts._weights(made.blocks, made.recomputed, torch.bfloat16)
    own = [x for name, x in made.named_parameters() if name.startswith("blocks.0.") and "norm" not in name]
    assert {id(x) for x in own} <= {id(x) for x in found}
    others = [*made.blocks[1].ff.inner.parameters(), *made.blocks[2].parameters(), *made.blocks[3].parameters()]
    assert not {id(x) for x in others} & {id(x) for x in found}


def test_the_layer_inside_an_adapter_converts_its_own():
    class Adapter(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.base_layer = layer

        def forward(self, x):
            return self.base_layer(x)

    made = half()
    made.blocks[1].ff.inner = Adapter(made.blocks[1].ff.inner)
    found = casts._weights(made.blocks, made.recomputed, torch.bfloat16)
    assert not {id(x) for x in made.blocks[1].ff.inner.parameters()} & {id(x) for x in found}


def compiled(made):
    for number, block in enumerate(made.blocks):
        made.blocks[number] = torch.compile(block, backend="eager")
    return made


@pytest.mark.parametrize(
    "made",
    [lambda: model(), lambda: half().bfloat16(), lambda: half().requires_grad_(False), lambda: compiled(half())],
    ids=["float32", "weights in half precision", "without gradients", "compiled blocks"],
)
def test_where_nothing_is_converted(made):
    """In the weights' own precision, without gradients, and where blocks convert them themselves."""
    made = made()
    gradients = any(x.requires_grad for x in made.parameters())
    with Ran() as ran, torch.set_grad_enabled(gradients):
        made.loss(some_bytes())
    assert "aten._foreach_copy_" not in ran.ops


def test_every_weight_has_memory_of_its_own():
    """On its own device, and no longer than what needs it."""
    made = half()
    made.blocks[1].to("meta")
    weights = [block.ff.inner.weight for block in made.blocks]
    with casts.cast_together(made.blocks, made.recomputed, torch.bfloat16, True):
        found = [casts.cast(x, torch.bfloat16) for x in weights]
        assert [x.device.type for x in found] == ["cpu", "meta", "cpu"]
        assert all(x.untyped_storage().nbytes() == x.nbytes for x in found)
        assert not set(weights) & set(casts._casts.by_weight)
        assert casts.cast(made.blocks[0].ff.outer.weight, torch.float16).dtype == torch.float16


def test_another_thread_converts_its_own():
    """It may use another stream."""
    made = half()
    seen = []
    with casts.cast_together(made.blocks, made.recomputed, torch.bfloat16, True):
        thread = threading.Thread(target=lambda: seen.append(dict(casts._casts.by_weight)))
        thread.start()
        thread.join()
        assert casts._casts.by_weight
    assert seen == [{}]
