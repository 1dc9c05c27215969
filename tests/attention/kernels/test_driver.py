"""What is handed to the CUDA driver, looked at by one that stands in for it."""

import ctypes
import struct
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from longstride.attention.kernels import driver
from longstride.attention.kernels.driver import DriverLaunch, UnsupportedError
from longstride.attention.kernels.launch import Descriptor, Launch, TensorIndex

VIEW = Descriptor(TensorIndex(1), 5, (2, 40, 16), (640, 16, 1), (1, 8, 16))
SIGNATURE = {
    "q": "*bf16", "box": "tensordesc<bf16[1,8,16]>", "table": "*i32", "heads": "i32", "one": "constexpr",
    "pair": ("i64", ("fp32", "*fp32")), "ROWS": "constexpr",
}  # fmt: skip
SIZES = [8, 128, 4, 4, 4, 8, 8, 8, 8, 4, 8, 4, 8, 8, 8]
"""q; the tensor map, its shape and strides; table; heads; the pair; two scratch buffers."""


class Driver:
    """Keeps what it is given. A tensor map is the address that it begins with here."""

    def __init__(self, sizes):
        self.layout, end = [], 0
        for size in sizes:
            aligned = -(-end // min(size, 64)) * min(size, 64)
            self.layout.append((aligned, size))
            end = aligned + size
        self.launched, self.codes, self.encoded = [], [], []

    def cuFuncGetParamInfo(self, function, index, offset, size):  # noqa: N802
        if index >= len(self.layout):
            return 1
        for place, value in zip((offset, size), self.layout[index]):
            ctypes.c_size_t.from_address(place).value = value
        return 0

    def cuTensorMapEncodeTiled(self, place, kind, rank, address, shape, strides, block, ones, *rest):  # noqa: N802
        assert place % 64 == 0

        def read(kind, where, count):
            return list((kind * count).from_address(where))

        self.encoded.append(
            (kind, read(ctypes.c_uint64, shape, rank), read(ctypes.c_uint64, strides, rank - 1),
             read(ctypes.c_uint32, block, rank), rest)
        )  # fmt: skip
        return self.cuTensorMapReplaceAddress(place, address)

    def cuTensorMapReplaceAddress(self, place, address):  # noqa: N802
        ctypes.c_uint64.from_address(place).value = address
        return 0

    def cuLaunchKernel(self, function, *rest):  # noqa: N802
        *grid, stream, nothing, extra = rest
        tag, buffer, other_tag, size, end = (ctypes.c_uint64 * 5).from_address(extra)
        assert (tag, other_tag, end, nothing) == (1, 2, 0, None)
        data = ctypes.string_at(buffer, ctypes.c_size_t.from_address(size).value)
        values = [data[offset : offset + length] for offset, length in self.layout]
        self.launched.append((function, grid, stream, values))
        return self.codes.pop() if self.codes else 0

    def cuGetErrorString(self, code, text):  # noqa: N802
        text._obj.value = b"the driver's words"
        return 0


def kernel(signature=SIGNATURE, **changes):
    metadata = {
        "num_ctas": 1, "global_scratch_size": 0, "profile_scratch_size": 0, "num_warps": 8, "shared": 1000,
        "tensordesc_meta": [{"block_size": [1, 8, 16], "swizzle": 2}], **changes,
    }  # fmt: skip
    return SimpleNamespace(metadata=SimpleNamespace(**metadata), src=SimpleNamespace(signature=signature), function=77)


@pytest.fixture
def use(monkeypatch):
    def install(sizes=SIZES):
        found = Driver(sizes)
        monkeypatch.setattr(driver, "cuda", lambda: found)
        return found

    return install


def make(table=None, **changes):
    tensors = [torch.zeros(4).bfloat16(), torch.zeros(2, 40, 16).bfloat16(), torch.zeros(4)]
    table = torch.zeros(3, dtype=torch.int32) if table is None else table
    arguments = TensorIndex(0), VIEW, table, 12, 1, (2**40, (0.5, TensorIndex(2)))
    return DriverLaunch(kernel(**changes), 33, arguments, tensors), tensors, table


def words(values):
    return [struct.unpack({4: "i", 8: "q"}[len(value)], value)[0] for value in values if len(value) < 128]


def test_the_buffer_holds_every_parameter(use):
    found = use()
    launch, tensors, table = make()
    launch([x.data_ptr() for x in tensors], 99)
    ((function, grid, stream, values),) = found.launched
    assert (function, grid, stream) == (77, [33, 1, 1, 256, 1, 1, 1000], 99)
    address = tensors[1].data_ptr() + 5 * 2
    assert struct.unpack("q", values[1][:8])[0] == address
    half = struct.unpack("i", struct.pack("f", 0.5))[0]
    expected = [tensors[0].data_ptr(), 2, 40, 16, 640, 16, 1, table.data_ptr(), 12, 2**40, half, tensors[2].data_ptr(), 0, 0]
    assert words(values) == expected
    assert found.encoded == [(9, [16, 40, 2], [32, 1280], [16, 8, 1], (0, 2, 2, 0))]


def test_addresses_change_and_nothing_else(use):
    found = use()
    launch, _, _ = make()
    launch([1, 2, 3], 0)
    launch([16, 32, 48], 5)
    (*_, before), (*_, after) = found.launched
    assert words(before)[1:-3] == words(after)[1:-3]
    assert (words(after)[0], words(after)[-3]) == (16, 48)
    assert struct.unpack("q", after[1][:8])[0] == 32 + 10
    assert len(found.encoded) == 1


@pytest.mark.parametrize(
    ("sizes", "changes"),
    [
        ([*SIZES, 8], {}),
        (SIZES[:-1], {}),
        ([4, *SIZES[1:]], {}),
        (SIZES, {"tensordesc_meta": None}),
        (SIZES, {"num_ctas": 2}),
        (SIZES, {"global_scratch_size": 16}),
        (SIZES, {"launch_pdl": True}),
        (SIZES, {"signature": {**SIGNATURE, "heads": "fp64"}}),
    ],
)
def test_what_is_not_as_expected_is_left_to_triton(use, sizes, changes):
    use(sizes)
    with pytest.raises(UnsupportedError):
        make(**changes)


def test_a_failed_launch_raises(use):
    found = use()
    launch, _, _ = make()
    found.codes = [700]
    with pytest.raises(RuntimeError, match="CUDA error 700, the driver's words"):
        launch([1, 2, 3], 0)


def test_a_launch_knows_its_tensors_by_identity():
    q, k, table = torch.zeros(3, 4).unbind()
    bound = Launch(None, 1, (q, Descriptor(k, 0, (4,), (1,), (4,)), table, 7), {}).bound([q, k])
    assert bound.arguments == (TensorIndex(0), Descriptor(TensorIndex(1), 0, (4,), (1,), (4,)), table, 7)


def test_captures_are_relaxed_and_then_as_before(use):
    found, modes = use(), []

    def exchange(mode):
        modes.append(mode._obj.value)
        mode._obj.value = 0 if len(modes) == 1 else mode._obj.value

    found.cuThreadExchangeStreamCaptureMode = exchange
    with driver.relaxed_capture():
        assert modes == [driver.RELAXED]
    assert modes == [driver.RELAXED, 0]


def test_without_nvidias_driver_a_capture_is_left_alone(monkeypatch):
    def missing():
        raise UnsupportedError("no library")

    monkeypatch.setattr(driver, "cuda", missing)
    with driver.relaxed_capture():
        pass


class Matrix(NamedTuple):
    data: Any
    row: int


def test_a_launch_finds_tensors_in_named_tuples():
    """Through Triton it passes the same NamedTuples, with the tensors of the run."""
    q, k, table = torch.zeros(3, 4).unbind()
    given = []
    kernel = {(1,): lambda *arguments, **constants: given.extend([*arguments, constants])}
    constants = {"DIMS": Matrix(8, 16)}
    bound = Launch(kernel, 1, (Matrix(k, 7), Matrix(Matrix(q, 1), 2), Matrix(table, 3)), constants).bound([q, k])
    assert bound.arguments == (Matrix(TensorIndex(1), 7), Matrix(Matrix(TensorIndex(0), 1), 2), Matrix(table, 3))
    other = torch.ones(2, 4)
    bound.through_triton(list(other))
    assert [type(x) for x in given] == [Matrix, Matrix, Matrix, dict]
    assert [given[0].data.data_ptr(), given[1].data.data.data_ptr()] == [other[1].data_ptr(), other[0].data_ptr()]
    assert (given[2].data is table, given[3]) == (True, constants)
