import torch

from longstride.model.embedding import Embedding
from tests.model.small import config, model, some_bytes


def test_a_slot_carries_the_byte_before_it_and_its_own_position():
    embedding: Embedding = model(context=12, embedding="image(2, 2, 3)").embedding
    tokens = some_bytes(1, 12)
    found = embedding(tokens)[0]
    for slot, (row, column, channel) in {0: (0, 0, 0), 1: (0, 0, 1), 7: (1, 0, 1), 11: (1, 1, 2)}.items():
        before = embedding.start if slot == 0 else embedding.token.weight[tokens[0, slot - 1]]
        place = embedding.position
        there = place["row"].weight[row] + place["column"].weight[column] + place["channel"].weight[channel]
        torch.testing.assert_close(found[slot], before + there)


def test_a_shorter_sequence_is_a_prefix():
    embedding = model().embedding
    tokens = some_bytes()
    assert torch.equal(embedding(tokens)[:, :7], embedding(tokens[:, :7]))


def test_any_kind_of_whole_numbers():
    embedding = model().embedding
    tokens = some_bytes()
    assert torch.equal(embedding(tokens), embedding(tokens.to(torch.uint8)))


def test_dimensions_have_names():
    assert list(Embedding(config()).position) == ["row", "column"]
