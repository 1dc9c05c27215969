"""The leaves: the patterns that are no unions. Sections 4.2 and 4.3 of the paper define them."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, dataclass
from math import inf
from typing import Any

from longstride.common.checks import whole_number
from longstride.patterns.pair_counts import dilated_pairs
from longstride.patterns.pattern import Leaf


class Dilated(Leaf):
    """Every `step`-th earlier position, at most `reach` back (None: no limit). The base of Dense, Local and Column.

    Frozen, but no dataclass: torch.compile rebuilds a dataclass from its fields and skips the __init__ of these three.
    """

    step: int
    reach: int | None

    def __init__(self, step: int, reach: int | None = None) -> None:
        object.__setattr__(self, "step", _length("Dilated", step, "step", 1))
        object.__setattr__(self, "reach", None if reach is None else _length("Dilated", reach, "reach"))
        # Local(l), Column(l) and Dense() are special cases of Dilated, so all print and compare by value.
        if self.reach is None:
            text = "Dense()" if self.step == 1 else f"Column({self.step})"
        else:
            text = f"Local({self.reach})" if self.step == 1 else f"Dilated({self.step}, {self.reach})"
        object.__setattr__(self, "text", text)

    def sees(self, query: Any, key: Any) -> Any:
        distance = query - key
        seen = (distance >= 0) & (distance % self.step == 0)
        return seen if self.reach is None else seen & (distance <= self.reach)

    def pairs(self, n: int) -> int:
        return dilated_pairs(self.step, self.reach, _length("pairs", n))

    def contains(self, other: Leaf) -> bool:
        if self.step == 1 and self.reach is None:
            return True
        if not isinstance(other, Dilated) or other.step % self.step:
            return False
        return self.reach is None or (other.reach is not None and other.reach <= self.reach)

    def repeats(self, shift: int) -> bool:
        return True

    def touches(self, queries: range, keys: range) -> bool:
        nearest, farthest = max(0, queries[0] - keys[-1]), queries[-1] - keys[0]
        if self.reach is not None:
            farthest = min(farthest, self.reach)
        return farthest // self.step * self.step >= nearest

    @property
    def order(self) -> tuple[float, ...]:
        return (0, self.step, inf if self.reach is None else self.reach)

    @property
    def entry(self) -> tuple[str, Any]:
        return "dilated", (self.step, self.reach)

    def __eq__(self, other: object) -> bool:
        same = isinstance(other, Dilated) and (self.step, self.reach) == (other.step, other.reach)
        return same and (type(self) is type(other) or (self.has_rule and other.has_rule))  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        return hash((Dilated, self.step, self.reach))

    def __setattr__(self, name: str, value: object) -> None:
        raise FrozenInstanceError(f"cannot assign to field {name!r}")


class Dense(Dilated):
    """Every position up to the query's own: full attention."""

    def __init__(self) -> None:
        super().__init__(1, None)


class Local(Dilated):
    """The query's own position and the l before it: strided attention, A(1)."""

    def __init__(self, l: int) -> None:
        super().__init__(1, _length("Local", l, "l"))


class Column(Dilated):
    """Every l-th position, counted back from the query's own: strided attention, A(2)."""

    def __init__(self, l: int) -> None:
        super().__init__(_length("Column", l, "l", 1), None)


@dataclass(frozen=True, repr=False)
class Block(Leaf):
    """The positions up to the query's own in its block of l: fixed attention, A(1)."""

    l: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "l", _length("Block", self.l, "l", 1))
        object.__setattr__(self, "text", f"Block({self.l})")

    def sees(self, query: Any, key: Any) -> Any:
        return (key <= query) & (query // self.l == key // self.l)

    def pairs(self, n: int) -> int:
        full_blocks, rest = divmod(_length("pairs", n), self.l)
        return full_blocks * (self.l * (self.l + 1) // 2) + rest * (rest + 1) // 2

    def contains(self, other: Leaf) -> bool:
        return isinstance(other, Block) and self.l % other.l == 0

    def repeats(self, shift: int) -> bool:
        return shift % self.l == 0

    def touches(self, queries: range, keys: range) -> bool:
        return keys[0] // self.l <= queries[-1] // self.l and queries[0] // self.l <= keys[-1] // self.l

    @property
    def order(self) -> tuple[float, ...]:
        return (1, self.l)

    @property
    def entry(self) -> tuple[str, Any]:
        return "blocks", self.l


@dataclass(frozen=True, repr=False)
class Summary(Leaf):
    """The c summary cells of every block of l, up to the query's own position: fixed attention, A(2).

    Part 0 is the last c cells of each block, part 1 the c before those, and so on: the distinct sub-blocks that the
    paper gives to different heads.
    """

    l: int
    c: int
    part: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "l", _length("Summary", self.l, "l", 1))
        object.__setattr__(self, "c", _length("Summary", self.c, "c", 1))
        object.__setattr__(self, "part", _length("Summary", self.part, "part"))
        if self.c > self.l:
            raise ValueError(f"Summary: c = {self.c} cells do not fit into a block of l = {self.l}; c must be 1 to {self.l}")
        if (self.part + 1) * self.c > self.l:
            raise ValueError(
                f"Summary: part = {self.part} is out of range; a block of l = {self.l} has {self.l // self.c} parts "
                f"of c = {self.c} cells, so part must be 0 to {self.l // self.c - 1}"
            )
        part = f", part={self.part}" if self.part else ""
        object.__setattr__(self, "text", f"Summary({self.l}, {self.c}{part})")

    @property
    def cells(self) -> range:
        """Offsets of the summary cells in a block."""
        return range(self.l - (self.part + 1) * self.c, self.l - self.part * self.c)

    def cells_before(self, position: int) -> int:
        """Returns the number of summary cells before a position."""
        full_blocks, rest = divmod(position, self.l)
        return full_blocks * self.c + min(self.c, max(0, rest - self.cells.start))

    def cell_position(self, index: Any) -> Any:
        """Returns the position of a summary cell, counted from the start of the sequence; ints or tensors."""
        return index // self.c * self.l + self.cells.start + index % self.c

    def cell_index(self, position: Any) -> Any:
        """Returns the index of the summary cell at a position: the inverse of `cell_position`."""
        return position // self.l * self.c + position % self.l - self.cells.start

    def sees(self, query: Any, key: Any) -> Any:
        cell = key % self.l
        return (key <= query) & (cell >= self.cells.start) & (cell < self.cells.stop)

    def pairs(self, n: int) -> int:
        # The n - j queries from position j on see key j. Full blocks are summed as one arithmetic series; the block that n
        # cuts adds its cells below n.
        full, rest = divmod(_length("pairs", n), self.l)
        first, last = self.cells[0], self.cells[-1]
        full_pairs = full * self.c * n - self.c * self.l * (full * (full - 1) // 2) - full * self.c * (first + last) // 2
        cut = max(0, min(rest, self.cells.stop) - first)
        return full_pairs + cut * (rest - first) - cut * (cut - 1) // 2

    def contains(self, other: Leaf) -> bool:
        return (
            isinstance(other, Summary)
            and self.l == other.l
            and self.cells.start <= other.cells.start
            and other.cells.stop <= self.cells.stop
        )

    def repeats(self, shift: int) -> bool:
        return shift % self.l == 0

    def touches(self, queries: range, keys: range) -> bool:
        return keys[0] <= queries[-1]

    @property
    def order(self) -> tuple[float, ...]:
        return (2, self.l, self.part, self.c)

    @property
    def entry(self) -> tuple[str, Any]:
        return "summaries", (self.l, self.cells.start, self.cells.stop)


def _length(owner: str, value: object, name: str = "n", least: int = 0) -> int:
    return whole_number(owner, name, value, least, limit="positions")
