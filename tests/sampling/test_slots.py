"""The slots that a kernel lists, against those of `model.slots`; in Triton's interpreter, or on a GPU."""

import pytest
import torch

from longstride.model.slots import Slots
from longstride.patterns import Block, Column, Dense, Dilated, Local, Summary
from longstride.sampling.kernels.slots import list_seen, table

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PATTERNS = [
    Local(5),
    Column(4),
    Dense(),
    Dilated(3, 10),
    Block(6),
    Summary(6, 2, 1),
    Block(6) | Summary(6, 2),
    Local(4) | Column(4),
    Local(3) | Block(5) | Summary(7, 3),
    Summary(6, 2) | Summary(4, 1),
    Summary(2**40, 2**40 - 9),
    Summary(2**40, 2**39),
    Local(2**40) | Summary(6, 2),
    Block(2**40),
    Dilated(2**40, 2**40),
]


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_lists_what_a_query_sees(pattern):
    context = 23
    heads = [Slots(pattern, context), Slots(Local(2), context)]
    leaves = max(len(head.pattern.leaves) for head in heads)
    most = max(head.most for head in heads)
    first, steps = 4, context - 4
    seen = torch.full((steps, 2, most), -9, dtype=torch.int32, device=DEVICE)
    counts, own = (torch.full((steps, 2), -9, dtype=torch.int32, device=DEVICE) for _ in range(2))
    position = torch.tensor([first], dtype=torch.int32, device=DEVICE)
    list_seen[(steps * 2, -(-most // 8))](
        table(heads, leaves).to(DEVICE), position, seen, counts, own, most, HEADS=2, LEAVES=leaves, BLOCK_SIZE=8
    )
    for step in range(steps):
        for number, head in enumerate(heads):
            listed = seen[step, number, : counts[step, number]].tolist()
            assert -9 not in listed
            assert (seen[step, number, counts[step, number] :] == -1).all()
            found = [slot for slot in listed if slot >= 0]
            itself = int(own[step, number])
            assert sorted(found + [itself] * (itself >= 0)) == sorted(head.seen(first + step).tolist())
            sees_itself = bool(head.pattern.sees(first + step, first + step))
            assert (itself >= 0) == sees_itself
            if sees_itself:
                assert itself == int(head.of(torch.tensor([first + step])))
