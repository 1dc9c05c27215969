"""The kernels that make bytes, against plain PyTorch: in Triton's interpreter, where programs run one after the other and so
there is one of them, or on a GPU."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from longstride.model import SparseTransformer, preset
from longstride.sampling import batched, generate, resident
from longstride.sampling.batched import BatchedStreams, in_terms
from longstride.sampling.decoder import TorchStreams
from longstride.sampling.kernels.arguments import Partition, ProductSizes
from longstride.sampling.kernels.cached_attention import constants
from longstride.sampling.params import SamplingParams
from longstride.sampling.resident import ResidentStreams, fits
from longstride.sampling.sampler import random_state
from longstride.sampling.streams import choose_implementation, open_streams
from tests.model.small import config, model, some_bytes

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
UNCHANGED = SamplingParams()
MAKERS = {"resident": ResidentStreams, "batched": BatchedStreams}


def stir(made):
    """Biases begin as zeros, and norms as ones and zeros: forgotten ones would not show."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() == 1:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)


def compare(made, maker, prompt, steps, choice=UNCHANGED, batch=2, length=None, given=2, tolerance=1e-4, every=2):
    """All bytes are the same, and the last ones' logits near; every second stream, or all, are given some bytes more."""
    stir(made)
    made = made.to(DEVICE)
    length = made.config.context if length is None else length
    tokens = some_bytes(batch, prompt + given).to(torch.uint8).to(DEVICE)
    more = [number % every == every - 1 for number in range(batch)]
    known = torch.tensor([prompt + given * is_given for is_given in more], dtype=torch.int32, device=DEVICE)
    state = random_state(9, torch.arange(batch, device=DEVICE))
    found, logits = [], []
    for make in (TorchStreams, MAKERS[maker]):
        streams = make(made, batch, length)
        streams.tokens[:, : prompt + given] = tokens
        streams.prefill(tokens[:, :prompt])
        pieces = [streams.extend(some, known, state, choice) for some in (steps - 2, 2)]
        assert streams.position == prompt + steps
        found.append(torch.cat(pieces, 1).cpu())
        logits.append(streams.logits.cpu())
    assert torch.equal(*found)
    assert torch.equal(found[1][more, :given], tokens[more, prompt : prompt + steps].cpu())
    torch.testing.assert_close(logits[1], logits[0], atol=tolerance, rtol=0)


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(
    "pattern", ["interleave(strided(3))", "distinct(merged(fixed(4, 1)))", "heads(local(2), summary(4, 2))", "dense()"]
)
def test_the_same_bytes(maker, batch, pattern):
    """One stream has some numbers earlier than several have."""
    compare(model(pattern=pattern, layers=2, context=14, width=8), maker, 3, 8, batch=batch)


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("pattern", ["dense()", "merged(fixed(4, 2))"])
def test_more_keys_than_a_tile_has(maker, pattern, monkeypatch):
    monkeypatch.setattr(batched, "TILE", 2)
    monkeypatch.setattr(batched, "PROGRAMS", 8)  # Two for each of two streams' heads.
    monkeypatch.setattr(resident, "LONGEST_CHUNK", 2)
    monkeypatch.setattr(resident, "CHUNKS", (1, 3))
    compare(model(pattern=pattern, layers=1, context=24, width=8), maker, 16, 6)


@pytest.mark.parametrize("maker", MAKERS)
def test_scores_far_apart(maker, monkeypatch):
    """Weights that are not taken beside the largest would overflow."""
    monkeypatch.setattr(batched, "TILE", 2)
    monkeypatch.setattr(resident, "LONGEST_CHUNK", 2)
    monkeypatch.setattr(resident, "CHUNKS", (3,))
    made = model(pattern="dense()", layers=1, context=24, width=8)
    with torch.no_grad():
        made.blocks[0].attention.query_key_value.weight[:16] *= 300
    compare(made, maker, 16, 6)


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
@pytest.mark.parametrize("maker", MAKERS)
def test_a_value_that_is_not_kept_does_not_count(maker):
    """Even if it is too large for the precision: 0 times infinity is not 0."""
    made = model(pattern="heads(local(2), summary(4, 1))", layers=1, context=9, width=8, precision="float16")
    with torch.no_grad():
        weight = made.blocks[0].attention.query_key_value.weight
        weight[-4:] = 5e4 * weight[-4:].sign()  # Of values of the second head, which keeps every fourth.
    compare(made, maker, 0, 3)


@pytest.mark.parametrize("maker", MAKERS)
def test_activations_far_from_zero(maker):
    """Of which a norm leaves the differences: those of their squares would be lost in rounding."""
    made = model(layers=1, context=9, width=8)
    with torch.no_grad():
        made.embedding.token.weight += 1000
        made.embedding.start += 1000
    # One stream is given all bytes: so that none depends on how 1000 is rounded.
    compare(made, maker, 1, 5, batch=2, given=5, tolerance=0.01)


@pytest.mark.parametrize("maker", MAKERS)
def test_from_nothing_and_for_sizes_that_are_no_powers_of_two(maker):
    compare(model(layers=1, context=9, width=12, heads=3, qk_ratio=0.5, ff_ratio=1.5), maker, 0, 5)


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize(
    "params", [SamplingParams(0.7, top_k=3), SamplingParams(top_p=0.6), SamplingParams(2.0, 40, 0.9)], ids=str
)
def test_filters_leave_the_same_bytes(maker, params):
    compare(model(layers=1, context=9, width=8), maker, 1, 5, params)


@pytest.mark.parametrize("of", [1, 2, 3])
@pytest.mark.parametrize("activate", [False, True])
@pytest.mark.parametrize(
    ("rows", "columns", "share", "block"),
    [(16, 16, 256, 16), (16, 32, 32, 16), (32, 16, 64, 32), (64, 64, 256, 64), (64, 32, 128, 64)],
)
def test_a_product(rows, columns, share, block, activate, of):
    """Of sizes that are no multiples of a program's: 70 streams, 200 numbers each, to 41. In the interpreter, which is
    silently wrong for bfloat16, parts are float16."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if GPU else torch.float16
    x, bias = torch.randn(1, 70, 200), torch.randn(41)
    split = in_terms(torch.randn(1, 41, 200), of, dtype)[0]
    weight = split.double().sum(0)
    x, parts = x[0], in_terms(x, 3, dtype)[0]
    share = 256 if activate else share
    shares = -(-200 // share)
    # What is there before is not added to, and nothing past the end is written.
    out = torch.full((3 if activate else shares, 70, 41), 7.0, device=DEVICE, dtype=dtype if activate else None)
    guard = torch.cat([out.flatten(), torch.full((64,), 5.0, device=DEVICE, dtype=out.dtype)])
    batched.multiply[(-(-70 // rows), -(-41 // columns), shares)](
        parts.to(DEVICE), split.to(DEVICE), bias.to(DEVICE), guard, 70,
        SIZES=constants(ProductSizes(200, 41, 3, of, rows, columns, share, block)), ACTIVATE=activate,
    )  # fmt: skip
    wanted = x.double() @ weight.T
    if activate:
        wanted = wanted + bias
        wanted *= torch.sigmoid(1.702 * wanted)
    found = guard[: out.numel()].view_as(out).cpu().double()
    torch.testing.assert_close(found.sum(0), wanted, atol=1e-4, rtol=1e-6)
    assert (guard[out.numel() :] == 5).all()
    if not activate:
        torch.testing.assert_close(found[0], x[:, :share].double() @ weight[:, :share].T, atol=1e-4, rtol=1e-6)


@pytest.mark.parametrize("of", [1, 2, 3])
def test_which_parts_are_multiplied(of):
    """Small whole numbers, so that all sums are exact."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if GPU else torch.float16
    x, weight = (torch.randint(-4, 5, size, device=DEVICE).to(dtype) for size in ((3, 16, 32), (of, 16, 32)))
    out = torch.zeros(1, 16, 16, device=DEVICE)
    batched.multiply[(1, 1, 1)](
        x, weight, weight, out, 16, SIZES=constants(ProductSizes(32, 16, 3, of, 16, 16, 32, 16)), ACTIVATE=False
    )
    pairs = [(part, other) for part in range(3) for other in range(of) if part + other < 3]
    wanted = sum(x[part].double() @ weight[other].double().T for part, other in pairs)
    assert torch.equal(out[0].double(), wanted)


def test_products_that_programs_share(monkeypatch):
    monkeypatch.setattr(batched, "BLOCK_IN", 16)
    monkeypatch.setattr(batched, "LEAST_SHARE", 16)
    assert batched.product_tile(2, 32, 32, whole=False)[2] == 16
    compare(model(layers=2, context=9, width=32), "batched", 1, 5)


def test_how_programs_share_products():
    """enwik8's: queries, keys and values; the projection; the inner and the outer layer."""

    def tiles(batch):
        sizes = ((512, 1536, False), (512, 512, False), (512, 2048, True), (2048, 512, False))
        return [batched.product_tile(batch, *size) for size in sizes]

    assert tiles(9) == [(16, 64, 128), (16, 16, 128), (16, 16, 512), (16, 32, 256)]
    assert tiles(64) == [(64, 64, 128), (64, 16, 128), (64, 16, 512), (64, 32, 256)]
    assert tiles(256) == [(64, 64, 512), (64, 64, 128), (64, 64, 512), (64, 64, 512)]
    assert batched.product_tile(9, 12, 32, whole=False) == (16, 16, 64)


@pytest.mark.parametrize(("precision", "parts"), [("float32", 3), ("float64", 3), ("bfloat16", 1), ("float16", 2)])
def test_parts_are_as_good_as_float32(precision, parts):
    """None of the weights' bits is lost. In the interpreter, parts are float32 and all but the first of them zeros."""
    made = model(layers=2, context=40, precision=precision)
    if GPU or precision != "bfloat16":  # For which the interpreter is silently wrong.
        half = precision in ("bfloat16", "float16")
        count = 30 if GPU else 8  # The interpreter takes half a second for each.
        compare(made, "batched", 5, count, given=count, tolerance=0.01 if half else 1e-4, every=1)
    streams = BatchedStreams(made.to(DEVICE), 2, 40)
    weight = streams.weights.blocks.inner.weight
    assert weight.shape[1] == parts
    assert torch.equal(weight.double().sum(1)[1], streams.model.blocks[1].ff.inner.weight.double())


def lively(name, precision="float32"):
    """A preset with the paper's recipe whose bytes are not all equally likely."""
    torch.manual_seed(0)
    made = SparseTransformer(replace(preset(name, "paper"), precision=precision))
    torch.nn.init.normal_(made.output.weight, std=0.1)
    return made


@pytest.mark.skipif(not GPU, reason="needs a GPU")
@pytest.mark.parametrize(("maker", "batch"), [("resident", 1), ("resident", 4), ("batched", 1), ("batched", 12)])
@pytest.mark.parametrize("name", ["enwik8", "cifar10", "music-65536", "text-small", "image-small"])
def test_presets_on_a_gpu(name, maker, batch):
    """Past the end of a stride, of 32, 128 or 256."""
    compare(lively(name), maker, 250, 20, batch=batch, length=300)


@pytest.mark.skipif(not GPU, reason="needs a GPU")
@pytest.mark.parametrize(("maker", "batch"), [("resident", 1), ("batched", 12), ("batched", 40), ("batched", 70)])
@pytest.mark.parametrize("name", ["enwik8", "cifar10", "music-65536"])
def test_presets_in_half_precision_on_a_gpu(name, maker, batch):
    """The last bit of a number decides to which side a value is rounded when it is kept: on a CPU, another last bit of the
    embedding moves these logits by up to 0.007."""
    compare(lively(name, "bfloat16"), maker, 250, 20, batch=batch, length=300, given=20, tolerance=0.03, every=1)


@pytest.mark.skipif(not GPU, reason="needs a GPU")
@pytest.mark.parametrize(("maker", "batch"), [("resident", 1), ("resident", 3), ("resident", 8), ("batched", 1)])
@pytest.mark.parametrize("prompt", [1_000, 5_000, 12_150])
def test_far_into_a_text_on_a_gpu(maker, batch, prompt):
    """Where there are attention programs, or eight warps (for eight streams), where there are more keys than are loaded
    beforehand, and at the end of the context."""
    compare(lively("enwik8"), maker, prompt, 138, batch=batch, length=12_288)


@pytest.mark.skipif(not GPU, reason="needs a GPU")
@pytest.mark.parametrize(("maker", "batch"), [("resident", 1), ("resident", 2), ("batched", 9)])
def test_far_into_a_text_in_half_precision_on_a_gpu(maker, batch):
    compare(
        lively("enwik8", "bfloat16"), maker, 12_100, 30, batch=batch, length=12_288, given=30, tolerance=0.03, every=1
    )  # fmt: skip


@pytest.mark.skipif(not GPU, reason="needs a GPU")
def test_heads_that_take_turns_on_a_gpu():
    """Of five streams' heads, each of a group of four programs has some."""
    made = model(width=320, heads=20, layers=2, context=300, pattern="dense()")
    partition, splits, _ = resident._partition(made.config, 5, 128)
    assert (partition.group, splits) == (4, 1)
    compare(made, "resident", 250, 20, batch=5)


@pytest.mark.skipif(not GPU, reason="needs a GPU")
def test_the_same_samples_whatever_the_batch_on_a_gpu():
    """By one kernel or a graph of products, in more pieces than one."""
    made = lively("text-small").to(DEVICE)
    prompts = [bytes([65 + number % 26]) for number in range(64)]
    found = [[b"".join(pieces) for pieces in zip(*generate(made, prompts[:count], 300, seed=3))] for count in (1, 8, 9, 64)]
    assert all(samples == found[-1][: len(samples)] for samples in found)


@pytest.mark.skipif(not GPU, reason="needs a GPU")
def test_the_same_bits_a_hundred_times():
    made = model(context=600, width=64, layers=4).to(DEVICE)
    known, state = torch.zeros(2, dtype=torch.int32, device=DEVICE), random_state(1, torch.arange(2, device=DEVICE))
    found = set()
    for _ in range(100):
        streams = ResidentStreams(made, 2, 600)
        streams.extend(50, known, state, SamplingParams())
        found.add(streams.logits.cpu().numpy().tobytes())
    assert len(found) == 1


@pytest.mark.skipif(not GPU, reason="needs a GPU")
def test_the_same_bits_with_attention_programs():
    """Within one block of 128, so that what is made again does not overwrite what it looks at."""
    made = lively("enwik8", "bfloat16").to(DEVICE)
    known, state = torch.zeros(1, dtype=torch.int32, device=DEVICE), random_state(1, torch.arange(1, device=DEVICE))
    streams = ResidentStreams(made, 1, 12_288)
    each = streams.tables.most_between(12_050, 12_069) // streams.splits
    assert resident._key_split(made.config, streams.workers, streams.warps, streams.splits, each).has_attention_programs
    streams.prefill(some_bytes(1, 12_050).to(torch.uint8).to(DEVICE))
    last_bytes, found = streams.last_bytes.clone(), set()
    for _ in range(100):
        streams.position = 12_050
        streams.last_bytes.copy_(last_bytes)
        made_bytes = streams.extend(20, known, state, SamplingParams()).cpu()
        found.add(streams.logits.cpu().numpy().tobytes() + made_bytes.numpy().tobytes())
    assert len(found) == 1


def test_how_programs_share_the_work():
    """enwik8: 8 heads of 64, W = 512, F = 2048."""
    partition, splits, held = resident._partition(preset("enwik8"), 1, 128)
    assert partition == Partition(
        1, 128, 16, 8, 1, 1, qkv_rows=16, project_rows=32, inner_rows=16, outer_rows=4, logit_rows=2
    )
    assert (splits, held) == (16, 16 * 512)
    # Eight streams: two programs attend to a head of each, and project it.
    partition, splits, _ = resident._partition(preset("enwik8"), 8, 128)
    assert (partition.group, splits, partition.part_turns) == (16, 2, 1)
    # Three heads: a group of the largest power of two, and each head has one.
    partition, splits, _ = resident._partition(config(width=12, heads=3), 1, 8)
    assert (partition.group, splits, partition.groups, partition.head_turns) == (2, 2, 4, 1)


def test_how_programs_share_keys():
    """enwik8: a chunk is 16 keys of 256 bytes and values of 128, for four warps."""
    enwik8 = preset("enwik8")

    def key_split(each, workers=128, warps=4, config=enwik8):
        split = resident._key_split(config, workers, warps, 16, each)
        return split.chunks, split.chunk, split.has_attention_programs, split.has_remaining

    assert key_split(7) == (1, 16, False, False)
    assert key_split(64) == (4, 16, False, False)
    assert key_split(65) == (7, 16, True, False)
    assert key_split(194) == (13, 16, True, False)
    assert key_split(256) == (16, 16, True, False)
    assert key_split(257) == (16, 16, True, True)
    # Eight warps for large matrices: chunks are of 32, and there is no room for others.
    assert key_split(194, warps=8) == (7, 32, False, False)
    assert key_split(194, workers=1) == (13, 16, False, False)
    # Values of 256 bytes: not more than a program can have.
    assert key_split(194, config=preset("cifar10")) == (10, 16, True, True)


def test_kernels_compile_for_an_h200():
    """The interpreter accepts more than the compiler does. With few parameters, as `arguments.py` groups them."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.sampling.ahead_of_time"], cwd=Path(__file__).parents[2],
        env={**os.environ, "TRITON_INTERPRET": "0"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    parameters = json.loads(done.stdout)
    assert parameters.keys() == {
        "make_bytes", "list_seen", "begin_step", "multiply", "add_and_normalize", "attend_cached", "merge_parts", "end_step",
        "end_placed_step",
    }  # fmt: skip
    assert max(parameters.values()) <= 15


def test_who_makes_the_bytes():
    assert choose_implementation(config(), 1, torch.device("cpu"))[0] == "pytorch"
    assert isinstance(open_streams(model(), 1, 24), TorchStreams)
    if GPU:
        assert choose_implementation(preset("enwik8"), 1, DEVICE)[0] == "resident"
        assert choose_implementation(preset("enwik8"), 64, DEVICE)[0] == "batched"
        assert fits(preset("music-65536"), 8, DEVICE)
        assert not fits(config(width=4096, heads=32), 1, DEVICE)
