"""Hypothesis strategies for patterns, shared by the tests."""

from hypothesis import strategies as st

from longstride.patterns import Block, Column, Dense, Dilated, Local, Pattern, Summary, union


@st.composite
def summaries(draw: st.DrawFn, longest: int = 24) -> Summary:
    l = draw(st.integers(1, longest))
    c = draw(st.integers(1, l))
    return Summary(l, c, draw(st.integers(0, l // c - 1)))


def leaves(longest: int = 24) -> st.SearchStrategy[Pattern]:
    stride = st.integers(1, longest)
    return st.one_of(
        st.just(Dense()),
        st.builds(Local, st.integers(0, longest)),
        st.builds(Column, stride),
        st.builds(Dilated, stride, st.integers(0, 3 * longest)),
        st.builds(Block, stride),
        summaries(longest),
    )


def patterns(longest: int = 24) -> st.SearchStrategy[Pattern]:
    """A leaf, or a union of up to four."""
    return st.lists(leaves(longest), min_size=1, max_size=4).map(lambda some: union(*some))
