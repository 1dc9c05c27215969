"""Scalars, tensors and pointers of kernels that `emulation.py` runs, and tensor descriptors. All numbers are float64."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

LAYOUT = SimpleNamespace(parent=None)
"""Layouts say which thread has which number, which changes no result."""


class Type(NamedTuple):
    """A dtype by its size. All numbers are float64."""

    primitive_bitwidth: int


HALF, SINGLE = Type(16), Type(32)


class Number(int):
    """A scalar of a kernel. Quotients round towards 0."""

    @property
    def value(self) -> "Number":
        """As of a constexpr."""
        return self

    def to(self, dtype: Any) -> "Number":
        return self


def _operator(name: str) -> Any:
    def apply(self: int, other: Any) -> Any:
        result = getattr(int, name)(int(self), int(other)) if isinstance(other, int) else NotImplemented
        return Number(result) if isinstance(result, int) else result

    return apply


for _name in ("add", "sub", "mul", "and", "or", "xor", "lshift", "rshift"):
    setattr(Number, f"__{_name}__", _operator(f"__{_name}__"))
    setattr(Number, f"__r{_name}__", _operator(f"__r{_name}__"))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(Number, f"__{_name}__", _operator(f"__{_name}__"))


def _quotient(x: int, y: Any) -> Any:
    return Number(abs(x) // abs(y) * (-1 if (x < 0) != (y < 0) else 1)) if isinstance(y, int) else NotImplemented


Number.__floordiv__ = _quotient  # type: ignore[method-assign,assignment]
Number.__rfloordiv__ = lambda self, other: _quotient(other, self)  # type: ignore[method-assign,assignment]
Number.__mod__ = lambda self, other: Number(int(self) - _quotient(self, other) * other)  # type: ignore[method-assign]
Number.__hash__ = int.__hash__  # type: ignore[method-assign]


class Values(Tensor):
    """A tensor of a kernel. It never changes: `x += y` makes a new one."""

    product: Any = None
    """The asynchronous product whose result this stands for."""

    @property
    def type(self) -> Any:
        return SimpleNamespace(layout=LAYOUT)

    def to(self, dtype: Any) -> "Values":
        return self

    def __iadd__(self, other: Any) -> Any:
        return self + other

    def __isub__(self, other: Any) -> Any:
        return self - other

    def __imul__(self, other: Any) -> Any:
        return self * other

    def __iand__(self, other: Any) -> Any:
        return self & other

    def __ior__(self, other: Any) -> Any:
        return self | other


def values(x: Tensor) -> Values:
    return x.as_subclass(Values)


class View(NamedTuple):
    """A tensor descriptor, and the block of a copy."""

    data: Tensor
    block_shape: Sequence[int]
    dtype: Type
    layout: Any = LAYOUT

    @property
    def block_type(self) -> Any:
        return SimpleNamespace(shape=self.block_shape)

    def box(self, place: Sequence[int]) -> tuple[Any, Any] | None:
        """The part of a block that is inside: where it lies in the tensor, and in the block."""
        there, here = [], []
        assert len(place) == self.data.dim()
        for start, count, size in zip(map(int, place), self.block_shape, self.data.shape):
            first, last = max(start, 0), min(start + count, size)
            if first >= last:
                return None
            there.append(slice(first, last))
            here.append(slice(first - start, last - start))
        return tuple(there), tuple(here)


_written: dict[int, Tensor] = {}
"""For each tensor that a launch writes to, how often it wrote each number."""


@contextmanager
def written_once() -> Iterator[None]:
    """Context in which no number may be written twice, as its value would depend on the order."""
    _written.clear()
    yield
    _written.clear()


def write(data: Tensor, place: Any, value: Tensor) -> None:
    counts = _written.setdefault(
        data.untyped_storage().data_ptr(),
        torch.zeros(data.untyped_storage().size() // data.element_size(), dtype=torch.int8),
    )
    own = counts.as_strided(data.shape, data.stride(), data.storage_offset())
    own[place] += 1
    assert (own[place] <= 1).all(), "a number is written twice in a launch"
    data[place] = value.to(data.dtype)


class Pointer(NamedTuple):
    """data: all that the tensor's memory holds."""

    data: Tensor
    offset: Any = 0

    def __add__(self, distance: Any) -> "Pointer":  # type: ignore[override]
        return Pointer(self.data, self.offset + distance)

    @property
    def dtype(self) -> Any:
        return SimpleNamespace(element_ty=None)

    def places(self, mask: Any) -> tuple[Tensor, Tensor]:
        """The mask, and where the numbers are that it has."""
        offset = torch.as_tensor(self.offset).as_subclass(Tensor)
        mask = torch.as_tensor(mask).as_subclass(Tensor).bool().expand(offset.shape)
        places = offset[mask]
        assert ((places >= 0) & (places < len(self.data))).all(), "an address outside of the tensor"
        return mask, places


def load(pointer: Pointer, mask: Any = True, other: Any = 0) -> Any:
    mask, places = pointer.places(mask)
    if not mask.dim():
        return Number(pointer.data[places]) if mask else Number(other)
    found = torch.full(mask.shape, float(other), dtype=torch.float64)
    found[mask] = pointer.data[places].double()
    return values(found)


def store(pointer: Pointer, value: Any, mask: Any = True) -> None:
    mask, places = pointer.places(mask)
    write(pointer.data, places, value.as_subclass(Tensor).expand(mask.shape)[mask])


def where(condition: Any, x: Any, y: Any) -> Any:
    if not any(isinstance(part, Tensor) for part in (condition, x, y)):
        return x if condition else y
    kind = (
        torch.float64
        if any(isinstance(part, float) or torch.is_floating_point(torch.as_tensor(part)) for part in (x, y))
        else torch.int64
    )
    parts = [part if isinstance(part, Tensor) else torch.tensor(part, dtype=kind) for part in (x, y)]
    return values(torch.where(torch.as_tensor(condition).bool(), *parts))


def larger(integers: Any, floats: Any) -> Any:
    def choose(x: Any, y: Any) -> Any:
        if isinstance(x, Tensor) or isinstance(y, Tensor):
            return values(floats(torch.as_tensor(x), torch.as_tensor(y)))
        return Number(integers(x, y))

    return choose
