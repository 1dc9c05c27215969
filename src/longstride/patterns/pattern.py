"""Attention patterns: which keys each query sees, as small frozen values; and unions of them.

    >>> merged = Local(128) | Column(128)
    >>> merged
    Local(128) | Column(128)
    >>> merged.pairs(1_048_576)
    4428652608

A pattern is a set of pairs (query i, key j) with 0 <= j <= i. It has no length of its own and holds no tensor: `sees` is
its definition, and everything else follows from that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from longstride.common.checks import short_repr, whole_number
from longstride.common.limits import check_limit
from longstride.patterns.pair_counts import Parts, check_steps, count_pairs

if TYPE_CHECKING:
    import torch
    from torch import Tensor

LEAVES = f"{__package__}.leaves"
"""The module of the leaves that all implementations know."""
MASK_ENTRIES = 2**24
"""Mask entries that are computed at a time."""


class Pattern:
    """A set of (query, key) pairs in which no query sees its future. Join two with `|`."""

    text: str
    """Its notation, e.g. "Local(128)". Stored as a string: torch.compile may make the numbers symbolic, but not a string."""
    has_rule = False
    """Whether this is one of `leaves.py`. A subclass may define `sees` anew: no implementation has a rule for it."""

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
        cls.has_rule = cls.__module__ == LEAVES

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

    @property
    def entry(self) -> tuple[str, Any]:
        """The field of `Parts` that lists this leaf, and its parameters there."""
        raise AssertionError(f"{self!r} has no field in Parts")


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
        return count_pairs(parts_of(self), whole_number("pairs", "n", n, least=0, limit="positions"))


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
    n = whole_number("pairs", "n", n, least=0, limit="positions")
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
    fields: dict[str, list[Any]] = {name: [] for name in Parts._fields}
    for leaf in known_leaves("patterns", pattern):
        name, parameters = leaf.entry
        assert name in fields, f"{leaf!r} has no field in Parts"
        fields[name].append(parameters)
    return Parts(**{name: tuple(found) for name, found in fields.items()})


def _lacks(pattern: Pattern, name: str) -> str:
    return f"{type(pattern).__name__} does not define `{name}`"


def validate_patterns(owner: str, patterns: Iterable[Pattern]) -> tuple[Pattern, ...]:
    """Returns the patterns as a tuple; ValueError if one of them is no Pattern."""
    if not isinstance(patterns, Iterable):
        raise ValueError(f"{owner}: patterns must be patterns, got {short_repr(patterns)}")
    patterns = tuple(patterns)
    for index, pattern in enumerate(patterns):
        if not isinstance(pattern, Pattern):
            raise ValueError(f"{owner}: patterns[{index}] must be a Pattern, got {short_repr(pattern)}")
    return patterns
