"""All contenders are measured on one job, so they must give one result."""

import shutil

import pytest
import torch
from torch.nn.attention import SDPBackend, varlen

from longstride import attend
from longstride.commands.bench import peers
from longstride.patterns import Block, Column, Dense, Local, Summary, strided, union

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def inputs(n=256, batch=1):
    return [torch.randn(batch, 2, n, 16) for _ in range(3)]


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="FlexAttention compiles C++")
def test_flex_attention_computes_the_same_pattern():
    pattern = union(*strided(16))
    q, k, v = inputs()
    contender = peers.flex("strided", pattern, 256, CPU)
    with contender.within():
        torch.testing.assert_close(contender.call(q, k, v), attend(q, k, v, pattern))
    assert contender.name == "Flex strided"
    assert not contender.differentiable


def test_flex_attention_is_asked_for_another_backend(monkeypatch):
    asked = []

    def fake(q, k, v, block_mask, **options):
        asked.append((block_mask, options))
        return q

    monkeypatch.setattr(peers.flex_attention, "flex_attention", fake)
    monkeypatch.setattr(peers.flex_attention, "create_block_mask", lambda *_, **__: "mask")
    monkeypatch.setattr(torch, "compile", lambda call, **_: call)
    for backend, options in ((None, {}), ("FLASH", {"kernel_options": {"BACKEND": "FLASH"}})):
        contender = peers.flex("local(4)", Local(4), 256, CUDA, backend)
        contender.call(*inputs())
        assert asked[-1] == ("mask", options)
        assert contender.differentiable
    assert contender.name == "Flex FLASH local(4)"


def test_dense_is_dense():
    q, k, v = inputs()
    (contender,) = peers.dense(CPU)
    torch.testing.assert_close(contender.call(q, k, v), attend(q, k, v, Dense()))


def test_dense_on_a_gpu_is_one_contender_for_each_backend(monkeypatch):
    asked = []
    monkeypatch.setattr(peers, "sdpa_kernel", asked.append)
    contenders = peers.dense(CUDA)
    assert [one.name for one in contenders] == ["SDPA dense", "SDPA dense flash"]
    assert not asked
    for one in contenders:
        one.within()
    assert asked == [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]


@pytest.mark.parametrize("pattern", [Column(16), Block(32)], ids=repr)
def test_a_view_computes_the_same_pattern(pattern):
    q, k, v = inputs()
    view = peers.on_a_view("it", pattern, 256)
    assert view is not None
    assert view.name == "SDPA view it"
    torch.testing.assert_close(view.call(q, k, v), attend(q, k, v, pattern))


def test_there_is_no_view_for_others():
    for pattern, n in ((Local(4), 256), (Dense(), 256), (Column(16), 250), (Block(32), 250)):
        assert peers.on_a_view("it", pattern, n) is None


def plain_varlen(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, *, window_size=(-1, -1)):
    """What torch documents varlen_attn to compute, with a mask: its kernels need a GPU."""
    assert q.is_contiguous()
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    lengths = cu_seq_q.diff()
    assert lengths.max() == max_q == max_k
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    i = torch.arange(len(q))
    back = i[:, None] - i
    left, right = window_size
    sees = (sequence[:, None] == sequence) & (-back <= right) & ((back <= left) | torch.tensor(left == -1))
    by_head = [x.transpose(0, 1) for x in (q, k, v)]
    return torch.nn.functional.scaled_dot_product_attention(*by_head, attn_mask=sees).transpose(0, 1)


@pytest.mark.parametrize("pattern", [Local(7), Local(300), Block(32), Block(24), Block(400)], ids=repr)
def test_varlen_attn_computes_the_same_pattern(monkeypatch, pattern):
    monkeypatch.setattr(varlen, "varlen_attn", plain_varlen)
    q, k, v = inputs(batch=2)
    contender = peers.varlen("it", pattern, 2, 256, CPU)
    assert contender is not None
    output = contender.call(*map(contender.arrange, (q, k, v)))
    torch.testing.assert_close(output, contender.arrange(attend(q, k, v, pattern)))


def test_varlen_attn_has_no_other_pattern():
    for pattern in (Dense(), Column(4), Summary(8, 2), Local(4) | Column(4)):
        assert peers.varlen("it", pattern, 1, 256, CPU) is None


def test_peers_that_cannot_run_are_named_with_a_reason(monkeypatch):
    assert peers.missing(CPU).keys() == {"varlen", "Flex FLASH"}
    monkeypatch.setattr(peers, "find_spec", lambda name: None if name.startswith("flash_attn") else name)
    assert peers.missing(CUDA) == {"Flex FLASH": "its backend, the package flash-attn-4 (flash_attn.cute), is not installed"}
    monkeypatch.setattr(peers, "find_spec", lambda name: name)
    assert peers.missing(CUDA) == {}
    monkeypatch.setattr(varlen, "varlen_attn", lambda q, k, v, is_causal=False: q)  # torch 2.10's
    monkeypatch.delattr(peers.flex_attention, "FlexKernelOptions")
    assert peers.missing(CUDA) == {
        "varlen": f"torch {torch.__version__} has no varlen_attn with a window_size",
        "Flex FLASH": f"FlexAttention of torch {torch.__version__} has no other backends",
    }
