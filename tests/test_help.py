"""help() of the main names says shapes, causality and defaults, and its examples run."""

import doctest

import pytest

from longstride import ModelConfig, SparseTransformer, attend

SAYS = {
    attend: ["[batch, heads, n, d_qk]", "[batch, heads, n, d_v]", "Causal", "Default 1 / sqrt(d_qk)", '"auto" (default)'],
    SparseTransformer: ["[batch, n]", "[batch, n, 256]", "causal", "by default"],
    ModelConfig: ["causal", "Defaults", "'interleave(strided(128))'", "'matrix(128)'"],
}


@pytest.mark.parametrize("thing", SAYS, ids=lambda thing: thing.__name__)
def test_help(thing):
    for words in SAYS[thing]:
        assert words in thing.__doc__
    examples = doctest.DocTestParser().get_doctest(thing.__doc__, {}, thing.__name__, None, None)
    assert len(examples.examples) >= 3
    assert doctest.DocTestRunner().run(examples).failed == 0
