"""All contenders are measured on one job, so they must give one result."""

import shutil

import pytest
import torch

from longstride import attend
from longstride.commands.bench import peers
from longstride.patterns import Block, Column, Dense, Local, strided, union

CPU = torch.device("cpu")


def inputs(n=256):
    return [torch.randn(1, 2, n, 16) for _ in range(3)]


@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="FlexAttention compiles C++")
def test_flex_attention_computes_the_same_pattern():
    pattern = union(*strided(16))
    q, k, v = inputs()
    torch.testing.assert_close(peers.flex(pattern, 256, CPU)(q, k, v), attend(q, k, v, pattern))


def test_dense_is_dense():
    q, k, v = inputs()
    torch.testing.assert_close(peers.dense(CPU)["SDPA dense"](q, k, v), attend(q, k, v, Dense()))


@pytest.mark.parametrize("pattern", [Column(16), Block(32)], ids=repr)
def test_a_view_computes_the_same_pattern(pattern):
    q, k, v = inputs()
    view = peers.on_a_view(pattern, 256)
    assert view is not None
    torch.testing.assert_close(view(q, k, v), attend(q, k, v, pattern))


def test_there_is_no_view_for_others():
    for pattern, n in ((Local(4), 256), (Dense(), 256), (Column(16), 250), (Block(32), 250)):
        assert peers.on_a_view(pattern, n) is None
