import pytest
import torch

from longstride.model import SparseTransformer
from longstride.model.byte_cost import dense_cache_bytes, kept, keys_seen, slot_bytes, step_bytes, weight_bytes
from longstride.model.cache import Cache, block_slots
from longstride.sampling.decoder import in_float32, make_cache
from tests.model import small

PATTERNS = [
    "interleave(strided(4))",
    "distinct(merged(fixed(4, 2)))",
    "heads(local(3), summary(4, 1))",
    "interleave(fixed(4, 1))",
    "dense()",
    "merged(strided(4))",
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_keys_are_those_that_the_slots_name(pattern):
    config = small.config(pattern=pattern)
    for first, steps in ((0, 1), (5, 4), (23, 1)):
        counted = sum(
            len(head.seen(position))
            for block in range(config.layers)
            for head in block_slots(config, block)
            for position in range(first, first + steps)
        )
        assert keys_seen(config, first, steps) == counted / steps


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_kinds_make_up_the_cache(pattern, precision):
    model = small.model(pattern=pattern, precision=precision, qk_ratio=0.5)
    found = kept(model.config)
    assert sum(one.bytes for one in found) == make_cache(model, 1, model.config.context).bytes
    assert sum(one.heads for one in found) == model.config.layers * model.config.heads
    assert sum(one.heads * one.seen for one in found) == keys_seen(model.config, model.config.context - 1)


def test_a_dense_network_keeps_what_a_dense_cache_would():
    config = small.config(pattern="dense()")
    assert dense_cache_bytes(config) == sum(one.bytes for one in kept(config)) == Cache(config).bytes


def test_what_each_kind_keeps_in_words():
    def words(pattern, **changes):
        return [(repr(one.pattern), one.heads, one.slots) for one in kept(small.config(pattern=pattern, **changes))]

    assert words("interleave(strided(4))") == [("Local(4)", 4, "ring of 5"), ("Column(4)", 2, "all 24")]
    both = [("Block(4) | Summary(4, 2)", 6, "block of 4 + 12 cells")]
    assert words("distinct(merged(fixed(4, 2)))") == both
    assert words("summary(4, 1)", layers=1) == [("Summary(4, 1)", 2, "6 cells")]


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float64"])
def test_weights_are_as_sampling_has_them(precision):
    model = small.model(precision=precision)
    half = [f"blocks.{name}" for name, one in model.blocks.named_parameters() if one.dim() == 2]
    size = 2 if precision == "bfloat16" else 4
    expected = sum(one.numel() * (size if name in half else 4) for name, one in in_float32(model).named_parameters())
    assert weight_bytes(model.config) == expected


def test_a_step_reads_weights_once_and_keys_for_each_stream():
    config = small.config(precision="bfloat16")
    with torch.device("meta"):
        model = SparseTransformer(config)
    tables = 4 * sum(one.numel() for one in model.embedding.parameters())
    one, two = step_bytes(config, 1, 20, 2), step_bytes(config, 2, 20, 2)
    assert two - one == keys_seen(config, 20, 2) * (8 * 4 + 8 * 2) == keys_seen(config, 20, 2) * slot_bytes(config) / 2
    assert one - (two - one) == weight_bytes(config) - tables
