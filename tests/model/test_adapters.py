"""Adapters in the place of layers, and hooks of layers: heeded or refused, never lost."""

import re

import pytest
import torch
from torch.nn.utils import parametrize

from longstride.model import residual
from longstride.model.layers import Linear
from longstride.sampling.decoder import Decoder
from tests.model.small import model, some_bytes

PLACES = ("attention.query_key_value", "attention.project", "ff.inner", "ff.outer")


class Adapter(torch.nn.Module):
    """A frozen layer and a product of two small matrices, as in LoRA."""

    def __init__(self, layer: Linear) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        out, width = layer.weight.shape
        self.a = torch.nn.Parameter(torch.randn(2, width, dtype=layer.weight.dtype))
        self.b = torch.nn.Parameter(torch.randn(out, 2, dtype=layer.weight.dtype))

    def forward(self, x):
        return self.layer(x) + x @ self.a.T @ self.b.T

    @property
    def weight(self):
        return self.layer.weight

    def merged(self):
        merged = Linear(self.a.shape[1], len(self.b), bias=self.layer.bias is not None).to(self.weight.dtype)
        merged.load_state_dict({**self.layer.state_dict(), "weight": (self.weight + self.b @ self.a).detach()})
        return merged


class Doubled(torch.nn.Module):
    def forward(self, weight):
        return 2 * weight


@pytest.fixture(params=[False, True], ids=["plain", "fused"])
def fused(request, monkeypatch):
    """Whether models take the fused functions, as on a GPU; the operators compute them in plain PyTorch here."""
    monkeypatch.setattr(residual, "is_fused", lambda x: request.param and torch.is_grad_enabled())


def double_model(**changes):
    return model(layers=2, precision="float64", **changes).double()


def adapted(place, **changes):
    """A network with an adapter in one place, and the same network with merged weights."""
    owner, _, name = place.rpartition(".")
    pair = double_model(**changes), double_model(**changes)
    pair[1].load_state_dict(pair[0].state_dict())
    adapter = Adapter(pair[0].get_submodule(f"blocks.1.{place}"))
    setattr(pair[0].get_submodule(f"blocks.1.{owner}"), name, adapter)
    setattr(pair[1].get_submodule(f"blocks.1.{owner}"), name, adapter.merged())
    return *pair, adapter


@pytest.mark.parametrize("changes", [{}, {"norm": "rms"}, {"recompute": "on"}], ids=str)
@pytest.mark.parametrize("place", PLACES)
def test_an_adapter_is_called(place, changes, fused):
    made, merged, adapter = adapted(place, **changes)
    loss, expected = made.loss(some_bytes()), merged.loss(some_bytes())
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    d_weight = merged.get_submodule(f"blocks.1.{place}").weight.grad
    torch.testing.assert_close(adapter.a.grad, adapter.b.detach().T @ d_weight)
    torch.testing.assert_close(adapter.b.grad, d_weight @ adapter.a.detach().T)
    with torch.no_grad():
        torch.testing.assert_close(made.loss(some_bytes()), expected.detach())


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("place", [*PLACES, "norm_attention", "norm_ff"])
def test_hooks_of_layers_run(place, norm, fused):
    made, seen = double_model(norm=norm), []
    made.get_submodule(f"blocks.1.{place}").register_forward_hook(lambda layer, inputs, output: seen.append(0) or 2 * output)
    before = double_model(norm=norm)
    before.load_state_dict(made.state_dict())
    assert made.loss(some_bytes()) != before.loss(some_bytes())
    assert len(seen) == 1


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("place", [*PLACES, "norm_attention", "norm_ff", "ff", "attention"])
def test_a_forward_that_an_instance_has_of_its_own_is_called(place, norm, fused):
    """As some adapters, and accelerate, replace it."""
    made, seen = double_model(norm=norm), []
    expected = made.loss(some_bytes())
    layer = made.get_submodule(f"blocks.1.{place}")
    forward = layer.forward
    layer.forward = lambda *arguments: seen.append(0) or forward(*arguments)
    torch.testing.assert_close(made.loss(some_bytes()), expected)
    assert len(seen) == 1
    with pytest.raises(ValueError, match=rf"^sample: blocks\.1\.{place} has hooks or a forward of its own"):
        Decoder(made)


@pytest.mark.parametrize("place", PLACES)
def test_a_parametrized_layer_has_its_gradient(place, fused):
    made = double_model()
    layer = made.get_submodule(f"blocks.1.{place}")
    parametrize.register_parametrization(layer, "weight", Doubled())
    made.loss(some_bytes()).backward()
    assert layer.parametrizations.weight.original.grad.any()


@pytest.mark.parametrize("place", PLACES)
def test_what_reads_the_weights_alone_refuses_adapters(place):
    made, _, _ = adapted(place, recompute="parts")
    with pytest.raises(ValueError, match=rf'^recompute in parts: {place} is of type Adapter, .*give recompute="on"'):
        made.loss(some_bytes())
    with pytest.raises(ValueError, match=rf"^sample: blocks.1.{place} is of type Adapter, .*merge"):
        Decoder(made)


def test_what_reads_the_weights_alone_refuses_hooks():
    made = model(layers=2, recompute="parts")
    made.blocks[1].attention.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match=r"^recompute in parts: attention has hooks"):
        made.loss(some_bytes())
    with pytest.raises(ValueError, match=r"^sample: blocks\.1\.attention has hooks"):
        Decoder(made)


@pytest.mark.parametrize("place", ["blocks.1.ff", "blocks.0.attention", "blocks.1"])
def test_another_class_in_the_place_of_a_part_is_refused_where_it_would_not_run(place):
    made = double_model()
    part = made.get_submodule(place)
    part.__class__ = type("Other", (type(part),), {"__module__": __name__})
    with pytest.raises(ValueError, match=rf"^sample: {re.escape(place)} is of type Other, not a part of the network itself"):
        Decoder(made)


def test_another_table_of_embeddings_is_refused_where_it_would_not_run():
    made = double_model()
    made.embedding.token = type("Other", (torch.nn.Embedding,), {"__module__": __name__})(256, 16)
    with pytest.raises(ValueError, match=r"^sample: embedding\.token is of type Other, not a part of the network itself"):
        Decoder(made)


@pytest.mark.parametrize("place", ["ff", "attention"])
def test_another_class_is_refused_by_recomputation_in_parts(place):
    made = double_model(recompute="parts")
    part = made.get_submodule(f"blocks.1.{place}")
    part.__class__ = type("Other", (type(part),), {"__module__": __name__})
    with pytest.raises(ValueError, match=f"^recompute in parts: {place} is of type Other"):
        made.loss(some_bytes())
