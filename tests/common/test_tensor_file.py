import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from safetensors.torch import save_file as save_theirs

from longstride.common.tensor_file import NAMES, save_file


def some(dtype, *shape):
    x = torch.randn(*shape) * 100
    return x > 0 if dtype == torch.bool else x.abs().to(dtype) if dtype == torch.uint8 else x.to(dtype)


@pytest.mark.parametrize("dtype", NAMES, ids=str)
def test_the_package_reads_the_same_bits(dtype, tmp_path):
    tensors = {
        "whole": some(dtype, 3, 5),
        "number": some(dtype, 1)[0],
        "empty": some(dtype, 0, 4),
        "view": some(dtype, 4, 6).T[1:],
        "odd": some(torch.uint8, 7),
    }
    save_file(tensors, tmp_path / "ours", {"more": "words"})
    found = load_file(tmp_path / "ours")
    assert found.keys() == tensors.keys()
    for name, x in tensors.items():
        assert found[name].dtype == x.dtype
        assert torch.equal(found[name], x)
    with safe_open(tmp_path / "ours", "pt") as file:
        assert file.metadata() == {"more": "words"}


def test_the_file_is_as_long_as_theirs(tmp_path):
    tensors = {"a": torch.randn(3), "b": torch.arange(5), "c": torch.ones(3, dtype=torch.uint8)}
    save_file(tensors, tmp_path / "ours")
    save_theirs(tensors, tmp_path / "theirs")
    ours, theirs = (tmp_path / "ours").read_bytes(), (tmp_path / "theirs").read_bytes()
    assert ours[-(12 + 40 + 3) :] == theirs[-(12 + 40 + 3) :]


def test_no_tensors(tmp_path):
    save_file({}, tmp_path / "none")
    assert load_file(tmp_path / "none") == {}
