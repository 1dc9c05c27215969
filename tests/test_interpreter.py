"""The interpreter of the tests has the bits of the one that Triton ships, and refuses addresses outside of tensors."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("kernels are compiled", allow_module_level=True)

import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError
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


@triton.jit
def copy(source, target, stride, n_in, n_out, size: tl.constexpr):
    place = tl.arange(0, size) * stride
    tl.store(target + place, tl.load(source + place, mask=tl.arange(0, size) < n_in, other=0.0), tl.arange(0, size) < n_out)


@pytest.mark.parametrize(
    ("n_in", "n_out", "message"), [(10, 10, None), (11, 10, "1 of 11 addresses"), (10, 13, "3 of 13 addresses")]
)
@pytest.mark.parametrize("stride", [1, 3])
def test_addresses_outside_of_a_view_are_refused(n_in, n_out, message, stride):
    """Although memory of the same storage follows."""
    source, target = torch.randn(2, 100).unbind()
    views = [x[5:][: 9 * stride + 1] for x in (source, target)]
    with pytest.raises(InterpreterError, match=message) if message else nullcontext():
        copy[(1,)](*views, stride, n_in, n_out, 16)
    if not message:
        assert torch.equal(views[0][::stride], views[1][::stride])


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
