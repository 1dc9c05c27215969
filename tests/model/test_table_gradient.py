import pytest
import torch

from longstride.model import table_gradient
from longstride.model.table_gradient import sums_by_index

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def exact(x, index, rows):
    return torch.zeros(rows, x.shape[1], dtype=torch.float64, device=x.device).index_add_(0, index, x.double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bytes_of_one_hot", [2**26, 2**10])
def test_sums_by_index(dtype, bytes_of_one_hot, monkeypatch):
    """As near to the exact sums as float32 is, also in several products."""
    monkeypatch.setattr(table_gradient, "ONE_HOT_BYTES", bytes_of_one_hot)
    x = (torch.randn(500, 12) * 10 ** torch.linspace(-3, 3, 12)).to(DEVICE, dtype)
    index = torch.randint(-1, 7, (500, 2), device=DEVICE)
    found = sums_by_index(x, index, 9)
    assert (found.dtype, found.shape) == (torch.float32, (2, 9, 12))
    for column, sums in enumerate(found):
        used = index[:, column] >= 0
        given = x[used], index[used, column], 9
        assert not sums[7:].any()
        assert ((sums - exact(*given)).abs() <= 2**-22 * exact(given[0].abs(), *given[1:])).all()


def test_no_indices_sum_to_zero():
    index = torch.zeros(0, 1, dtype=torch.long)
    assert torch.equal(sums_by_index(torch.ones(0, 3), index, 2), torch.zeros(1, 2, 3))
