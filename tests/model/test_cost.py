import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from longstride.model import PRESETS, SparseTransformer, preset
from longstride.model.cost import cost, kept_bytes, parameter_count, step_flops
from tests.model.small import config, model, some_bytes


@pytest.mark.parametrize("name", PRESETS)
def test_parameters(name):
    with torch.device("meta"):
        assert SparseTransformer(preset(name)).parameter_count() == parameter_count(preset(name))


@pytest.mark.parametrize("recompute", ["off", "on", "selective"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("pattern", ["interleave(strided(4))", "merged(fixed(4, 2))"])
def test_flops_are_those_that_pytorch_counts(pattern, dropout, recompute):
    made = model(pattern=pattern, recompute=recompute, qk_ratio=0.5, layers=2, dropout=dropout)
    with FlopCounterMode(display=False) as counter:
        made.loss(some_bytes(1)).backward()
    assert counter.get_total_flops() == step_flops(made.config)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_what_a_forward_pass_keeps(precision, dropout):
    """Reckoned and counted: every storage that autograd holds, once."""
    check_kept(model(layers=4, width=64, context=512, precision=precision, dropout=dropout, chunk=64), 0.15)


@pytest.mark.parametrize("changes", [{"embedding": "rotary"}, {"qk_norm": True}, {"embedding": "rotary", "qk_norm": True}])
def test_rotated_and_normalised_keys_are_kept_too(changes):
    check_kept(model(layers=4, width=64, context=512, chunk=64, **changes), 0.05)


def check_kept(made, tolerance):
    weights = {parameter.untyped_storage().data_ptr() for parameter in made.parameters()}
    held = {}

    def pack(x):
        if x.untyped_storage().data_ptr() not in weights:
            held[x.untyped_storage().data_ptr()] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        made.loss(some_bytes(1, 512))
    counted = sum(x.untyped_storage().nbytes() for x in held.values())
    assert kept_bytes(made.config) == pytest.approx(counted, rel=tolerance)


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
    assert cost(made.config, batch=8).memory == pytest.approx(peak, rel=0.2)
