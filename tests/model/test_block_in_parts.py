import pytest
import torch
from torch import nn
from torch.nn.utils.parametrize import register_parametrization

from longstride.model import block_in_parts
from longstride.model.host_inputs import HostInputs
from tests.model.small import model, some_bytes

KINDS = [
    {},
    {"dropout": 0.3},
    {"qk_ratio": 0.5, "pattern": "distinct(merged(fixed(4, 2)))"},
    {"norm": "rms", "qk_norm": True, "embedding": "rotary"},
]


def gradients(tokens, **changes):
    made = model(precision="float64", **changes).double()
    torch.manual_seed(7)
    loss = made.loss(tokens)
    loss.backward()
    return [loss.detach(), *(x.grad for x in made.parameters())]


@pytest.mark.parametrize("in_groups", [False, True])
@pytest.mark.parametrize("changes", KINDS, ids=str)
def test_loss_and_gradients_are_those_of_plain_autograd(changes, in_groups, monkeypatch):
    """Parts of five positions, the last one of four; with groups, one head at a time."""
    monkeypatch.setattr(block_in_parts, "BLOCK_PART_BYTES", 2 * 5 * 64 * 8)
    if in_groups:
        monkeypatch.setattr(block_in_parts, "GROUP_BYTES", 1)
    plain, again = (gradients(some_bytes(), recompute=how, **changes) for how in ("off", "parts"))
    torch.testing.assert_close(again, plain, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("other", ["host", "host + parts + host", "parts + 2*host"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_inputs_in_host_memory_change_no_bit(precision, other, monkeypatch):
    monkeypatch.setattr(block_in_parts, "BLOCK_PART_BYTES", 2 * 5 * 64 * 4)
    found = []
    for how in ("parts", other):
        made = model(precision=precision, dropout=0.3, recompute=how)
        for step in range(2):  # The second step uses the buffers of the first.
            torch.manual_seed(step)
            made.loss(some_bytes(seed=step)).backward()
        found.append([x.grad for x in made.parameters()])
    assert all(torch.equal(one, two) for one, two in zip(*found))
    assert [len(free) for free in made.host_memory.free.values()] == [made.config.recomputed.count("host")]


@pytest.mark.parametrize(
    ("how", "stays"), [("2*host + parts", False), ("parts + host + off", False), ("parts + 2*host", True)]
)
def test_only_the_input_of_the_last_block_stays_on_the_device(how, stays, monkeypatch):
    """Its backward pass follows at once."""
    made, stored = model(recompute=how), []
    store = HostInputs.store
    monkeypatch.setattr(HostInputs, "store", lambda self, h: stored.append(store(self, h)) or stored[-1])
    loss = made.loss(some_bytes())
    assert [one.on_device is not None for one in stored] == [False] * (len(stored) - 1) + [stays]
    loss.backward()


@pytest.mark.parametrize("other", ["parts + 2*again", "host + 2*again", "parts + host + again", "host + again + parts"])
@pytest.mark.parametrize("changes", KINDS, ids=str)
def test_segments_change_no_bit(changes, other):
    one, two = (gradients(some_bytes(), recompute=how, **changes) for how in ("parts", other))
    assert all(torch.equal(a, b) for a, b in zip(one, two))


def test_a_segment_keeps_one_input():
    made = model(layers=4, recompute="host + 3*again")
    made.loss(some_bytes()).backward()
    assert [len(free) for free in made.host_memory.free.values()] == [1]


def test_mixed_choices_agree_with_plain_autograd():
    plain, mixed = (
        gradients(some_bytes(), layers=6, recompute=how, dropout=0.2)
        for how in ("off", "off + parts + again + host + selective + host")
    )
    torch.testing.assert_close(mixed, plain, rtol=1e-9, atol=1e-12)


def test_a_gradient_that_shares_memory_is_not_overwritten():
    plain, again = (model(recompute=how) for how in ("off", "parts"))
    for made in (plain, again):
        made.hidden(some_bytes()).sum().backward()  # An expanded tensor.
    for one, two in zip(plain.blocks.parameters(), again.blocks.parameters()):
        torch.testing.assert_close(one.grad, two.grad)


def test_accumulation_over_two_losses():
    """Both forward passes come before the backward passes, and each has its own inputs."""
    found = []
    for how in ("parts", "host"):
        made = model(recompute=how)
        one, two = made.loss(some_bytes(seed=1)), made.loss(some_bytes(seed=2))
        one.backward()
        two.backward()
        found.append([x.grad for x in made.parameters()])
    assert all(torch.equal(one, two) for one, two in zip(*found))


def replica(module):
    """As nn.DataParallel makes it: its weights are copies, and no parameters."""
    made = module._replicate_for_data_parallel()
    for name, child in module.named_children():
        setattr(made, name, replica(child))
    for name, x in module.named_parameters(recurse=False):
        setattr(made, name, x.clone())
    return made


@pytest.mark.parametrize("choice", ["parts", "host", "parts + 2*again"])
@pytest.mark.parametrize("replaced", ["replica", "parametrization"])
def test_weights_that_are_no_parameters_are_refused(replaced, choice):
    """They got no gradients."""
    made = model(recompute=choice, qk_norm=True)
    if replaced == "replica":
        made.blocks[1] = replica(made.blocks[1])
    else:
        register_parametrization(made.blocks[1].attention, "query_scale", nn.Softplus())
    with pytest.raises(ValueError, match="a block's weight is none of its parameters"):
        made.loss(some_bytes())


def test_backward_twice_is_refused():
    loss = model(recompute="host").loss(some_bytes())
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="call backward\\(\\) once"):
        loss.backward()


@pytest.mark.parametrize(("heads", "size", "count"), [(16, 1, 1), (16, 3 * 2**30, 4), (6, 3 * 2**30, 3), (2, 2**40, 2)])
def test_groups_divide_the_heads(heads, size, count):
    assert block_in_parts.group_count(heads, size) == count


def test_weights_that_are_frozen_get_no_gradient():
    made = model(recompute="parts", layers=2, qk_norm=True, embedding="rotary")
    frozen = [x for name, x in made.named_parameters() if "query_scale" in name or name.startswith("blocks.0.ff")]
    for x in frozen:
        x.requires_grad_(False)
    made.loss(some_bytes()).backward()
    assert frozen
    assert all((x.grad is None) != x.requires_grad for x in made.parameters())


@pytest.mark.parametrize("recompute", ["parts", "host"])
def test_torch_compile_takes_the_network(recompute):
    torch._dynamo.reset()
    made, tokens = model(layers=2, recompute=recompute), some_bytes()
    assert torch.equal(torch.compile(made.loss, backend="eager")(tokens), made.loss(tokens))
