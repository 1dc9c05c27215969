from contextlib import nullcontext

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from longstride.model import PRESETS, SparseTransformer, block_in_parts, feed_forward, preset, residual
from longstride.model.cost import cost, step_flops
from tests.model.small import config, model, some_bytes


@pytest.mark.parametrize("name", PRESETS)
def test_parameters(name):
    with torch.device("meta"):
        assert SparseTransformer(preset(name)).parameter_count() == preset(name).parameters


@pytest.mark.parametrize("recompute", ["off", "on", "selective"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("pattern", ["interleave(strided(4))", "merged(fixed(4, 2))"])
def test_flops_are_those_that_pytorch_counts(pattern, dropout, recompute):
    made = model(pattern=pattern, recompute=recompute, qk_ratio=0.5, layers=2, dropout=dropout)
    with FlopCounterMode(display=False) as counter:
        made.loss(some_bytes(1)).backward()
    assert counter.get_total_flops() == step_flops(made.config)


@pytest.mark.parametrize("recompute", ["off", "on", "parts"])
def test_flops_inside_operators_are_counted(recompute, monkeypatch):
    monkeypatch.setattr(residual, "is_fused", lambda x: torch.is_grad_enabled())
    monkeypatch.setattr(feed_forward, "is_fused", lambda *_: True)
    made = model(recompute=recompute, layers=2)
    with FlopCounterMode(display=False) as counter:
        made.loss(some_bytes(1)).backward()
    assert counter.get_total_flops() == step_flops(made.config)


@pytest.mark.parametrize("changes", [{}, {"embedding": "rotary", "qk_norm": True}], ids=str)
@pytest.mark.parametrize("in_groups", [False, True])
def test_flops_of_blocks_in_parts_are_those_that_pytorch_counts(in_groups, changes, monkeypatch):
    if in_groups:
        monkeypatch.setattr(block_in_parts, "GROUP_BYTES", 1)
    made = model(recompute="off + parts + host + on", layers=4, dropout=0.1, qk_ratio=0.5, **changes)
    counter = FlopCounterMode(display=False)
    counter.mod_tracker = NoModules()  # PyTorch's own cannot be used with autograd.grad inside a backward pass.
    with counter:
        made.loss(some_bytes(1)).backward()
    assert counter.get_total_flops() == step_flops(made.config)


class NoModules(nullcontext):
    parents = frozenset({"Global"})


def test_a_step_costs_more_in_every_way_with_more_of_it():
    small, large = cost(config()), cost(config(layers=6))
    assert small.parameters < large.parameters
    assert small.flops < large.flops
    assert small.memory < large.memory
    assert cost(config(), batch=2).flops == 2 * small.flops


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_step_of_enwik8_fits_into_six_gibibytes():
    """Eight sequences of 12,288 bytes, with the optimizer; and what was reckoned is about what it takes."""
    made = SparseTransformer(preset("enwik8")).cuda()
    optimizer = torch.optim.AdamW(made.parameters(), fused=True)
    tokens = torch.randint(256, (8, 12_288), device="cuda")
    for _ in range(2):
        made.loss(tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    peak = torch.cuda.max_memory_allocated()
    assert peak <= 6 * 2**30
    assert cost(made.config, batch=8).memory == pytest.approx(peak, rel=0.1)
