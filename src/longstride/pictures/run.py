"""A run on one page: its curves, its settings and its samples; or several runs compared."""

import textwrap
import wave
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from warnings import catch_warnings

import numpy as np
from numpy.typing import NDArray

from longstride.common.atomic import check_output
from longstride.common.figures import (
    EDGE,
    INK,
    QUIET,
    add_axes,
    add_text,
    characters_that_fit,
    new_figure,
    picture_path,
    write_figure,
)
from longstride.common.files import check_run_folder, read_json, read_text, real_path
from longstride.model.cost import parameter_count
from longstride.training.config import TrainConfig
from longstride.training.curve import DARK, LIGHT, OWNER, Rows, draw_bits, draw_line, finish, read_rows
from longstride.training.optimizer import warmup_steps

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Settings = dict[str, str]
COLOURS = ("#2f6fb7", "#d9822b", "#4c9a62", "#9a5fb0", "#c0504d", "#6b7a89")
"""One for each of several runs."""
PANELS = (("learning_rate", "learning rate"), ("gradient_norm", "gradient norm"), ("bytes_per_second", "bytes/s"))
# Inches.
TOP, CURVES, RIGHT = 0.75, 6.4, 5.0
BITS, SMALL, SKIP = 3.1, 0.95, 0.2
SHORTEST = 7.75
"""The least height of a page: that of the curves."""
NORM_LIMIT = 8
"""The gradient norm's axis ends at this many times the median."""
SIZE, LINE, KEY = 7.5, 0.155, 17
"""Tables: font size, line height, and the width of the column of names in characters."""
SHEET, SOUND = (RIGHT - 0.15) / 2, 1.45
"""Width of a sheet of images; height of a waveform with its axis."""
TEXT_SIZE, TEXT_LINE, TEXT_LINES = 6.5, 0.13, 11
TEXT_BYTES, FRAMES, PIXELS = 2**16, 2**24, 2**24
"""The most that is read of a sample: bytes of text, audio frames, pixels."""
SAMPLES = (
    ("sample-data", "held-out data"), ("sample-model", "what the model thinks most likely, byte for byte"),
    ("sample", "made by longstride sample"),
)  # fmt: skip


def plot_run(runs: Sequence[str | Path], path: str | Path | None = None, force: bool = False) -> Path:
    """Draws one run, or compares several. Default path: page.png in the run, or runs.png here for several.

    `force`: replace an existing file; page.png is always replaced.
    """
    folders = [Path(run) for run in runs]
    if not folders:
        raise ValueError(f"{OWNER}: which run comes next, as in: longstride plot run RUN")
    if len({real_path(folder) for folder in folders}) < len(folders):
        raise ValueError(f"{OWNER}: runs must be different ones, got {', '.join(map(str, folders))}")
    if len(folders) > len(COLOURS):
        raise ValueError(f"{OWNER}: {len(folders)} runs are given, and there are colours for {len(COLOURS)}; give fewer")
    own = path is None and len(folders) == 1
    if own:
        check_run_folder(OWNER, folders[0])
        path = folders[0] / "page.png"
    path = picture_path(OWNER, path or "runs.png")
    new_figure(OWNER, 1, 1)  # Fails early if matplotlib is missing.
    rows = [read_rows(folder) for folder in folders]
    check_output(OWNER, "out", path, may_replace=own or force)
    write_figure(_page(folders[0], rows[0]) if len(folders) == 1 else _comparison(folders, rows), path)
    return path


def _page(folder: Path, rows: Rows) -> "Figure":
    left, below = EDGE + CURVES + 0.35, TOP
    blocks = [block for block in (summarize(rows), read_settings(folder)) if block]
    files = [(path, name) for stem, name in SAMPLES if (path := _sample_file(folder, stem))]
    ends = TOP + sum(_table_height(block) + 0.12 for block in blocks) + _samples_height([path for path, _ in files])
    figure = new_figure(OWNER, left + RIGHT + EDGE, max(SHORTEST, ends + EDGE))
    add_text(figure, EDGE, EDGE + 0.2, real_path(folder).name, 14, within=CURVES)
    _curves(figure, [rows], [(LIGHT, DARK)], [("training", "validation")])
    for block in blocks:
        below = _draw_table(figure, left, below, block) + 0.12
    _draw_samples(figure, files, left, below + 0.1)
    return figure


def _comparison(folders: Sequence[Path], rows: Sequence[Rows]) -> "Figure":
    names = [real_path(folder).name for folder in folders]
    if len(set(names)) < len(names):
        names = [str(folder) for folder in folders]
    left, below = EDGE + CURVES + 0.35, TOP
    given = [read_settings(folder) for folder in folders]
    blocks = [
        summarize(lines) | {key: value for key, value in known.items() if any(value != other.get(key) for other in given)}
        for lines, known in zip(rows, given)
    ]
    ends = TOP + sum(_table_height(block) + 0.43 for block in blocks)
    figure = new_figure(OWNER, left + RIGHT + EDGE, max(SHORTEST, ends + EDGE))
    add_text(figure, EDGE, EDGE + 0.2, " and ".join(names), 14, within=CURVES)
    colours = [(f"{colour}60", colour) for colour in COLOURS]
    # A run's name labels its validation line, or the training line without one. Labels that begin with _ are not shown.
    validated = [any(row.get("valid_bits_per_byte") is not None for row in lines) for lines in rows]
    _curves(figure, rows, colours, [("_" if known else name, name) for name, known in zip(names, validated)])
    for name, block, (_, colour) in zip(names, blocks, colours):
        add_text(figure, left, below, name, 10, colour, within=RIGHT, weight="bold")
        below = _draw_table(figure, left, below + 0.18, block) + 0.25
    return figure


def _curves(
    figure: "Figure", runs: Sequence[Rows], colours: Sequence[tuple[str, str]], labels: Sequence[tuple[str, str]]
) -> None:  # fmt: skip
    """Draws bits per byte and, below, the other metrics of the runs over the same steps."""
    from matplotlib.lines import Line2D
    from matplotlib.ticker import EngFormatter

    shown = [panel for panel in PANELS if any(row.get(panel[0]) is not None for rows in runs for row in rows)]
    left, width = EDGE + 0.7, CURVES - 0.7
    column = [add_axes(figure, left, TOP - 0.1, width, BITS + (len(PANELS) - len(shown)) * (SMALL + SKIP), bare=False)]
    for rows, (light, dark), label in zip(runs, colours, labels):
        draw_bits(column[0], rows, light, dark, label)
    handles = column[0].get_legend_handles_labels()[0]
    if len(runs) > 1:  # Colours tell the runs apart; these two entries tell the lines of a run apart.
        handles.append(Line2D([], [], color=f"{QUIET}60", label="training"))
        handles.append(Line2D([], [], color=QUIET, marker="o", markersize=4, label="validation"))
    column[0].legend(handles=handles, frameon=False, fontsize=9)
    down = TOP - 0.1 + column[0].get_position().height * figure.get_figheight() + SKIP
    for name, title in shown:
        axes = add_axes(figure, left, down, width, SMALL, bare=False)
        axes.sharex(column[0])
        for rows, (_, dark) in zip(runs, colours):
            draw_line(axes, rows, name, dark, linewidth=1.2)
        axes.set_ylabel(title, fontsize=8)
        if name == "bytes_per_second":
            axes.yaxis.set_major_formatter(EngFormatter(sep=""))
            axes.set_ylim(0, axes.get_ylim()[1] * 1.05)
        if name == "gradient_norm":  # Otherwise an outlier would flatten the rest of the line.
            values = sorted(row[name] for rows in runs for row in rows if row.get(name) is not None)
            axes.set_ylim(0, max(1e-9, min(values[-1], NORM_LIMIT * values[len(values) // 2])) * 1.1)
        column.append(axes)
        down += SMALL + SKIP
    for axes in column:
        axes.tick_params(labelsize=8, labelbottom=axes is column[-1])
        axes.yaxis.set_label_coords(-0.085, 0.5)
    finish(column)


def _draw_table(figure: "Figure", left: float, down: float, lines: Settings) -> float:
    """Draws names and values in two columns; returns where the table ends."""
    for name, value in lines.items():
        add_text(figure, left, down, name, SIZE, QUIET)
        for part in _wrap(value):
            add_text(figure, left + KEY * SIZE * 0.6 / 72, down, part, SIZE, INK, family="monospace")
            down += LINE
    return down


def _wrap(value: str) -> list[str]:
    return textwrap.wrap(value, characters_that_fit(RIGHT, SIZE) - KEY) or [""]


def _table_height(lines: Settings) -> float:
    return LINE * sum(len(_wrap(value)) for value in lines.values())


def _samples_height(paths: Sequence[Path]) -> float:
    """Returns the height of all samples, in inches; two images share a row."""
    if any(path.suffix == ".png" for path in paths):
        return sum(_row_heights(paths))
    return 0.1 + sum(SOUND if path.suffix == ".wav" else (len(_text_lines(path)) + 2) * TEXT_LINE for path in paths)


def _row_heights(paths: Sequence[Path]) -> list[float]:
    """Returns the heights of rows of two images with their names."""
    heights = [_image_height(path) + 0.3 for path in paths]
    return [max(heights[first : first + 2]) for first in range(0, len(heights), 2)]


def _sample_file(folder: Path, stem: str) -> Path | None:
    return next((path for path in (folder / f"{stem}{end}" for end in (".png", ".txt", ".wav")) if path.is_file()), None)


def _draw_samples(figure: "Figure", files: Sequence[tuple[Path, str]], left: float, down: float) -> None:
    """Draws images two to a row, and text and sound below each other."""
    if any(path.suffix == ".png" for path, _ in files):
        rows = _row_heights([path for path, _ in files])
        for number, (path, name) in enumerate(files):
            _draw_image(figure, path, name, left + number % 2 * (SHEET + 0.15), down + sum(rows[: number // 2]))
        return
    for path, name in files:
        down = (_draw_sound if path.suffix == ".wav" else _draw_text)(figure, path, name, left, down)


@contextmanager
def _naming_file(path: Path) -> Iterator[None]:
    """Context that names the sample in errors about its content, which is untrusted."""
    try:
        yield
    except Exception as error:
        raise ValueError(
            f"{OWNER}: {path} cannot be read: {error}; remove it, and the page is drawn without it"
        ) from None  # fmt: skip


def _image_height(path: Path) -> float:
    """Returns the height of an image that is drawn SHEET inches wide, or SHEET high if it is taller than wide."""
    from PIL import Image

    with _naming_file(path), catch_warnings(action="ignore"), Image.open(path) as opened:  # Reads the header only.
        if opened.width * opened.height > PIXELS:
            raise ValueError(f"it is {opened.width} x {opened.height} pixels; at most {PIXELS:,} are drawn")
        return SHEET * min(1.0, opened.height / opened.width)


def _draw_image(figure: "Figure", path: Path, name: str, left: float, down: float) -> None:
    from matplotlib.image import imread

    add_text(figure, left, down, name.split(",")[0], 8, QUIET)
    axes = add_axes(figure, left, down + 0.08, SHEET, _image_height(path))
    with _naming_file(path):
        axes.imshow(imread(path), interpolation="nearest", cmap="gray")
    axes.set_anchor("NW")  # At the top left, whatever its shape.
    axes.set_axis_off()


def _draw_sound(figure: "Figure", path: Path, name: str, left: float, down: float) -> float:
    with _naming_file(path):
        samples, rate = read_wav(path)
    add_text(figure, left, down, name, 8, QUIET)
    axes = add_axes(figure, left + 0.3, down + 0.08, RIGHT - 0.3, 0.85, bare=False)
    axes.plot(np.arange(len(samples)) / rate, samples, color=INK, linewidth=0.5)
    axes.set_xlim(0, max(len(samples), 1) / rate)
    axes.tick_params(labelsize=6, length=2)
    axes.set_xlabel("seconds", fontsize=6, labelpad=0)
    return down + SOUND


def read_wav(path: Path) -> tuple[NDArray[np.float64], int]:
    """Reads a WAV file as training writes it: one channel of 16 bits. Returns samples from -1 to 1, and the rate."""
    with wave.open(str(path)) as file:
        if (file.getnchannels(), file.getsampwidth()) != (1, 2):
            raise ValueError("it is not one channel of 16 bits")
        frames, rate = file.getnframes(), file.getframerate()
        if rate < 1 or frames > FRAMES:
            raise ValueError(f"it has {frames:,} samples, {rate} a second; at most {FRAMES:,} are drawn")
        return np.frombuffer(file.readframes(frames), "<i2") / 32768, rate


def _draw_text(figure: "Figure", path: Path, name: str, left: float, down: float) -> float:
    add_text(figure, left, down, name, 8, QUIET)
    lines = _text_lines(path)
    for number, line in enumerate(lines, 1):
        add_text(figure, left, down + number * TEXT_LINE + 0.03, printable(line), TEXT_SIZE, family="monospace")
    return down + (len(lines) + 2) * TEXT_LINE


def _text_lines(path: Path) -> list[str]:
    """Returns the first lines of a text, wrapped to the width of the column."""
    across = characters_that_fit(RIGHT, TEXT_SIZE)
    with _naming_file(path), path.open("rb") as file:
        text = file.read(TEXT_BYTES).decode("utf-8", "replace")
    lines = [line[start : start + across] for line in text.splitlines() for start in range(0, max(1, len(line)), across)]
    return lines[:TEXT_LINES]


def printable(text: str) -> str:
    """Replaces characters that the figure's font may not have by a dot."""
    return "".join(letter if " " <= letter < "\u0530" and letter != "\x7f" else "·" for letter in text)


LONGEST = 1000
"""The most characters of a value, before it is wrapped."""


def read_settings(folder: Path) -> Settings:
    """Returns a run's settings for the table, from config.json and data.json, if they exist."""
    values: Settings = {}
    path = folder / "config.json"
    if path.is_file():
        config = TrainConfig.from_json(read_text(path), str(path))
        values |= _model_settings(config) | {"data": Path(config.data).name}
    values |= _data_settings(folder / "data.json")
    if path.is_file():
        values |= _optimizer_settings(config)
    return {name: _shorten(value) for name, value in values.items()}


def summarize(rows: Rows) -> Settings:
    """Returns a run's results for the table, from its metrics."""
    values: Settings = {}
    validated = [row for row in rows if row.get("valid_bits_per_byte") is not None]
    if validated:
        best = min(validated, key=lambda row: float(row["valid_bits_per_byte"]))
        values["best validation"] = f"{best['valid_bits_per_byte']:.4f} bits per byte, at step {best['step']:,}"
    trained = [row for row in rows if row.get("bits_per_byte") is not None]
    if trained:
        values["training"] = f"{trained[-1]['bits_per_byte']:.4f} bits per byte, at step {trained[-1]['step']:,}"
    seconds = _training_seconds(rows)
    if seconds:
        values["time in steps"] = duration_text(seconds)
    speeds = [row["bytes_per_second"] for row in rows if row.get("bytes_per_second")]
    if speeds:
        values["speed"] = f"{sorted(speeds)[len(speeds) // 2]:,.0f} bytes/s"
    memory = [row["memory_gib"] for row in rows if row.get("memory_gib")]
    if memory:
        values["memory"] = f"{max(memory):.1f} GiB"
    return values


def duration_text(seconds: float) -> str:
    """Formats seconds with their two largest units: "1 h 5 min"."""
    whole = round(seconds)
    parts = [(whole // 3600, "h"), (whole // 60 % 60, "min"), (whole % 60, "s")]
    shown = [f"{count} {unit}" for count, unit in parts if count][:2]
    return " ".join(shown) or f"{seconds:.1f} s"


def _training_seconds(rows: Rows) -> float:
    """Returns the seconds of all steps, without validations and checkpoints."""
    total, before = 0.0, 0
    for row in rows:
        total += (row["step"] - before) * (row.get("seconds_per_step") or 0.0)
        before = row["step"]
    return total


def _model_settings(config: TrainConfig) -> Settings:
    model = config.model
    values = {
        "parameters": f"{parameter_count(model):,}",
        "layers": f"{model.layers} of width {model.width}, {model.heads} heads",
        "context": f"{model.context:,} bytes",
        "pattern": model.pattern,
        "embedding": model.embedding,
        "precision": model.precision,
    }
    for name, default in (("dropout", 0.0), ("qk_ratio", 1.0), ("ff_ratio", 4.0), ("recompute", "off")):
        if getattr(model, name) != default:
            values[name.replace("_", " ")] = f"{getattr(model, name)}"
    return values


def _data_settings(path: Path) -> Settings:
    try:
        given: Any = read_json(path) if path.is_file() else {}
        sizes = ", ".join(f"{name} {entry['bytes']:,}" for name, entry in given.get("splits", {}).items())
        return {"kind": str(given["kind"]), "bytes": sizes} if given else {}
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"plot run: {path} is damaged: {error}; remove it, and the page is drawn without it") from None


def _shorten(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def _optimizer_settings(config: TrainConfig) -> Settings:
    optimizer = config.optimizer
    warmup = warmup_steps(optimizer, config.steps)
    shorter = f", not {optimizer.warmup:,}: at most a tenth of the run" if warmup < optimizer.warmup else ""
    parts = f" in {config.accumulate} parts" if config.accumulate > 1 else ""
    values = {
        "steps": f"{config.steps:,} of batch {config.batch}{parts}",
        "optimizer": f"{optimizer.name}, learning rate {optimizer.learning_rate:g}",
        "warm-up": f"{warmup:,} step{'' if warmup == 1 else 's'}{shorter}",
        "decay, clip": f"{optimizer.decay:g}, {optimizer.clip:g}",
        "seed": str(config.seed),
    }
    return values | ({"average": f"{config.ema:g}"} if config.ema else {})
