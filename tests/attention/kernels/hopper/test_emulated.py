"""All Hopper kernels, emulated on a CPU, beside the oracle."""

import pytest
import torch

pytest.importorskip("triton")

from longstride.attention.kernels.hopper import launch
from tests.attention.kernels.hopper.emulated_call import Call
from tests.attention.kernels.hopper.test_launch import CASES

ON_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="for a CPU")
LONGEST = 1100
INTERPRETED = "merged(strided(128))", "merged(strided(96))"
"""Patterns whose second pass Triton's interpreter would compute; one more is among the cases."""
WHOLE = [
    case for case in CASES if case[6] and case[7] and case[0] not in INTERPRETED and "backward_sum_parts" not in case[7]
]
"""Those that Hopper's kernels compute alone, however many programs there are."""
FURTHER = [  # Shorter forms of others, and one of each kind.
    ("merged(fixed(128, 32))", 1, 2, 500, 64, 64),
    ("merged(fixed(96, 8))", 1, 1, 403, 64, 128),
    ("local(62)", 1, 2, 400, 32, 32),
    ("local(126)", 1, 1, 300, 64, 64),
    ("block(100)", 2, 1, 350, 64, 64),
    ("column(10)", 1, 2, 503, 64, 128),
    ("merged(strided(16))", 1, 1, 503, 32, 32),
    ("block(300)", 1, 1, 700, 64, 64),
    ("merged(fixed(1024, 256))", 1, 1, 2100, 64, 64),
    ("column(4)", 1, 2, 1024, 64, 64),
    ("column(3)", 1, 2, 1026, 64, 64),
    ("local(300)", 1, 2, 700, 64, 64),
    ("local(257)", 1, 1, 600, 64, 64),
    ("column(9)", 1, 2, 1003, 32, 32),
    ("local(4)|column(4)", 1, 1, 800, 48, 48),
    ("local(2)|column(4)", 1, 2, 512, 64, 128),
]


def assert_right(call, late, programs=None):
    ours = call.run(call.inputs, programs, late)
    for name, our, true in zip(("output", "lse", "dq", "dk", "dv"), ours, call.expected()):
        torch.testing.assert_close(our, true, rtol=1e-6, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


@ON_CPU
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow if case[3] > LONGEST else ()) for case in WHOLE], ids=str
)
def test_agrees_with_the_oracle(case):
    text, batch, heads, n, d_qk, d_v, forward, backward = case
    call = Call(text, [[n]] * batch, heads, d_qk, d_v, apart=heads == 3)
    assert_right(call, late=True)
    assert call.kernels == forward + backward


@ON_CPU
@pytest.mark.parametrize("late", [False, True], ids=["eager", "late"])
@pytest.mark.parametrize("case", FURTHER, ids=str)
def test_shorter_sequences_agree_with_the_oracle(case, late):
    text, batch, heads, n, d_qk, d_v = case
    assert_right(Call(text, [[n]] * batch, heads, d_qk, d_v), late)


@ON_CPU
@pytest.mark.parametrize("late", [False, True], ids=["eager", "late"])
@pytest.mark.parametrize(("d_qk", "d_v"), [(64, 64), (64, 128)])
def test_items_that_share_the_queries_of_a_tile_of_cells(d_qk, d_v, late, monkeypatch):
    monkeypatch.setattr(launch, "LEAST_QUERIES", 128)
    call = Call("merged(fixed(128, 8))", [[1000]], 1, d_qk, d_v)
    assert_right(call, late)
    assert call.kernels.count("backward_sum_parts") == 2


@ON_CPU
@pytest.mark.parametrize("programs", [1, 3, 40])
@pytest.mark.parametrize("text", ["merged(fixed(128, 32))", "block(300)", "local(300)", "column(10)", "merged(strided(16))"])
def test_any_number_of_programs(text, programs):
    """One takes all items; with 40 some have none."""
    assert_right(Call(text, [[600]], 2, 64, 64), late=True, programs=programs)
