import pytest

from longstride.model.placement import place
from longstride.patterns import Block, Column, Dense, Local, Summary, fixed, strided, union

L, C = Local(8), Column(8)


@pytest.mark.parametrize(
    ("text", "cycle"),
    [
        ("interleave(strided(8))", [(L, L), (C, C)]),
        ("interleave(local(8), column(8))", [(L, L), (C, C)]),
        ("local(8) + column(8)", [(L, L), (C, C)]),
        ("3*local(8) + column(8)", [(L, L)] * 3 + [(C, C)]),
        ("column(8) + local(8)*3", [(C, C)] + [(L, L)] * 3),
        ("2*(local(8) + column(8)) + dense()", [(L, L), (C, C), (L, L), (C, C), (Dense(), Dense())]),
        ("interleave(2*local(8), column(8))", [(L, L), (L, L), (C, C)]),
        ("merged(fixed(8, 2))", [(union(*fixed(8, 2)),) * 2]),
        ("local(8) | column(8)", [(union(*strided(8)),) * 2]),
        ("dense", [(Dense(), Dense())]),
        ("heads(local(8), column(8))", [(L, C)]),
        ("heads(strided(8))", [(L, C)]),
        ("heads(local(8), column(8)) + dense()", [(L, C), (Dense(), Dense())]),
        ("distinct(merged(fixed(8, 2)))", [(Block(8) | Summary(8, 2, 0), Block(8) | Summary(8, 2, 1))]),
        ("distinct(interleave(fixed(8, 2)))", [(Block(8), Block(8)), (Summary(8, 2, 0), Summary(8, 2, 1))]),
        ("distinct(interleave(block(8), summary(8, 8)))", [(Block(8), Block(8)), (Summary(8, 8), Summary(8, 8))]),
        (" Interleave( Strided( 8 ) ) ", [(L, L), (C, C)]),
    ],
)
def test_cycles(text, cycle):
    assert place(text, 2) == tuple(cycle)


def test_distinct_cells_begin_anew_after_the_last_sub_block():
    (block,) = place("distinct(merged(fixed(128, 32)))", 8)
    parts = [leaf.part for pattern in block for leaf in pattern.leaves if isinstance(leaf, Summary)]
    assert parts == [0, 1, 2, 3, 0, 1, 2, 3]


def test_distinct_cells_are_counted_over_the_heads_that_have_some():
    (block,) = place("distinct(heads(fixed(128, 32)))", 8)
    assert [pattern.part for pattern in block if isinstance(pattern, Summary)] == [0, 1, 2, 3]


def test_heads_are_repeated():
    assert place("heads(local(8), column(8))", 6) == ((L, C) * 3,)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("strided(8)", r"'strided\(8\)' is 2 patterns; say how blocks and heads take them"),
        ("local(8) +", "does not read as one"),
        ("lokal(8)", r"there is no 'lokal'; did you mean 'local'\?"),
        ("0*local(8)", "must repeat by a whole number from 1 on"),
        ("2.5*local(8)", "must repeat by a whole number"),
        ("local(8)*column(8)", "must repeat by a whole number"),
        ("5000*local(8) + column(8)", "must repeat by a whole number"),
        ("4000*local(8) + 4000*column(8)", "a cycle has at most 4,096 blocks"),
        ("heads(local(8), column(8), dense())", "has 3 patterns for 2 heads"),
        ("interleave()", "interleave takes one or more patterns"),
        ("distinct(dense())", "distinct is for summary cells"),
        ("distinct(dense(), dense())", "distinct takes one pattern, got 2"),
        ("merged(fixed(4, 8))", r"^pattern 'merged\(fixed\(4, 8\)\)': .*c = 8"),
        ("local(-1)", r"^pattern 'local\(-1\)': .*l must be at least"),
        ("interleve(local(8))", r"there is no 'interleve'; did you mean 'interleave'\?"),
        ("4096*(4096*(4096*local(8)))", "a cycle has at most 4,096 blocks"),
        ("distinct(fixed(8, 2))", "is 2 patterns; say how"),
        ("local(8) - column(8)", "cannot read"),
        ("__import__('os')", "there is no '__import__'"),
        ("3", "cannot read"),
    ],
)
def test_errors(text, message):
    with pytest.raises(ValueError, match=message):
        place(text, 2)
