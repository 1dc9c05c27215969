"""The interpreter of the tests has the bits of the one that Triton ships."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("kernels are compiled", allow_module_level=True)

import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

from longstride.patterns import Column, Local
from tests.attention.cases import tensors
from tests.attention.error_rule import results
from tests.attention.plans import tiles_of
from tests.interpreter import FAST, SHIPPED, install


def test_installed():
    assert InterpretedFunction.__call__ is FAST["__call__"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_the_same_bits(monkeypatch, dtype):
    found = []
    for what in (FAST, SHIPPED, FAST):
        with monkeypatch.context() as patch, tiles_of(16, 16):
            install(what, patch)
            found.append(results("triton", *tensors(1, 1, 40, 8, 8, dtype=dtype), Local(5) | Column(7)))
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


def test_numpy_types():
    scalars = [
        getattr(tl, name)
        for name in ("int1", "uint8", "int16", "int32", "uint32", "int64", "float16", "bfloat16", "float32")
    ]
    for scalar in (*scalars, tl.pointer_type(tl.float32)):
        for one in (scalar, tl.block_type(scalar, [4, 8])):
            assert FAST["_get_np_dtype"](one) == SHIPPED["_get_np_dtype"](one)


def test_the_checks_left_out_are_those_that_nobody_reads():
    """The interpreter compares sums of 32 bits with those of 64, and raises nothing unless it debugs."""
    shipped, fast = SHIPPED["options"], FAST["options"]
    assert shipped.sanitize_overflow
    assert not shipped.debug
    assert replace(fast, sanitize_overflow=True) == shipped
