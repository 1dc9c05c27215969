import pytest
import torch

from longstride.model import SparseTransformer
from longstride.training import OptimizerConfig
from longstride.training.muon import BatchedMuon
from longstride.training.optimizer import learning_rate, make_optimizers, rate_factors, set_learning_rate
from longstride.training.precision import Updates
from tests.training.small import MODEL

NAMES = ("adamw", "muon", "adafactor")


def groups(optimizers):
    return [group for one in optimizers for group in one.param_groups]


def test_the_learning_rates_way():
    config = OptimizerConfig(learning_rate=0.5, warmup=10)
    assert learning_rate(config, 0, 210) == 0.05  # Not 0: the first step counts.
    assert learning_rate(config, 4, 210) == 0.25
    assert learning_rate(config, 9, 210) == 0.5
    assert learning_rate(config, 10, 210) == 0.5
    assert learning_rate(config, 60, 210) == pytest.approx(0.5 * (1 + 0.5**0.5) / 2)
    assert learning_rate(config, 110, 210) == pytest.approx(0.25)
    assert learning_rate(config, 210, 210) == 0
    rates = [learning_rate(config, step, 210) for step in range(210)]
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert 0 < rates[-1] < 1e-4


def test_what_is_left_at_the_end():
    config = OptimizerConfig(learning_rate=0.5, warmup=10, final=0.2)
    assert learning_rate(config, 210, 210) == pytest.approx(0.1)
    assert learning_rate(config, 110, 210) == pytest.approx(0.3)
    constant = OptimizerConfig(learning_rate=0.5, warmup=0, final=1)
    assert {learning_rate(constant, step, 30) for step in range(30)} == {0.5}


def test_a_short_run_warms_up_for_a_tenth():
    config = OptimizerConfig(learning_rate=0.5, warmup=5000)
    assert [learning_rate(config, step, 20) for step in (0, 1, 2)] == [0.25, 0.5, 0.5]
    assert learning_rate(config, 0, 9) == 0.5
    assert learning_rate(config, 0, 1) == 0.5


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_is_in_one_place_and_learns(name):
    model = SparseTransformer(MODEL)
    optimizers = make_optimizers(model, OptimizerConfig(name, learning_rate=0.01))
    found = [id(x) for group in groups(optimizers) for x in group["params"]]
    assert sorted(found) == sorted(id(x) for x in model.parameters())
    before = {name: x.detach().clone() for name, x in model.named_parameters()}
    for x in model.parameters():
        x.grad = torch.randn_like(x)
    for one in optimizers:
        one.step()
    assert not [name for name, x in model.named_parameters() if torch.equal(x, before[name])]


@pytest.mark.parametrize("name", NAMES)
def test_only_matrices_decay(name):
    for group in groups(make_optimizers(SparseTransformer(MODEL), OptimizerConfig(name, decay=0.25))):
        assert group["params"]
        assert {x.ndim >= 2 for x in group["params"]} == {group["weight_decay"] == 0.25}
        assert group["weight_decay"] in (0, 0.25)


@pytest.mark.parametrize("name", NAMES)
def test_decay_is_decoupled(name):
    """Without a gradient a weight shrinks by the rate times the decay, and no more."""
    model = SparseTransformer(MODEL)
    optimizers = make_optimizers(model, OptimizerConfig(name, learning_rate=0.1, decay=0.5))
    before = {name: x.detach().clone() for name, x in model.named_parameters()}
    for x in model.parameters():
        x.grad = torch.zeros_like(x)
    for one in optimizers:
        one.step()
    for name, x in model.named_parameters():
        torch.testing.assert_close(x.detach(), before[name] * (0.95 if x.ndim >= 2 else 1))


def test_muon_takes_the_matrices_of_the_blocks():
    model = SparseTransformer(MODEL)
    adamw, muon = make_optimizers(model, OptimizerConfig("muon"))
    assert (type(adamw), type(muon)) == (torch.optim.AdamW, BatchedMuon)
    taken = {id(x) for group in muon.param_groups for x in group["params"]}
    names = {name for name, x in model.named_parameters() if id(x) in taken}
    assert names == {name for name, x in model.named_parameters() if x.ndim == 2 and name.startswith("blocks.")}
    assert len(names) >= 4 * MODEL.layers
    assert not [name for name in names if "embedding" in name or "output" in name]


def test_settings_arrive():
    (adamw,) = make_optimizers(SparseTransformer(MODEL), OptimizerConfig(learning_rate=0.5, beta1=0.25, beta2=0.75))
    assert [(group["lr"], group["betas"]) for group in adamw.param_groups] == [(0.5, (0.25, 0.75))] * 2


@pytest.mark.parametrize("name", NAMES)
def test_set_learning_rate(name):
    optimizers = make_optimizers(SparseTransformer(MODEL), OptimizerConfig(name))
    set_learning_rate(optimizers, 0.125)
    assert {group["lr"] for group in groups(optimizers)} == {0.125}


def test_a_flat_part_and_a_line():
    config = OptimizerConfig(learning_rate=0.5, warmup=10, schedule="linear", flat=0.4, final=0.1)
    rates = [learning_rate(config, step, 200) for step in range(201)]
    assert rates[:10] == pytest.approx([0.05 * step for step in range(1, 11)])
    assert rates[10:81] == pytest.approx([0.5] * 71)
    assert rates[110] == pytest.approx(0.5 * (0.1 + 0.9 * 0.75))
    assert rates[200] == pytest.approx(0.05)
    late = OptimizerConfig(learning_rate=0.5, flat=0.5)
    assert [learning_rate(late, step, 100) for step in (50, 75, 100)] == pytest.approx([0.5, 0.25, 0])


@pytest.mark.parametrize("name", NAMES)
def test_embeddings_may_have_a_rate_of_their_own(name):
    model = SparseTransformer(MODEL)
    optimizers = make_optimizers(model, OptimizerConfig(name, embedding_factor=2.5))
    set_learning_rate(optimizers, 0.5)
    rates = {id(x): group["lr"] for group in groups(optimizers) for x in group["params"]}
    for name, x in model.named_parameters():
        assert rates[id(x)] == (1.25 if name.startswith("embedding.") else 0.5), name
    assert rate_factors(optimizers) == {1.0, 2.5}


@pytest.mark.parametrize("name", NAMES)
def test_decay_of_the_blocks_only(name):
    model = SparseTransformer(MODEL)
    decays = {
        id(x): group["weight_decay"]
        for group in groups(make_optimizers(model, OptimizerConfig(name, decay=0.25, decayed="blocks")))
        for x in group["params"]
    }
    for name, x in model.named_parameters():
        assert decays[id(x)] == (0.25 if name.startswith("blocks.") and x.ndim == 2 else 0), name


def test_rates_on_the_device_are_filled_not_replaced():
    """A captured step reads the same tensors for ever."""
    model = SparseTransformer(MODEL)
    optimizers = make_optimizers(model, OptimizerConfig("muon", embedding_factor=2.5))
    updates = Updates(model, optimizers, "float32", 1.0, torch.device("cpu"), waits=False)
    updates.set_learning_rate(0.5)
    before = [group["lr"] for group in groups(optimizers)]
    updates.set_learning_rate(0.25)
    assert all(group["lr"] is rate for group, rate in zip(groups(optimizers), before, strict=True))
    assert {float(rate) for rate in before} == {0.25, 0.625}


def test_muon_splits_the_projections_to_queries_keys_and_values():
    model = SparseTransformer(MODEL)
    _, muon = make_optimizers(model, OptimizerConfig("muon", split_projections=True))
    split = {id(x): group["rows"] for group in muon.param_groups for x in group["params"] if "rows" in group}
    projections = [block.attention.query_key_value.weight for block in model.blocks]
    assert split == {id(x): block.attention.sizes for x, block in zip(projections, model.blocks, strict=True)}
    assert sum(len(group["params"]) for group in muon.param_groups) == 4 * len(model.blocks)
    _, joint = make_optimizers(model, OptimizerConfig("muon"))
    assert len(joint.param_groups) == 1
    assert "rows" not in joint.param_groups[0]
