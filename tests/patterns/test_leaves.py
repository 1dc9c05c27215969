import doctest
import pickle
import re
from collections import namedtuple
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import longstride.patterns.pattern
from longstride import attend
from longstride.patterns import (
    Block,
    Column,
    Dense,
    Dilated,
    Leaf,
    Local,
    Pattern,
    Summary,
    connects,
    fixed,
    grid,
    strided,
    union,
)
from longstride.patterns.pair_counts import Parts, count_pairs
from longstride.patterns.pattern import Union
from longstride.patterns.reach import after_step
from tests.strategies import leaves, patterns


def by_the_table(pattern: Pattern, i: int, j: int) -> bool:
    """The contract's table, written once more and apart from the code under test."""
    if j > i:
        return False
    match pattern:
        case Dilated(step=step, reach=reach):
            return (i - j) % step == 0 and (reach is None or i - j <= reach)
        case Block(l=l):
            return i // l == j // l
        case Summary(l=l, c=c, part=part):
            return l - (part + 1) * c <= j % l < l - part * c
        case Union():
            return any(by_the_table(leaf, i, j) for leaf in pattern.leaves)
        case _:
            raise AssertionError(f"{pattern!r} is not in this table")


@given(patterns(), st.integers(0, 60))
@settings(max_examples=300)
def test_mask_is_the_table(pattern, n):
    mask = pattern.mask(n)
    assert mask.dtype == torch.bool
    assert mask.tolist() == [[by_the_table(pattern, i, j) for j in range(n)] for i in range(n)]


def test_the_papers_sets():
    assert Local(2).mask(5)[4].tolist() == [False, False, True, True, True]  # l + 1 keys
    assert Column(3).mask(7)[6].nonzero().flatten().tolist() == [0, 3, 6]
    assert Block(4).mask(8)[6].nonzero().flatten().tolist() == [4, 5, 6]
    assert Summary(4, 2).mask(9)[8].nonzero().flatten().tolist() == [2, 3, 6, 7]
    assert Summary(4, 2, part=1).mask(9)[8].nonzero().flatten().tolist() == [0, 1, 4, 5, 8]
    # "if the stride is 128 and c = 8, then all future positions greater than 128 can attend to positions 120-128"
    assert Summary(128, 8).mask(257)[256].nonzero().flatten().tolist() == [*range(120, 128), *range(248, 256)]


@given(patterns(), st.integers(0, 120))
@settings(max_examples=500)
@example(Block(128) | Summary(128, 32), 1000)
@example(Local(128) | Column(128), 1000)
@example(Block(6) | Block(4) | Summary(10, 3), 300)
def test_pairs_counts_the_mask(pattern, n):
    assert pattern.pairs(n) == int(pattern.mask(n).sum())


@pytest.mark.parametrize("l", [1, 2, 7, 16, 128])
@pytest.mark.parametrize("c", [1, 2, 5, 32])
def test_pairs_counts_the_mask_of_the_papers_heads(l, c):
    c = min(c, l)
    for n in (1, 2, l - 1, l, l + 1, 3 * l, 3 * l + 2, 300):
        for heads in (strided(l), fixed(l, c)):
            for pattern in (*heads, union(*heads)):
                assert pattern.pairs(n) == int(pattern.mask(n).sum()), (pattern, n)


def test_pairs_at_a_million():
    # Too many to count: each is worked out by hand here, for lengths that are a multiple of everything.
    n = 1 << 20
    dense = n * (n + 1) // 2
    assert Dense().pairs(n) == dense
    assert Local(1024).pairs(n) == 1025 * n - 1024 * 1025 // 2
    assert Column(1024).pairs(n) == 1024 * (1024 * 1025 // 2)
    # Column and Local share the query's own position and, from 1024 on, the one a stride back.
    assert union(*strided(1024)).pairs(n) == Local(1024).pairs(n) + Column(1024).pairs(n) - n - (n - 1024)
    # Every block sees itself, and 32 cells of each of the blocks before it.
    blocks = n // 128
    assert union(*fixed(128, 32)).pairs(n) == blocks * (128 * 129 // 2) + 32 * 128 * (blocks * (blocks - 1) // 2)
    assert union(*grid(n, 4)).pairs(n) < 4 * 33 * n
    # All the parts of a block together are the block, so this is full attention; and steps may be larger than any length.
    assert union(*(Summary(128, 8, part) for part in range(16))).pairs(n) == dense
    assert union(Column(1 << 40), Dilated((1 << 40) - 1), Block(7)).pairs(n) == Block(7).pairs(n)


@given(leaves(), leaves(), leaves())
def test_unions_are_sets(a, b, c):
    assert a | b == b | a
    assert hash(a | b) == hash(b | a)
    assert (a | b) | c == a | (b | c)
    assert a | a == a
    assert torch.equal((a | b).mask(50), a.mask(50) | b.mask(50))


@given(leaves(), leaves(), st.integers(1, 80))
def test_contains_never_lies(a, b, n):
    if a.contains(b):
        assert not (b.mask(n) & ~a.mask(n)).any()


@given(leaves(), st.integers(0, 30), st.integers(0, 30), st.integers(0, 30))
def test_repeats_never_lies(leaf, i, j, shift):
    if leaf.repeats(shift):
        assert leaf.sees(i, j) == leaf.sees(i + shift, j + shift)


@given(leaves(), *[st.integers(0, 40), st.integers(1, 10)] * 2)
def test_touches_never_misses(leaf, query, rows, key, columns):
    queries, keys = range(query, query + rows), range(key, key + columns)
    if not leaf.touches(queries, keys):
        assert not any(leaf.sees(i, j) for i in queries for j in keys)


def test_names_for_the_same_set_are_equal():
    assert Local(5) == Dilated(1, 5)
    assert Column(5) == Dilated(5, None) == Dilated(5)
    assert Dense() == Dilated(1, None)
    assert len({Local(5), Dilated(1, 5), Local(6)}) == 2
    assert Local(5) != Block(5)
    assert Summary(8, 2) == Summary(8, 2, 0) != Summary(8, 2, 1)
    assert isinstance(Local(5), Dilated)
    assert isinstance(Local(5), Local)
    assert Dense() | Summary(8, 2) == Dense()
    assert Column(3) | Column(6) == Column(3)


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (Dense(), "Dense()"),
        (Local(128), "Local(128)"),
        (Column(128), "Column(128)"),
        (Dilated(4, 16), "Dilated(4, 16)"),
        (Block(128), "Block(128)"),
        (Summary(128, 32), "Summary(128, 32)"),
        (Summary(128, 32, 3), "Summary(128, 32, part=3)"),
        (Column(128) | Local(128), "Local(128) | Column(128)"),
    ],
)
def test_repr_is_how_one_writes_it(pattern, text):
    assert repr(pattern) == text
    assert eval(text, vars(longstride.patterns)) == pattern


def test_patterns_are_frozen_values():
    for pattern, name in ((Block(4), "l"), (Local(4), "reach"), (Dilated(2), "step"), (Summary(4, 1), "c")):
        with pytest.raises(AttributeError):
            setattr(pattern, name, 5)
    for pattern in (Local(3), Block(4) | Summary(4, 1)):
        assert pickle.loads(pickle.dumps(pattern)) == pattern


@given(st.integers(1, 500), st.integers(2, 5))
def test_grid_has_p_small_patterns_that_connect(n, p):
    heads = grid(n, p)
    assert len(heads) == p
    root = next(l for l in range(1, n + 1) if l**p >= n)
    assert all(head.pairs(n) <= n * (root + 1) for head in heads)
    assert connects(heads, min(n, 120))


def test_connects_takes_any_iterable_and_one_pattern():
    assert connects(iter(strided(4)), 16)
    assert connects(Dense(), 16)


def test_grid_in_two_dimensions_is_strided():
    assert grid(4096, 2) == strided(64)


@pytest.mark.parametrize("heads", [strided(64), fixed(64, 8), fixed(64, 1), grid(4096, 3), (Dense(),)], ids=repr)
def test_the_papers_factorizations_connect(heads):
    assert connects(heads, 4096)


@pytest.mark.parametrize(
    "heads",
    [
        (Block(16), Column(16)),  # row and column attention: never earlier row, later column
        (Column(16), Block(16)),
        (Summary(16, 4), Block(16)),  # the right patterns in the wrong order
        (Block(16), Summary(16, 4, part=1)),
        (Local(16), Column(18)),
        (Local(16),),
        (),
    ],
    ids=repr,
)
def test_patterns_that_miss_connections_are_refused(heads):
    assert not connects(heads, 256)


@given(st.lists(patterns(8), max_size=3), st.integers(0, 24))
@settings(max_examples=100)
def test_connects_is_a_product_of_masks(heads, n):
    stay = torch.eye(n, dtype=torch.bool)
    reached = stay
    for pattern in heads:
        reached = ((pattern.mask(n) | stay).float() @ reached.float()) > 0
    assert connects(heads, n) == torch.equal(reached, torch.ones(n, n).tril().bool())


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Column(0), "Column: l must be at least 1, got 0"),
        (lambda: Block(0), "Block: l must be at least 1, got 0"),
        (lambda: Dilated(0), "Dilated: step must be at least 1, got 0"),
        (lambda: Dilated(2, -1), "Dilated: reach must be at least 0, got -1"),
        (lambda: Local(-1), "Local: l must be at least 0, got -1"),
        (lambda: Local(1.5), "Local: l must be a whole number of at least 0, got 1.5"),
        (lambda: Local(True), "Local: l must be a whole number of at least 0, got True"),
        (lambda: strided(0), "strided: l must be at least 1, got 0"),
        (lambda: Summary(0, 1), "Summary: l must be at least 1, got 0"),
        (lambda: Summary(8, 0), "Summary: c must be at least 1, got 0"),
        (lambda: Summary(8, 9), "Summary: c = 9 cells do not fit into a block of l = 8; c must be 1 to 8"),
        (lambda: Summary(8, 2, 4), "part = 4 is out of range; .* so part must be 0 to 3"),
        (lambda: Summary(8, 2, -1), "Summary: part must be at least 0, got -1"),
        (lambda: fixed(8, 9), "c = 9"),
        (lambda: grid(0, 2), "grid: n must be at least 1, got 0"),
        (lambda: grid(10, 1), "grid: p must be at least 2, got 1"),
        (lambda: Dense().mask(-1), "mask: n must be at least 0, got -1"),
        (lambda: Dense().pairs(-1), "pairs: n must be at least 0, got -1"),
        (lambda: connects([3], 5), r"connects: patterns\[0\] must be a Pattern, got 3"),
        (lambda: connects(7, 5), "connects: patterns must be"),
        (lambda: union(), "union: no pattern was given"),
        (lambda: union(3), r"union: patterns\[0\] must be a Pattern, got 3"),
        (
            lambda: Column(1 << 62),
            r"Column: l must be at most 1,099,511,627,776, got 4,61.*; LONGSTRIDE_LIMITS",
        ),
    ],
)
def test_mistakes_are_named(make, says):
    with pytest.raises(ValueError, match=says):
        make()


def test_joining_with_something_else_is_a_type_error():
    with pytest.raises(TypeError):
        Dense() | 3


def test_the_examples_in_the_module_hold():
    results = doctest.testmod(longstride.patterns.pattern, extraglobs=vars(longstride.patterns))
    assert results.attempted
    assert results.failed == 0


@given(st.lists(leaves(8), min_size=2, max_size=12), st.integers(0, 300))
@settings(max_examples=300)
@example([Local(7), Column(3), Block(4), Summary(6, 1), Dilated(5, 11)], 400)
@example([Block(2), Block(3), Summary(4, 1, 2)], 299)
def test_pairs_of_many_leaves_repeat_with_their_period(some, n):
    """Lengths of many periods are reckoned from three short ones."""
    pattern = union(*some)
    assert pattern.pairs(n) == int(pattern.mask(n).sum())


def test_a_new_field_of_parts_is_never_left_out_of_a_count():
    parts = namedtuple("More", (*Parts._fields, "more"))(((1, 9),), *[()] * (len(Parts._fields) - 1), (4,))
    with pytest.raises(ValueError, match="unpack"):
        count_pairs(parts, 40)
    with pytest.raises(ValueError, match="unpack"):
        after_step(parts, [1, 2, 4])


def test_pairs_beyond_what_can_be_counted():
    n = 1 << 40
    assert union(*strided(1 << 20)).pairs(n) == Local(1 << 20).pairs(n) + Column(1 << 20).pairs(n) - n - (n - (1 << 20))
    blocks = n // 128
    assert union(*fixed(128, 32)).pairs(n) == blocks * (128 * 129 // 2) + 32 * 128 * (blocks * (blocks - 1) // 2)


def test_a_mask_in_parts_is_the_whole_one(monkeypatch):
    pattern = Local(5) | Summary(8, 2)
    whole = pattern.mask(50)
    monkeypatch.setattr(longstride.patterns.pattern, "MASK_ENTRIES", 130)
    assert torch.equal(pattern.mask(50), whole)


def _names(member):
    """The global names that a method or property uses."""
    code = getattr(getattr(member, "fget", member), "__code__", None)
    return code.co_names if code else ()


def test_what_a_pattern_of_ones_own_lacks_is_named():
    class Own(Leaf):
        pass

    calls = {"sees": (3, 2), "pairs": (5,), "contains": (Local(2),), "repeats": (4,), "touches": (range(2), range(2))}
    for name, arguments in calls.items():
        with pytest.raises(NotImplementedError, match=f"Own does not define `{name}`"):
            getattr(Own(), name)(*arguments)
    with pytest.raises(NotImplementedError, match="Own does not define `order`"):
        Own() | Local(2)
    with pytest.raises(NotImplementedError, match="Pattern does not define `leaves`"):
        Pattern() | Local(2)
    with pytest.raises(TypeError, match="and only impl = 'reference' of attend takes others"):
        attend(*torch.randn(3, 1, 1, 5, 4), Own())


def test_the_recipe_for_a_leaf_names_every_method_that_it_needs():
    page = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()
    recipe = page.partition("### A new pattern")[2].partition("###")[0]
    step = recipe.partition("2. A new leaf")[2].partition("\n3.")[0]

    @dataclass(frozen=True, repr=False)
    class First(Leaf):
        """The first positions of the sequence."""

        count: int
        text = "First"

        def sees(self, query, key):
            return (key <= query) & (key < self.count)

        def pairs(self, n):
            return sum(min(i + 1, self.count) for i in range(n))

        def contains(self, other):
            return False

        def repeats(self, shift):
            return False

        def touches(self, queries, keys):
            return keys[0] < self.count

        @property
        def order(self):
            return (9, self.count)

    members = {**vars(Pattern), **vars(Leaf)}
    missing = {name for name, member in members.items() if "NotImplementedError" in _names(member)}
    assert missing == {name for name in vars(First) if name in missing}
    assert missing <= set(re.findall(r"`(\w+)`", step))
    q, k, v = torch.randn(3, 1, 1, 12, 4).unbind()
    both = First(2) | Local(1)
    assert torch.equal(both.mask(12), First(2).mask(12) | Local(1).mask(12))
    out = torch.softmax((q @ k.mT / 2).masked_fill(~both.mask(12), -torch.inf), -1) @ v
    torch.testing.assert_close(attend(q, k, v, both, impl="reference"), out)
