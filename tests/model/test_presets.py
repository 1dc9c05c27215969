import pytest

from longstride.model import PRESETS, preset
from longstride.patterns import Dense, Summary


@pytest.mark.parametrize(
    ("name", "millions"),
    [("cifar10", 59), ("enwik8", 95), ("imagenet64", 152), ("music-65536", 152), ("music-262144", 25), ("music-1048576", 3)],
)
def test_parameters_are_as_many_as_the_paper_says(name, millions):
    off = 0.01 if millions > 3 else 0.05
    assert preset(name).parameters == pytest.approx(millions * 1e6, rel=off)


def test_what_the_paper_says_of_each():
    cifar10 = preset("cifar10")
    assert (cifar10.layers, cifar10.width, cifar10.heads, cifar10.context) == (128, 256, 2, 3072)
    assert (cifar10.qk_width, cifar10.ff_width, cifar10.dropout) == (128, 512, 0.25)
    enwik8 = preset("enwik8")
    assert (enwik8.layers, enwik8.width, enwik8.heads, enwik8.context, enwik8.dropout) == (30, 512, 8, 12_288, 0.4)
    cells = [leaf for pattern in enwik8.patterns(0) for leaf in pattern.leaves if isinstance(leaf, Summary)]
    assert [(leaf.l, leaf.c, leaf.part) for leaf in cells] == [(128, 32, head % 4) for head in range(8)]
    imagenet64 = preset("imagenet64")
    assert (imagenet64.layers, imagenet64.width, imagenet64.heads, imagenet64.dropout) == (48, 512, 16, 0.01)
    assert [repr(imagenet64.patterns(block)[0]) for block in range(3)] == ["Local(128)", "Column(128)", "Local(128)"]


@pytest.mark.parametrize("name", PRESETS)
def test_dense_forms_differ_in_the_pattern_alone(name):
    dense = preset(f"{name}-dense")
    assert set(dense.patterns(0)) == {Dense()}
    assert dense == type(dense)(**{**vars(preset(name)), "pattern": "dense()"})


def test_an_unknown_name():
    with pytest.raises(ValueError, match=r"there is no preset 'enwik'; did you mean 'enwik8'\?"):
        preset("enwik")
    with pytest.raises(ValueError, match="the names are cifar10, enwik8"):
        preset("qqq")
