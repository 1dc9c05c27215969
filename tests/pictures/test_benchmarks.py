from pathlib import Path

import pytest
from matplotlib.axes import Axes

from longstride.commands.bench.memory_results import MemoryRow
from longstride.commands.bench.results import CallerTimes, Crossing, Row, read_result
from longstride.commands.bench.step_results import PLAIN_DENSE, StepRow
from longstride.pictures.benchmarks import plot_memory, plot_steps, plot_times

KEPT = sorted((Path(__file__).parents[2] / "benchmarks" / "results").glob("attention-*.json"))


@pytest.fixture
def lines(monkeypatch):
    """What was drawn: label, marker and points of each line."""
    drawn = []
    plot = Axes.plot

    def watched(axes, x, y, **options):
        drawn.append((axes.get_subplotspec().num1, options.get("label"), options.get("linestyle"), list(zip(x, y))))
        return plot(axes, x, y, **options)

    monkeypatch.setattr(Axes, "plot", watched)
    return drawn


def rows(**caller):
    return [
        Row(f"n = {n}", n, name, "", n, forward_ms=n / 10, both_ms=n / 3, **caller)
        for n in (64, 128)
        for name in ("a", "Flex a")
    ]


def words(path):
    return [line.split("<!--")[1].split("-->")[0].strip() for line in path.read_text().splitlines() if "<!--" in line]


def test_draws_times_against_length(tmp_path, lines):
    failed = Row("n = 256", 256, "Flex a", "", 256, failure="too long")
    plot_times([*rows(), failed], tmp_path / "times.svg")
    texts = words(tmp_path / "times.svg")
    assert texts.count("a") == texts.count("Flex a") == 1  # in the legend
    assert "milliseconds" in texts
    forward, both = [(64, 6.4), (128, 12.8)], [(64, 64 / 3), (128, 128 / 3)]
    assert lines == [(0, "a", "-", forward), (0, "Flex a", "--", forward), (1, "a", "-", both), (1, "Flex a", "--", both)]


def test_says_which_panels_are_gpu_time_and_which_a_callers(tmp_path, lines):
    given = rows(eager=CallerTimes(0.5, 2.0, 1000.0, 200.0), compiled=CallerTimes(3.0, 4.0))
    crossings = [Crossing("a", "kernels", 128, None, 128), Crossing("a", "caller", None, 64, 128)]
    plot_times(given, tmp_path / "times.svg", on_gpu=True, crossings=crossings)
    texts = words(tmp_path / "times.svg")
    assert "GPU time: kernels alone, ms" in texts
    assert "a caller's time: Python included, ms" in texts
    assert "dotted: compiled with torch.compile; ring: faster than SDPA dense from this n on" in texts
    assert (2, "a", "-", [(64, 1.0), (128, 1.0)]) in lines
    assert (3, "a", ":", [(64, 4.0), (128, 4.0)]) in lines
    assert [line for line in lines if line[1] is None] == [(0, None, None, [(128, 12.8)]), (3, None, None, [(64, 2.0)])]


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.stem)
def test_kept_results_of_earlier_versions_are_drawn(tmp_path, path):
    result = read_result(path)
    plot_times(result.rows, tmp_path / "times.svg", result.on_gpu, result.crossings)
    texts = words(tmp_path / "times.svg")
    assert ("GPU time: kernels alone, ms" in texts) == ("h200" in path.name)


def test_names_are_no_formulas(tmp_path):
    row = Row("n = 4", 4, "$\\frac{", "", 4, 1.0, 2.0)
    plot_times([row], tmp_path / "times.svg")
    assert row.name in words(tmp_path / "times.svg")


def bars(monkeypatch, name):
    """Widths or heights of what Axes.bar or Axes.barh draws."""
    drawn = []
    draw = getattr(Axes, name)
    monkeypatch.setattr(Axes, name, lambda axes, x, y, *rest, **more: (drawn.append(y), draw(axes, x, y, *rest, **more)))
    return drawn


def test_draws_steps_by_network(tmp_path, monkeypatch):
    drawn = bars(monkeypatch, "barh")
    rows = [
        StepRow("enwik8", "enwik8", "x", 8, 12_288, 95_000_000, plain_ms=230.0, captured_ms=210.0, matrix_share=0.5),
        StepRow(PLAIN_DENSE, "enwik8", "x", 8, 12_288, 95_000_000, plain_ms=421.0),
        StepRow("$\\frac{", "$\\frac{", "x", 16, 3_072, 59_000_000, failure="too much"),
    ]
    plot_steps(rows, tmp_path / "steps.svg")
    texts = words(tmp_path / "steps.svg")
    for text in ("enwik8: 8 x 12,288 bytes", "210 ms, 50% of the matrix rate", "421 ms", "did not run", PLAIN_DENSE):
        assert text in texts, text
    assert "milliseconds a step; pale: kernel by kernel, full: as one CUDA graph" in texts
    assert drawn == [230.0, 210.0, 421.0, 421.0]


def test_draws_memory_parameters_and_losses(tmp_path, monkeypatch, lines):
    drawn = bars(monkeypatch, "bar")
    rows = [
        MemoryRow(65_536, 152_000_000, predicted_gib=10.0, measured_gib=10.5, losses=[5.5, 5.0]),
        MemoryRow(100, 1_000_000, predicted_gib=2.0, failure="too much"),
    ]
    plot_memory(rows, tmp_path / "memory.svg", 14.9, {65_536: 150_000_000})
    assert drawn == [[10.0, 2.0], [10.5, 0], [150.0, 0.0], [152.0, 1.0]]
    assert [(label, points) for _, label, _, points in lines] == [("65,536", [(1, 5.5), (2, 5.0)])]
    texts = words(tmp_path / "memory.svg")
    for text in ("limit", "predicted", "measured", "the paper, 16 GB", "million parameters", "loss, nats"):
        assert text in texts, text
