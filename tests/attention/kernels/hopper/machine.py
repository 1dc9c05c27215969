"""A multiprocessor for `emulation.py`: shared memory, mbarriers, TMA copies, asynchronous products and warpgroups.

Whatever runs beside a program may take effect at once or as late as it can, so a run is EAGER or LATE. LATE: a copy arrives
when nobody can go on without it, and its tile is NaN until then; a copy back, and a product, read shared memory when they
are waited for, and a product's result is NaN before. So a tile that is read or reused too early shows in one of the two.
Asserted as well: fences before copies and products that read what was stored, waits that end, all waited for at the end.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.attention.kernels.hopper.values import LAYOUT, Type, Values, View, values, write
from tests.turns import Turns


class Memory(NamedTuple):
    """A part of shared memory. unfenced: what has been stored to since the last fence."""

    data: Tensor
    unfenced: Tensor
    dtype: Type
    machine: "Machine"
    layout: Any = LAYOUT

    @property
    def shape(self) -> Any:
        return self.data.shape

    def part(self, change: Callable[[Tensor], Tensor]) -> "Memory":
        return self._replace(data=change(self.data), unfenced=change(self.unfenced))

    def index(self, place: int) -> "Memory":  # type: ignore[override]
        assert 0 <= place < len(self.data)
        return self.part(lambda x: x[int(place)])

    def slice(self, start: int, count: int) -> "Memory":
        assert 0 <= start <= start + count <= len(self.data)
        return self.part(lambda x: x.narrow(0, int(start), int(count)))

    def permute(self, order: Sequence[int]) -> "Memory":
        return self.part(lambda x: x.permute(order))

    def _reinterpret(self, dtype: Type, shape: Sequence[int], layout: Any) -> "Memory":
        assert dtype == self.dtype
        return self.part(lambda x: x.view(tuple(shape)))

    def load(self, layout: Any) -> Values:
        return values(self.data.clone())

    def store(self, value: Tensor) -> None:
        assert value.shape == self.data.shape
        self.data.copy_(value)
        self.unfenced.fill_(True)
        self.machine.group.stored.append(self.unfenced)

    def read(self) -> Tensor:
        """For a copy or product, which read by another way than stores write."""
        assert not self.unfenced.any(), "no fence between a store and a copy or product that reads it"
        return self.data


class Barrier:
    """An mbarrier: a phase is over when all have arrived and all bytes that they announced are there."""

    def __init__(self, count: int) -> None:
        self.count, self.arrived, self.bytes, self.phases = int(count), 0, 0, 0

    def change(self, arrivals: int, size: int) -> None:
        self.arrived += arrivals
        self.bytes += size
        assert self.arrived <= self.count, "more arrivals than the barrier counts"
        assert self.arrived or self.bytes >= 0
        if self.arrived == self.count and not self.bytes:
            self.phases += 1
            self.arrived = 0

    def is_over(self, phase: int) -> bool:
        return self.phases % 2 != phase


class Product:
    """An asynchronous product."""

    def __init__(self, left: Any, right: Any, total: Any, use_acc: bool) -> None:
        self.operands, self.total, self.use_acc = (left, right), total, use_acc
        self.result: Values | None = None

    def compute(self) -> Values:
        if self.result is None:
            left, right = (x.read() if isinstance(x, Memory) else x.as_subclass(Tensor) for x in self.operands)
            self.result = values(left @ right)
            if self.use_acc:
                self.result = self.result + resolved(self.total)
        return self.result


def resolved(x: Any) -> Any:
    """The result of a product that is complete, for what stands for it."""
    product = getattr(x, "product", None)
    return x if product is None or product.result is None else product.result


class Group:
    """A warpgroup, or the producer warp: what it has started."""

    def __init__(self) -> None:
        self.products: deque[Product] = deque()
        self.copies_back: deque[Callable[[], None]] = deque()
        self.stored: list[Tensor] = []
        self.awaits: Barrier | None = None


class Machine:
    """What a program runs on."""

    def __init__(self, late: bool, seed: int = 0) -> None:
        self.late = late
        self.turns = Turns(seed, self._deliver)
        self.groups = [Group()]
        self.barriers: dict[int, Barrier] = {}
        self.copies: list[tuple[Barrier, Callable[[], None]]] = []
        """LATE: those that have not arrived, in the order of their start."""
        self.writes: list[Callable[[], None]] = []
        """Copies back, which no later copy of the program may rely on."""

    @property
    def group(self) -> Group:
        """The one that runs."""
        return self.groups[self.turns.now]

    # Memory

    def allocate(self, dtype: Type, shape: Sequence[int], layout: Any) -> Memory:
        shape = tuple(map(int, shape))
        return Memory(torch.full(shape, torch.nan, dtype=torch.float64), torch.zeros(shape, dtype=torch.bool), dtype, self)

    def fence(self) -> None:
        for part in self.group.stored:
            part.fill_(False)
        self.group.stored.clear()

    # mbarriers

    def init(self, barrier: Memory, count: int) -> None:
        self.barriers[barrier.data.data_ptr()] = Barrier(count)

    def _barrier(self, barrier: Memory) -> Barrier:
        return self.barriers[barrier.data.data_ptr()]

    def expect(self, barrier: Memory, size: int, pred: Any = True) -> None:
        if pred:
            one = self._barrier(barrier)
            one.bytes += int(size)
            one.change(1, 0)

    def arrive(self, barrier: Memory, count: int = 1, pred: Any = True) -> None:
        if pred:
            self._barrier(barrier).change(count, 0)
            if self.late:  # Others may go on at once.
                self.turns.give_way()

    def wait(self, barrier: Memory, phase: int) -> None:
        one, group = self._barrier(barrier), self.group
        group.awaits = one
        self.turns.wait(lambda: one.is_over(int(phase)))
        group.awaits = None

    # TMA

    def copy_in(self, view: View, place: Sequence[int], barrier: Memory, target: Memory, pred: Any = True) -> None:
        if not pred:
            return
        assert tuple(target.shape) == tuple(view.block_shape)
        one, box, block = self._barrier(barrier), view.box(place), target.read()

        def arrive() -> None:
            block.zero_()
            if box is not None:
                block[box[1]] = view.data[box[0]]
            one.change(0, -block.numel() * view.dtype.primitive_bitwidth // 8)

        if self.late:
            block.fill_(torch.nan)
            self.copies.append((one, arrive))
        else:
            arrive()

    def copy_out(self, view: View, place: Sequence[int], source: Memory) -> None:
        box = view.box(place)

        def read() -> None:
            block = source.read().clone()
            if box is not None:
                self.writes.append(lambda: write(view.data, box[0], block[box[1]]))

        self.group.copies_back.append(read)
        if not self.late:
            read()

    def store_wait(self, pending: int) -> None:
        while len(self.group.copies_back) > pending:
            read = self.group.copies_back.popleft()
            if self.late:
                read()

    # Products

    def multiply(self, left: Any, right: Any, total: Any, use_acc: Any = True, is_async: bool = False) -> Values:
        product = Product(left, right, total, bool(use_acc))
        self.group.products.append(product)
        if not self.late:
            product.compute()
        result = values(torch.full((left.shape[0], right.shape[1]), torch.nan, dtype=torch.float64))
        assert total.shape == result.shape
        result.product = product
        return result if is_async else self.wait_products(0, (result,))

    def wait_products(self, pending: int, deps: Sequence[Any]) -> Any:
        while len(self.group.products) > pending:
            self.group.products.popleft().compute()
        done = {id(x.product) for x in deps if getattr(x, "product", None)} - {id(x) for x in self.group.products}
        found = [resolved(x) if id(getattr(x, "product", None)) in done else x for x in deps]
        return found[0] if len(found) == 1 else tuple(found)

    # Warpgroups

    def specialize(self, parts: Sequence[tuple[Any, Sequence[Any]]], *_: Any) -> None:
        """Runs functions side by side, each in a warpgroup."""
        outer, self.groups = self.groups, [Group() for _ in parts]
        self.turns.run([partial(function, *arguments) for function, arguments in parts])
        for group in self.groups:
            self._assert_idle(group)
        self.groups = outer

    def _deliver(self) -> bool:
        """Lets one copy arrive of those that somebody waits for; returns whether there is one."""
        awaited = [group.awaits for group in self.groups]
        found = [index for index, (barrier, _) in enumerate(self.copies) if barrier in awaited]
        if found:
            _, arrive = self.copies.pop(self.turns.random.choice(found))
            arrive()
        return bool(found)

    def _assert_idle(self, group: Group) -> None:
        assert not group.products, "products that nobody waited for"
        assert not group.copies_back, "copies back that nobody waited for"

    def finish(self) -> None:
        """The end of a program."""
        self._assert_idle(self.group)
        assert not self.copies, "copies that nobody waited for"
        for one in self.writes:
            one()
