import numpy as np
import pytest
import torch

from longstride.model import ModelConfig, SparseTransformer
from longstride.patterns import Column, Local
from tests.model.small import config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 3}, "heads = 3 does not divide width = 16; these do: 1, 2, 4, 8, 16"),
        ({"layers": 0}, "layers must be at least 1, got 0"),
        ({"width": 16.0}, "width must be a whole number"),
        ({"context": True}, "context must be a whole number"),
        ({"qk_ratio": 0.3}, r"qk_ratio = 0.3 makes 4.8 of width = 16, which must be a multiple of heads = 2"),
        ({"ff_ratio": 0.03}, "ff_ratio = 0.03 makes 0.48 of width = 16, which must be a whole number from 1 on"),
        ({"ff_ratio": "4"}, "ff_ratio must be a number, got '4'"),
        ({"dropout": 1.0}, "dropout must be at least 0 and less than 1, got 1.0"),
        ({"pattern": "lokal(4)"}, r"config: pattern 'lokal\(4\)': there is no 'lokal'; did you mean 'local'\?"),
        ({"pattern": "merged(fixed(4, 8))"}, r"config: pattern 'merged\(fixed\(4, 8\)\)': .*c = 8"),
        ({"pattern": None}, "pattern must be text, got None"),
        ({"pattern": Local(4) | Column(4)}, r"pattern must be text, got Local\(4\) \| Column\(4\); give it as text: repr"),
        ({"embedding": "image(2, 2, 3)"}, "config: embedding .* has 12 bytes and context is 24"),
        ({"init": "papers"}, "init must be one of paper, release, modern, got 'papers'"),
        ({"precision": "half"}, "precision must be one of float32, bfloat16, float16, float64, auto, got 'half'"),
        ({"recompute": True}, "recompute must be one of off, selective, on, parts, host, auto, or a sum .*, got True"),
    ],
)
def test_a_wrong_config_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        config(**changes)


def test_ratios_are_taken_as_they_are_meant():
    """200 * 1.1 is not quite 220 in floating point."""
    assert config(width=200, ff_ratio=1.1).ff_width == 220
    assert config(width=200, heads=1, qk_ratio=0.7).qk_width == 140


def test_numbers_of_other_libraries_become_plain_ones():
    made = config(layers=np.int64(3))
    assert type(made.layers) is int
    assert ModelConfig.from_json(made.to_json()) == made


def test_blocks_take_patterns_in_turn():
    made = config(pattern="3*local(4) + column(4)")
    assert [made.patterns(block) for block in range(5)] == [*made.cycle, made.cycle[0]]


def test_json_reads_back():
    made = config(dropout=0.1, qk_ratio=0.5)
    assert ModelConfig.from_json(made.to_json()) == made


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "a.json is not JSON"),
        ("[1]", "a.json must hold a JSON object, got a list"),
        ('{"layer": 3}', "a.json: there is no field 'layer'; did you mean 'layers'?"),
        (config().to_json().replace('"heads": 2', '"heads": 3'), "a.json: heads = 3 does not divide"),
        ('{"layers": 3}', "a.json: width, heads, context, pattern, embedding must be given"),
    ],
)
def test_json_errors(text, message):
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        ModelConfig.from_json(text, "a.json")


def test_auto_is_float32_where_nobody_has_chosen():
    auto = config(precision="auto")
    assert auto.dtype == torch.float32
    assert auto.resolved("bfloat16") == config(precision="bfloat16")
    assert config().resolved("bfloat16") == config()
    assert SparseTransformer(auto).config == config()
