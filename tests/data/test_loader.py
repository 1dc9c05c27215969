import numpy as np
import pytest
import torch

from longstride.data.loader import Prefetch, Sequences

STREAM = np.arange(1000, dtype=np.int64).astype(np.uint8)


def test_a_batch_is_a_function_of_seed_step_and_rank():
    one, two = Sequences(STREAM, 16), Sequences(STREAM, 16)
    assert np.array_equal(one.batch(3, 7, 8), two.batch(3, 7, 8))
    two.batch(3, 8, 8)
    assert np.array_equal(one.batch(3, 7, 8), two.batch(3, 7, 8))
    assert not np.array_equal(one.starts(3, 7, 8), one.starts(3, 8, 8))
    assert not np.array_equal(one.starts(3, 7, 8), one.starts(4, 7, 8))


@pytest.mark.parametrize("item", [None, 10])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_share_the_same_batch(item, ranks):
    sequences = Sequences(STREAM, 10, item)
    parts = [sequences.batch(0, 5, 8, rank, ranks) for rank in range(ranks)]
    assert np.array_equal(np.concatenate(parts), sequences.batch(0, 5, 8))


def test_windows_are_of_the_stream_and_begin_anywhere():
    sequences = Sequences(STREAM, 16)
    starts = np.concatenate([sequences.starts(0, step, 64) for step in range(200)])
    assert (starts.min(), starts.max()) == (0, 1000 - 16)
    for start, row in zip(sequences.starts(1, 2, 5), sequences.batch(1, 2, 5)):
        assert np.array_equal(row, STREAM[start : start + 16])


def test_every_item_comes_once_before_any_comes_again():
    sequences = Sequences(STREAM, 10, 10)  # 100 items, 30 a step: steps have items of two epochs
    seen = np.concatenate([sequences.starts(0, step, 30) for step in range(20)]) // 10
    for epoch in range(6):
        assert sorted(seen[epoch * 100 : epoch * 100 + 100]) == list(range(100))
    assert not np.array_equal(seen[:100], seen[100:200])


def test_what_is_validated_is_spread_evenly():
    sequences = Sequences(STREAM, 16)
    assert list(sequences.spread(3)) == [0, 30 * 16, 61 * 16]  # of 62 sequences
    assert (np.diff(sequences.spread(5)) >= 15 * 16).all()
    assert len(sequences.spread(10**6)) == 1000 // 16


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="text has 1,000 bytes, less than one sequence of the context = 2,000; give more"):
        Sequences(STREAM, 2000, name="text")
    with pytest.raises(ValueError, match="items of 12 bytes, and the model's context is 10"):
        Sequences(STREAM, 10, 12)
    with pytest.raises(ValueError, match="batch = 6 must be a multiple of the 4 processes"):
        Sequences(STREAM, 10).starts(0, 0, 6, 0, 4)


def test_prefetched_batches_are_those_of_the_steps():
    sequences = Sequences(STREAM, 16)
    with Prefetch(sequences, 0, 4, 10, 20, torch.device("cpu")) as batches:
        found = list(batches)
    assert len(found) == 10
    for step, batch in zip(range(10, 20), found):
        assert np.array_equal(batch.numpy(), sequences.batch(0, step, 4))
    assert batches.waited >= 0


def test_prefetch_ends_when_nobody_wants_more():
    batches = Prefetch(Sequences(STREAM, 16), 0, 4, 0, 10**9, torch.device("cpu"))
    next(iter(batches))
    batches.close()
    assert not batches._thread.is_alive()


def test_what_goes_wrong_while_reading_is_raised_where_the_batch_is_wanted():
    sequences = Sequences(STREAM, 16)
    sequences.at = lambda starts: 1 / 0
    with Prefetch(sequences, 0, 4, 0, 3, torch.device("cpu")) as batches, pytest.raises(ZeroDivisionError):
        next(iter(batches))
