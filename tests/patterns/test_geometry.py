from copy import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longstride import attend
from longstride.attention.tiles import arrange
from longstride.model.slots import Slots, slots
from longstride.patterns import Block, Column, Dense, Leaf, Local, Pattern, Summary, connects, notation
from longstride.patterns.geometry import geometry, lane_sets
from longstride.patterns.pattern import Union
from tests.strategies import leaves, patterns, summaries


class Antidiagonal(Leaf):
    """A leaf that only `sees` knows: the query's own position and its mirror image in 0 to 9."""

    text = "Antidiagonal()"

    def sees(self, query, key):
        return (key == query) | ((query + key == 9) & (key <= query))

    def contains(self, other):
        return False

    @property
    def order(self):
        return (3,)


@given(patterns(), st.integers(1, 70), st.booleans())
def test_records_stand_for_every_leaf_once_and_exclude_only_earlier_ones(pattern, n, by_leaf):
    earlier = []
    for record in geometry(pattern, n, by_leaf):
        assert set(record.excluded) <= set(earlier)
        assert len(record.leaves) <= 2 - by_leaf
        earlier += record.leaves
    assert len(earlier) == len(pattern.leaves)
    assert set(earlier) == set(pattern.leaves)


@given(patterns(), st.integers(1, 70), st.booleans())
def test_records_compute_every_pair_once(pattern, n, by_leaf):
    position = torch.arange(n)
    times = sum(record.computes(position[:, None], position).int() for record in geometry(pattern, n, by_leaf))
    assert torch.equal(times, pattern.mask(n).int())


@given(leaves(), st.integers(1, 70))
def test_sets_of_lanes_hold_every_position_once_and_no_pair_lies_across_two(leaf, n):
    (record,) = geometry(leaf, n)
    lane_of = {}
    for number, lanes in enumerate(lane_sets(record, n)):
        for lane in range(lanes.lanes):
            for index in range(lanes.length):
                assert lane_of.setdefault(lanes.position(lane, index), (number, lane)) == (number, lane)
    assert sorted(lane_of) == list(range(n))
    if record.own:
        assert all(lane_of[i] == lane_of[j] for i, j in leaf.mask(n).nonzero().tolist())


@given(summaries(), st.integers(0, 200))
def test_summary_cells_are_counted_in_order(summary, n):
    cells = [position for position in range(n) if summary.sees(n, position)]
    assert [summary.cell_position(index) for index in range(len(cells))] == cells
    assert [summary.cell_index(position) for position in cells] == list(range(len(cells)))
    assert summary.cells_before(n) == len(cells)


def test_block_and_summary_of_one_length_are_one_record():
    pattern = Block(4) | Block(6) | Summary(4, 1) | Summary(6, 2)
    first, second = geometry(pattern, 50)
    assert (first.leaves, first.excluded) == ((Block(4), Summary(4, 1)), ())
    assert (second.leaves, second.excluded) == ((Block(6), Summary(6, 2)), (Block(4), Summary(4, 1)))


def test_a_column_behind_a_window_begins_where_the_window_ends():
    window, column = geometry(Local(5) | Column(5), 50)
    assert (window.near, window.far) == (0, 5)
    assert (column.near, column.far, column.excluded) == (2, 10, ())


@pytest.mark.parametrize("pattern", [Antidiagonal(), Local(2) | Antidiagonal()], ids=repr)
class TestUnknownLeaf:
    """Refused by name, except by the reference, which needs `sees` alone."""

    @pytest.fixture(autouse=True)
    def in_the_notation(self, monkeypatch):
        monkeypatch.setitem(notation._CALLS, "antidiagonal", Antidiagonal)
        notation.parse.cache_clear()
        yield
        notation.parse.cache_clear()

    def test_reference_computes_it(self, pattern):
        q, k, v = torch.randn(3, 1, 1, 10, 4).unbind()
        hidden = torch.tensor([[not pattern.sees(i, j) for j in range(10)] for i in range(10)])
        expected = (q @ k.transpose(2, 3) / 2).masked_fill(hidden, -torch.inf).softmax(-1) @ v
        torch.testing.assert_close(attend(q, k, v, pattern, impl="reference"), expected)

    @pytest.mark.parametrize("impl", ["blocked", "triton"])
    def test_kernels_and_tiles_refuse_it(self, pattern, impl):
        if impl == "triton":
            pytest.importorskip("triton")
        device = "cuda" if impl == "triton" and torch.cuda.is_available() else "cpu"
        q, k, v = torch.randn(3, 1, 1, 10, 4, device=device).unbind()
        with pytest.raises(TypeError, match=r"no rule for Antidiagonal\(\)"):
            attend(q, k, v, pattern, impl=impl)

    @pytest.mark.parametrize("make", [arrange, Slots, geometry, lambda pattern, n: connects([pattern], n)])
    def test_whatever_has_no_rule_for_it_refuses_it(self, pattern, make):
        with pytest.raises(TypeError, match=r"no rule for Antidiagonal\(\)"):
            make(pattern, 10)

    def test_pairs_of_a_union_are_not_miscounted(self, pattern):
        with pytest.raises(TypeError if len(pattern.leaves) > 1 else NotImplementedError):
            pattern.pairs(10)


class Shifted(Local):
    """A known leaf with another definition, which looks like Local: with the same text, fields and hash."""

    def sees(self, query, key):
        return super().sees(query, key + 1)


class Reversed(Block):
    """The same of Block: the first half of a block sees the key at the block's start alone."""

    def sees(self, query, key):
        return super().sees(query, key) & ((query % self.l >= self.l // 2) | (key % self.l == 0))


class Others(Summary):
    """The same of Summary: every position of a block but its summary cells."""

    def sees(self, query, key):
        return (key <= query) & ~super().sees(query, key)


class Impostor(Antidiagonal):
    text = "Local(3)"


class Nameless(Leaf):
    order = (9,)

    def sees(self, query, key):
        return key <= query

    def contains(self, other):
        return False


class Wrapped(Pattern):
    text, leaves = "Local(3)", (Local(3),)


@pytest.mark.parametrize(
    "pattern",
    [
        Shifted(3),
        Reversed(4),
        Others(6, 2),
        Impostor(),
        Nameless(),
        Wrapped(),
        Leaf(),
        Union((Union((Local(3), Block(4))), Column(5))),
        Column(5) | Shifted(3),
        Column(5) | Impostor(),
        Column(5) | Nameless(),
    ],
)
class TestDisguisedLeaf:
    """Refused by its type, whatever its text and its fields."""

    @pytest.mark.parametrize("impl", ["blocked", "triton"])
    @pytest.mark.parametrize("options", [{}, {"return_lse": True}], ids=str)
    def test_kernels_and_tiles_refuse_it(self, pattern, impl, options):
        if impl == "triton":
            pytest.importorskip("triton")
        device = "cuda" if impl == "triton" and torch.cuda.is_available() else "cpu"
        q, k, v = torch.randn(3, 1, 2, 10, 4, device=device).unbind()
        for heads in (pattern, [Local(3), pattern]):
            with pytest.raises(TypeError, match=r"no rule for .*; it takes those of longstride\.patterns"):
                attend(q, k, v, heads, impl=impl, **options)

    @pytest.mark.parametrize("make", [geometry, arrange, slots])
    def test_what_is_cached_for_a_known_leaf_is_not_served_for_it(self, pattern, make):
        for known in (Local(3), Block(4), Summary(6, 2), Column(5) | Local(3)):
            make(known, 10)
        with pytest.raises(TypeError, match="no rule for"):
            make(pattern, 10)

    def test_its_paths_are_not_miscounted(self, pattern):
        with pytest.raises(TypeError, match="no rule for"):
            connects([pattern], 10)


class Registered:
    def __init_subclass__(cls, **options):
        super().__init_subclass__()
        cls.options = options


def test_a_leaf_may_have_other_bases():
    class Named(Local, Registered, name="mine"):
        pass

    assert Named.options == {"name": "mine"}
    with pytest.raises(TypeError, match="no rule for"):
        geometry(Named(3), 10)


@pytest.mark.parametrize(
    "known", [Local(6), Local(3), Block(8), Block(4), Summary(8, 2), Dense(), Local(3) | Block(4)], ids=repr
)
@pytest.mark.parametrize("other", [Shifted(6), Reversed(8), Others(8, 2), Nameless()], ids=lambda leaf: type(leaf).__name__)
def test_a_union_keeps_every_pair_of_a_disguised_leaf(known, other):
    pairs = known.mask(40) | other.mask(40)
    assert torch.equal((known | other).mask(40), pairs)
    assert torch.equal((other | known).mask(40), pairs)


@pytest.mark.parametrize(("leaf", "twin"), [(Local(6), Shifted(6)), (Block(8), Reversed(8)), (Summary(8, 2), Others(8, 2))])
def test_a_disguised_leaf_equals_its_own_kind_only(leaf, twin):
    assert leaf != twin
    assert twin != leaf
    assert twin == copy(twin)
    assert leaf | Column(5) != twin | Column(5)


class Unfinished(Antidiagonal):
    """As if it were defined in leaves.py, without the later steps of the recipe for a leaf."""

    __module__ = "longstride.patterns.leaves"
    text = "Unfinished()"


@pytest.mark.parametrize(
    "use", [lambda leaf: (leaf | Local(2)).pairs(10), lambda leaf: connects([leaf], 10), lambda leaf: geometry(leaf, 10)]
)
def test_a_leaf_that_is_not_complete_is_never_miscounted(use):
    assert Unfinished.has_rule
    with pytest.raises(AssertionError, match=r"Unfinished\(\) has no (field in Parts|geometry)"):
        use(Unfinished())
