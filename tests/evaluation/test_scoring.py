import json
from itertools import pairwise
from math import fsum, log

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from longstride import bits_per_byte
from longstride.evaluation.scoring import windows_of
from longstride.training.ranks import join_process_group
from tests.model.small import config, model, some_bytes
from tests.training.ranks import start

CONTEXT = config().context
LENGTHS = st.tuples(st.integers(1, 300), st.integers(1, 60)).flatmap(
    lambda pair: st.tuples(st.just(pair[0]), st.just(pair[1]), st.integers(0, pair[1] - 1))
)


@given(LENGTHS)
@example((1, 1, 0))
@example((7, 7, 6))
@example((8, 7, 6))
@example((15, 7, 0))
@example((14, 7, 0))
def test_every_byte_is_scored_once_with_enough_context(case):
    length, context, min_context = case
    windows = windows_of(*case)
    scored = [place for window in windows for place in range(window.first, window.end)]
    assert scored == list(range(length))
    assert {window.end - window.start for window in windows} == {min(length, context)}
    for window in windows[1:]:
        assert window.first - window.start >= min_context
    for before, after in pairwise(windows[:-1]):
        assert after.start - before.start == context - min_context
    assert (windows[0].first, windows[-1].end) == (0, length)


def test_min_context_0_is_windows_side_by_side():
    assert windows_of(12, 4, 0) == [(0, 4, 0), (4, 8, 4), (8, 12, 8)]
    assert windows_of(10, 4, 0) == [(0, 4, 0), (4, 8, 4), (6, 10, 8)]
    assert windows_of(9, 4, 3) == [(0, 4, 0), (1, 5, 4), (2, 6, 5), (3, 7, 6), (4, 8, 7), (5, 9, 8)]


def byte_by_byte(network, data, min_context):
    """For each byte, how many are before it in its window, counted one by one; the window then is computed for it alone."""
    context, seen, total = network.config.context, 0, []
    for place in range(len(data)):
        # A window that is full moves on, and keeps min_context bytes; at the end of the data, more.
        if seen == context:
            seen = max(min_context, context - (len(data) - place))
        window = torch.from_numpy(data[place - seen : place + 1].copy())[None]
        with torch.no_grad():
            total.append(float(network.nats(window)[0, -1]))
        seen += 1
    return fsum(total)


@pytest.mark.parametrize("min_context", [0, 1, 5, 12, 23])
@pytest.mark.parametrize("length", [1, 10, CONTEXT, CONTEXT + 1, 3 * CONTEXT, 77])
@pytest.mark.parametrize("changes", [{}, {"embedding": "rotary", "last_bytes": 3}], ids=str)
def test_agrees_with_scoring_byte_by_byte(length, min_context, changes):
    network = model(**changes).eval()
    data = some_bytes(1, length)[0].to(torch.uint8).numpy()
    found = bits_per_byte(network, data, min_context=min_context, batch=3)
    assert found.nats == pytest.approx(byte_by_byte(network, data, min_context), rel=1e-6)
    assert found.bits_per_byte == found.nats / length / log(2)
    assert (found.bytes, found.min_context) == (length, min_context)
    assert found.windows == len(windows_of(length, CONTEXT, min_context))
    assert found.seconds > 0


def test_more_context_gives_other_bits():
    """Else the test above might compare what does not depend on it."""
    network, data = model(), some_bytes(1, 200)[0].to(torch.uint8)
    assert len({bits_per_byte(network, data, min_context=least).nats for least in (0, 5, 12, 23)}) == 4


def test_an_untrained_model_needs_8_bits():
    assert bits_per_byte(model(output=False), bytes(range(256))).bits_per_byte == pytest.approx(8, rel=1e-6)


def test_the_batch_changes_nothing_but_rounding():
    network, data = model(), some_bytes(1, 500)[0].to(torch.uint8)
    one, *others = [bits_per_byte(network, data, min_context=16, batch=batch).nats for batch in (1, 2, 7, 50, 1000)]
    assert others == [pytest.approx(one, rel=1e-7)] * 4


def test_the_same_bits_for_any_batch():
    """On a CPU, where windows of such a size round the same in any company; so nothing else depends on the batch."""
    network = model(context=32, width=32, embedding="matrix(8)", pattern="merged(fixed(8, 2))")
    data = some_bytes(1, 1000)[0].to(torch.uint8)
    assert len({bits_per_byte(network, data, min_context=24, batch=batch).nats for batch in (1, 2, 7, 50, 1000)}) == 1


def test_all_passes_have_one_shape():
    """A compiled model is compiled once. 13 windows are 4 passes of at most 4, as even as can be."""
    network, shapes = model(), []
    nats = network.nats
    network.nats = lambda tokens: (shapes.append(tuple(tokens.shape)), nats(tokens))[1]
    assert bits_per_byte(network, bytes(13 * CONTEXT), batch=4).windows == 13
    assert shapes == [(4, CONTEXT)] * 4
    shapes.clear()
    bits_per_byte(network, bytes(9 * CONTEXT), batch=8)
    assert shapes == [(5, CONTEXT)] * 2


def test_items_are_scored_each_from_nothing():
    network = model()
    images = some_bytes(5, CONTEXT).to(torch.uint8)
    with torch.no_grad():
        wanted = float(network.eval().nats(images).double().sum())
    for data in (images, images.view(5, 2, 4, 3), images.numpy()):
        found = bits_per_byte(network, data, batch=2)
        assert found.nats == pytest.approx(wanted, rel=1e-6)
        assert (found.bytes, found.windows) == (5 * CONTEXT, 5)
    assert bits_per_byte(network, images[:, :10]).windows == 5  # Shorter ones, too: never two in a window.


@pytest.mark.parametrize("training", [True, False])
def test_without_dropout_and_the_mode_is_as_before(training):
    network = model(dropout=0.5).train(training)
    data = some_bytes(1, 100)[0].to(torch.uint8)
    assert bits_per_byte(network, data).nats == bits_per_byte(network, data).nats
    assert network.training is training
    assert all(x.grad is None for x in network.parameters())

    def fails(tokens):
        raise RuntimeError("broken")

    network.nats = fails
    with pytest.raises(RuntimeError, match="broken"):
        bits_per_byte(network, data)
    assert network.training is training


def test_bytes_arrays_and_tensors_are_the_same():
    network, data = model(), np.arange(90, dtype=np.uint8)
    found = [bits_per_byte(network, one).nats for one in (data, torch.from_numpy(data), data.tobytes(), bytearray(data))]
    assert len(set(found)) == 1


def test_progress_ends_with_the_result():
    told = []
    found = bits_per_byte(model(), bytes(230), min_context=7, batch=4, progress=lambda *given: told.append(given))
    shares, scored, nats = zip(*told)
    assert shares == (1 / 4, 2 / 4, 3 / 4, 1.0)
    assert scored[-1] == 230  # 14 windows, of which the last is computed three times.
    assert list(scored) == sorted(scored)
    assert nats[-1] == pytest.approx(found.nats)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"min_context": CONTEXT}, "min_context must be less than the model's context = 24, got 24"),
        ({"min_context": -1}, "min_context must be at least 0, got -1"),
        ({"min_context": 1.5}, "min_context must be a whole number"),
        ({"batch": 0}, "batch must be at least 1, got 0"),
        ({"data": b""}, "data must have at least one byte"),
        ({"data": torch.zeros(3)}, r"array or tensor of uint8, got float32 \[3\]"),
        ({"data": "text"}, "data must be bytes, or an array or tensor of uint8, got str"),
        ({"data": np.zeros((2, 25), np.uint8)}, "data has items of 25 bytes, and the model's context is 24"),
        ({"data": np.zeros((2, 24), np.uint8), "min_context": 3}, "min_context is for streams, got 3 with items"),
    ],
)
def test_mistakes(given, says):
    with pytest.raises(ValueError, match=f"bits_per_byte: .*{says}"):
        bits_per_byte(model(), given.pop("data", bytes(100)), **given)


def test_what_is_not_finite_is_an_error():
    network = model()
    with torch.no_grad():
        network.embedding.token.weight[7] = float("nan")
    data = np.zeros(100, np.uint8)
    data[50] = 7
    with pytest.raises(FloatingPointError, match="bytes 48 to 71 have nan nats; the model has weights that are not finite"):
        bits_per_byte(network, data, batch=1)


@pytest.mark.parametrize(
    ("precision", "says"),
    [("float16", "the model's precision is float16, and float32 may do"), ("float32", "too large for float32")],
)
def test_weights_that_are_too_large_for_a_precision(precision, says):
    network = model(precision=precision)
    with torch.no_grad():
        network.blocks[0].ff.outer.weight *= 1e30
        network.norm.weight *= 1e30
    with pytest.raises(FloatingPointError, match=says):
        bits_per_byte(network, np.arange(100, dtype=np.uint8))


def test_an_image_alone_is_not_taken_for_items():
    """Its rows would be scored as items, each from nothing."""
    network = model(context=24, embedding="image(4, 2, 3)")
    images = np.arange(48, dtype=np.uint8).reshape(2, 4, 2, 3)
    wanted = bits_per_byte(network, images[:1])
    assert bits_per_byte(network, images[:1].reshape(1, 24)).nats == wanted.nats
    with pytest.raises(ValueError, match=r"\[images, 4, 2, 3\] .* got \[4, 2, 3\]; one image alone is image\[None\]"):
        bits_per_byte(network, images[0])


def test_grey_images():
    network = model(context=8, embedding="image(4, 2, 1)")
    images = np.arange(16, dtype=np.uint8).reshape(2, 4, 2)
    assert bits_per_byte(network, images).nats == bits_per_byte(network, images[..., None]).nats


def shared(lengths):
    """Bits of several streams, as processes share them, and which windows this one computed."""
    network = model(context=32, width=32, embedding="matrix(8)", pattern="merged(fixed(8, 2))")
    found, computed = [], []
    nats = network.nats
    network.nats = lambda tokens: (computed.append(len(tokens)), nats(tokens))[1]
    with join_process_group("cpu") as ranks:
        for length in lengths:
            data = some_bytes(1, length)[0].to(torch.uint8)
            found.append(bits_per_byte(network, data, min_context=20, batch=3, ranks=ranks).nats)
    return [found, computed]


def test_processes_share_the_windows_and_agree_to_the_bit():
    """Also where there are fewer windows than processes; and all do the same number of passes of one shape."""
    lengths = [1, 30, 40, 100, 333, 500]
    alone, computed = shared(lengths)
    for ranks in (2, 3):
        done = start(shared, lengths, ranks=ranks)
        assert [one.found[0] for one in done] == [alone] * ranks
        assert len({json.dumps(one.found[1]) for one in done}) == 1
        assert sum(done[0].found[1]) < 0.7 * sum(computed)
