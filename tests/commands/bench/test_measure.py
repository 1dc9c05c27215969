import pytest
import torch

from longstride.commands.bench.measure import exponent, peak_bytes, seconds_each

CPU = torch.device("cpu")


def test_peak_is_the_most_that_is_held_at_once():
    def call():
        first = torch.zeros(1000, dtype=torch.float32)
        del first
        second = torch.zeros(3000, dtype=torch.float32)
        third = second + 1
        return second, third

    assert 2 * 3000 * 4 <= peak_bytes(call, CPU) < 2 * 3000 * 4 + 100  # and a few bytes for the 1


def test_calls_take_turns():
    order = []
    times = seconds_each({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, 3, CPU)
    assert order == ["a", "b"] * 4  # once to warm up
    assert times.keys() == {"a", "b"}
    assert all(time >= 0 for time in times.values())


def test_exponent_is_the_slope_of_a_power():
    sizes = [3, 10, 50, 400]
    assert exponent(sizes, [7 * size**1.5 for size in sizes]) == pytest.approx(1.5)
