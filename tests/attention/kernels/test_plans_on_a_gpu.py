"""Plans on a GPU: launched by the CUDA driver after the first call, and with the same results as by Triton."""

import threading

import pytest
import torch

pytest.importorskip("triton")

from longstride import attend
from longstride.attention.kernels.general import _tables
from longstride.attention.kernels.launch import _plans, forget_plans
from longstride.patterns import Block, Column, Local, Summary, fixed, strided, union

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
PATTERNS = [Local(60), Column(16), Block(100), Summary(64, 8), union(*strided(64)), union(*fixed(64, 8)), Local(300)]


def inputs(n=500, d=64, heads=2, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    shape = 2, n, heads, d
    return [
        torch.randn(shape, generator=generator, device="cuda").bfloat16().transpose(1, 2).requires_grad_() for _ in range(3)
    ]


def run(q, k, v, pattern):
    output = attend(q, k, v, pattern)
    return output, *torch.autograd.grad(output.float().square().sum(), (q, k, v))


def assert_equal(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("d", [64, 24])
@pytest.mark.parametrize("pattern", PATTERNS, ids=repr)
def test_the_driver_launches_what_triton_does(pattern, d):
    data, other = inputs(d=d), inputs(d=d, seed=1)
    forget_plans()
    first, first_of_other = run(*data, pattern), None
    assert all(plan.ready is not None for plan in _plans.values())
    second = run(*data, pattern)
    later = run(*other, pattern)
    forget_plans()
    first_of_other = run(*other, pattern)
    assert_equal(first, second)
    assert_equal(later, first_of_other)


def test_tensors_that_are_not_aligned_go_through_triton():
    memory = torch.randn(3, 2 * 2 * 100 * 64 + 1, device="cuda").half()
    aligned = [x[:-1].view(2, 2, 100, 64) for x in memory]
    shifted = [x[1:].view(2, 2, 100, 64).copy_(y.clone()) for x, y in zip(memory.clone(), aligned)]
    for pattern in (Local(20), Column(7)):
        for _ in range(2):
            assert_equal([attend(*shifted, pattern)], [attend(*aligned, pattern)])


@pytest.mark.parametrize("pattern", [union(*strided(64)), union(*fixed(64, 8)), [Local(20), Column(9)]], ids=repr)
def test_a_first_call_inside_a_capture(pattern):
    data = inputs(n=333)
    static = [x.detach().clone() for x in data]
    torch.cuda.synchronize()
    forget_plans()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = attend(*static, pattern)
    forget_plans()  # The graph still reads their tables. If these were freed, the next tensors would take their memory.
    _tables.cache_clear()
    taken = [torch.full((128,), -1, dtype=torch.int32, device="cuda") for _ in range(100)]
    for seed in (2, 3):
        fresh = inputs(n=333, seed=seed)
        for x, y in zip(static, fresh):
            x.copy_(y.detach())
        graph.replay()
        assert_equal([output], [attend(*[x.detach() for x in fresh], pattern)])
    del taken


def test_forward_and_backward_in_a_graph():
    pattern = union(*strided(64))
    static = [x.detach().clone().requires_grad_() for x in inputs()]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run(*static, pattern)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run(*static, pattern)
    for seed in (2, 3):
        fresh = inputs(seed=seed)
        with torch.no_grad():
            for x, y in zip(static, fresh):
                x.copy_(y)
        graph.replay()
        assert_equal(results, run(*fresh, pattern))


def test_threads_share_a_plan():
    pattern = union(*strided(64))
    data = [inputs(seed=seed) for seed in range(4)]
    expected = [run(*x, pattern) for x in data]
    wrong = []

    def work(index):
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(30):
                found = run(*data[index], pattern)
                torch.cuda.current_stream().synchronize()
                if not all(torch.equal(a, b) for a, b in zip(found, expected[index])):
                    wrong.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_compiled_and_eager_agree():
    pattern = union(*fixed(64, 8))
    data = inputs()
    compiled = torch.compile(lambda q, k, v: attend(q, k, v, pattern), fullgraph=True)
    output = compiled(*data)
    gradients = torch.autograd.grad(output.float().square().sum(), data)
    assert_equal((output, *gradients), run(*data, pattern))
