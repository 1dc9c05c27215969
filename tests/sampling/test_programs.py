"""The kernel that makes many bytes, with several programs that wait for each other, in Triton's interpreter."""

import pytest
import torch

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("on a GPU programs run side by side anyway", allow_module_level=True)

from longstride.sampling import resident
from tests.model.small import model
from tests.sampling.programs import side_by_side
from tests.sampling.test_kernels import compare


@pytest.mark.parametrize(("programs", "batch", "seed"), [(2, 1, 0), (4, 2, 1), (8, 1, 2)])
@pytest.mark.parametrize("pattern", ["interleave(strided(3))", "distinct(merged(fixed(4, 1)))"])
def test_the_same_bytes(pattern, programs, batch, seed):
    with side_by_side(programs, seed):
        compare(model(pattern=pattern, layers=2, context=14, width=8), "resident", 3, 6, batch=batch)


def test_programs_that_attend_and_nothing_else(monkeypatch):
    monkeypatch.setattr(resident, "LONGEST_CHUNK", 2)
    monkeypatch.setattr(resident, "FEW_CHUNKS", 1)
    monkeypatch.setattr(resident, "CHUNKS", (2, 3))
    monkeypatch.setattr(resident, "PAUSE", 0)  # The interpreter has no inline assembly.
    with side_by_side(4):
        compare(model(pattern="dense()", layers=2, context=24, width=8), "resident", 14, 5, batch=1)
