"""Attention patterns: which keys each query sees, as small frozen values.

    >>> merged = Local(128) | Column(128)
    >>> merged
    Local(128) | Column(128)
    >>> merged.pairs(1_048_576)
    4428652608

A pattern is a set of pairs (query i, key j) with 0 <= j <= i. It has no length of its own and holds no tensor: `sees` is
its definition, and everything else follows from that. Sections 4.2 and 4.3 of the paper define them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import FrozenInstanceError, dataclass
from math import inf
from typing import TYPE_CHECKING, Any

from longstride.common.checks import short_repr, whole_number
from longstride.common.limits import check_limit
from longstride.patterns.pair_counts import Parts, check_steps, count_pairs, dilated_pairs

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MASK_ENTRIES = 2**24
"""Mask entries that are computed at a time."""


class Pattern:
    """A set of (query, key) pairs in which no query sees its future. Join two with `|`."""

    text: str
    """Its notation, e.g. "Local(128)". Stored as a string: torch.compile may make the numbers symbolic, but not a string."""
    has_rule = False
    """Whether this is one of this file's leaves. A subclass may define `sees` anew: no implementation has a rule for it."""

    def sees(self, query: Any, key: Any) -> Any:
        """Whether `query` sees `key`; positions as ints, or as tensors that broadcast."""
        raise NotImplementedError(_lacks(self, "sees"))

    def pairs(self, n: int) -> int:
        """Returns the exact number of (query, key) pairs in a sequence of length n, without an n x n table."""
        raise NotImplementedError(_lacks(self, "pairs"))

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """The simple patterns whose union this is."""
        raise NotImplementedError(_lacks(self, "leaves"))

    def mask(self, n: int, device: torch.device | str | None = None) -> Tensor:
        """Returns the pattern as bool [n, n], indexed [query, key]: for tests and pictures."""
        import torch  # Here, so that the command line can parse patterns without torch.

        if torch.compiler.is_compiling():  # n may be symbolic: a check would make it a constant, and so would a loop.
            position = torch.arange(n, device=device)
            return self.sees(position[:, None], position[None, :])  # type: ignore[no-any-return]
        n = whole_number("mask", "n", n, least=0, limit="table")
        position = torch.arange(n, device=device)
        rows = max(1, MASK_ENTRIES // max(1, n))
        mask = torch.empty(n, n, dtype=torch.bool, device=device)
        for start in range(0, n, rows):  # In parts: `sees` makes int64 temporaries.
            mask[start : start + rows] = self.sees(position[start : start + rows, None], position[None, :])
        return mask

    def __or__(self, other: Pattern) -> Pattern:
        return union(self, other) if isinstance(other, Pattern) else NotImplemented

    def __repr__(self) -> str:
        return getattr(self, "text", f"{type(self).__name__}()")


class Leaf(Pattern):
    """A pattern that is no union: Dilated, Block or Summary."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.has_rule = cls.__module__ == __name__

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        return (self,)

    def contains(self, other: Leaf) -> bool:
        """True only if this has every pair of `other` at any length. False may also mean undecided."""
        raise NotImplementedError(_lacks(self, "contains"))

    def repeats(self, shift: int) -> bool:
        """Whether sees(i, j) equals sees(i + shift, j + shift) for all i and j."""
        raise NotImplementedError(_lacks(self, "repeats"))

    def touches(self, queries: range, keys: range) -> bool:
        """False only if no query in `queries` sees any key in `keys`."""
        raise NotImplementedError(_lacks(self, "touches"))

    @property
    def order(self) -> tuple[float, ...]:
        """Sort key for the leaves of a union, so that `a | b` equals `b | a`."""
        raise NotImplementedError(_lacks(self, "order"))


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


@dataclass(frozen=True, repr=False)
class Union(Pattern):
    """The union of several leaves, each key once: a merged head. Made by `a | b`, which drops contained leaves."""

    members: tuple[Leaf, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", " | ".join([repr(leaf) for leaf in self.members]))

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        return self.members

    def sees(self, query: Any, key: Any) -> Any:
        seen = self.members[0].sees(query, key)
        for leaf in self.members[1:]:
            seen = seen | leaf.sees(query, key)
        return seen

    def pairs(self, n: int) -> int:
        return count_pairs(parts_of(self), _length("pairs", n))


def union(*patterns: Pattern) -> Pattern:
    """Returns the union of the patterns: `a | b | ...` for patterns in a list."""
    given = dict.fromkeys(leaf for pattern in validate_patterns("union", patterns) for leaf in pattern.leaves)
    check_limit("union", "the number of leaves", len(given), "leaves")
    kept: list[Leaf] = []
    for leaf in (leaf for leaf in given if leaf.has_rule):
        if not any(other.contains(leaf) for other in kept):
            kept = [other for other in kept if not leaf.contains(other)] + [leaf]
    kept += [leaf for leaf in given if not leaf.has_rule]  # What they contain, and what contains them, is unknown.
    if not kept:
        raise ValueError("union: no pattern was given; it needs at least one")
    return kept[0] if len(kept) == 1 else Union(tuple(sorted(kept, key=lambda leaf: leaf.order)))


def total_pairs(counts: Mapping[Pattern, int], n: int) -> int:
    """Returns the sum of pattern.pairs(n) * count. ValueError at once if counting would take too long."""
    n = _length("pairs", n)
    check_steps([parts_of(pattern) for pattern in counts if isinstance(pattern, Union)], n)
    return sum(count * pattern.pairs(n) for pattern, count in counts.items())


def known_leaves(owner: str, pattern: Pattern) -> tuple[Leaf, ...]:
    """Returns a pattern's leaves. TypeError for one without a rule."""
    leaves: Any = pattern.members if type(pattern) is Union else (pattern,)
    for leaf in leaves:
        if not leaf.has_rule:
            raise TypeError(
                f"{owner}: no rule for {leaf!r}, a {type(leaf).__name__}; it takes those of longstride.patterns, and only "
                "impl = 'reference' of attend takes others"
            )
    return leaves  # type: ignore[no-any-return]


def parts_of(pattern: Pattern) -> Parts:
    """Returns the parameters of a pattern's leaves."""
    leaves = known_leaves("patterns", pattern)
    for leaf in leaves:
        assert isinstance(leaf, Dilated | Block | Summary), f"{leaf!r} has no field in Parts"
    return Parts(
        tuple((leaf.step, leaf.reach) for leaf in leaves if isinstance(leaf, Dilated)),
        tuple(leaf.l for leaf in leaves if isinstance(leaf, Block)),
        tuple((leaf.l, leaf.cells.start, leaf.cells.stop) for leaf in leaves if isinstance(leaf, Summary)),
    )


def _lacks(pattern: Pattern, name: str) -> str:
    return f"{type(pattern).__name__} does not define `{name}`"


def _length(owner: str, value: object, name: str = "n", least: int = 0) -> int:
    return whole_number(owner, name, value, least, limit="positions")


def validate_patterns(owner: str, patterns: Iterable[Pattern]) -> tuple[Pattern, ...]:
    """Returns the patterns as a tuple; ValueError if one of them is no Pattern."""
    if not isinstance(patterns, Iterable):
        raise ValueError(f"{owner}: patterns must be patterns, got {short_repr(patterns)}")
    patterns = tuple(patterns)
    for index, pattern in enumerate(patterns):
        if not isinstance(pattern, Pattern):
            raise ValueError(f"{owner}: patterns[{index}] must be a Pattern, got {short_repr(pattern)}")
    return patterns
