import pytest
import torch

from longstride.model import preset
from longstride.model.byte_cost import cache_bytes
from longstride.model.cache import Cache, block_slots
from longstride.model.decode import views
from longstride.model.slots import slots
from tests.model.small import config


@pytest.mark.parametrize(
    "pattern", ["interleave(strided(5))", "distinct(merged(fixed(6, 2)))", "heads(local(3), summary(6, 2))"]
)
def test_a_prompt_at_once_leaves_what_one_byte_after_the_other_does(pattern):
    small = config(pattern=pattern, context=23)
    n, width = 17, small.width // small.heads
    keys, values = torch.randn(2, 2, small.heads, n, width).unbind()
    once, stepwise = Cache(small, 2), Cache(small, 2)
    for block in range(small.layers):
        once.fill(block, keys, values)
        for position in range(n):
            here = range(position, position + 1)
            (view,) = views(block_slots(small, block), stepwise.slots[block], here, 2, torch.device("cpu"))
            stepwise.add(block, view, keys[:, :, position], values[:, :, position])
        for number, head in enumerate(block_slots(small, block)):
            later = torch.cat([head.seen(query) for query in range(n, 23)]).unique()
            written = torch.isin(later, head.of(head.kept(n)))
            at = later[written]
            assert len(at)
            for one, other in ((once.keys, stepwise.keys), (once.values, stepwise.values)):
                assert torch.equal(one[block][:, number, at], other[block][:, number, at])


def test_costs_what_it_says():
    small = config(pattern="distinct(merged(fixed(6, 2)))", qk_ratio=0.5, precision="bfloat16")
    cache = Cache(small, 3, value_dtype=torch.bfloat16)
    assert cache.bytes == 3 * cache_bytes(small)


def test_the_text_network_keeps_a_quarter_of_a_dense_one():
    """12,288 positions of 32 cells in 128, and the block under way."""
    sparse, dense = (cache_bytes(preset(name)) for name in ("enwik8", "enwik8-dense"))
    assert sparse / dense == (96 * 32 + 128) / 12_288


def test_a_shorter_sequence_needs_less():
    assert cache_bytes(preset("enwik8"), length=256) == 30 * (4 + 2) * 512 * (2 * 32 + 128)


def test_slots_are_made_once():
    small = config()
    assert slots(small.patterns(0)[0], 24) is slots(small.patterns(0)[1], 24)


def test_few_tables_of_long_prompts_are_kept(monkeypatch):
    monkeypatch.setattr("longstride.model.cache.TABLE_POSITIONS", 30)
    cache = Cache(config())
    for n in (4, 24, 6, 4, 20, 23):
        cache.kept_slots([0], [n], n)
        assert sum(cache._tables) <= 30
    for n in (4, 6, 8, 12):
        cache.kept_slots([0], [n], n)
    assert list(cache._tables) == [4, 6, 8, 12]
