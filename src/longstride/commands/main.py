"""The verbs of the command line; the only place that wires things together.

longstride demo
longstride data prepare enwik8.zip enwik8
longstride train text-small --data enwik8 --out run --steps 1000
longstride eval run --split test --min-context 0 256 384
longstride sample run --prompt 'The ' --temperature 0.8
longstride plot patterns --patterns 'strided(6)' 'fixed(6, 2)' --out patterns.png
"""

import difflib
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from tyro.constructors import PrimitiveConstructorSpec

from longstride.commands.bench.attention import AttentionBenchmark
from longstride.commands.bench.sampling import SamplingBenchmark
from longstride.commands.bench.tune import TuneBenchmark
from longstride.commands.exits import speaks, told_in_one_line
from longstride.common.files import read_text
from longstride.patterns.notation import parse
from longstride.sampling.request import Request
from longstride.training.config import TrainConfig, TypedConfig
from longstride.training.run import Resume

Kind = Literal["text", "images", "audio", "bytes"]
Precision = Literal["float32", "bfloat16", "float16", "float64"]
RESUME_NOT = "--resume=no"


def _read_resume(words: list[str]) -> bool | str:
    known: dict[str, bool | str] = {"": True, "auto": "auto", "no": False}
    if " ".join(words) not in known:
        raise ValueError(f"--resume stands alone, or before auto, got {' '.join(words)!r}")
    return known[" ".join(words)]


RESUME = PrimitiveConstructorSpec(
    nargs="*",
    metavar="[auto]",
    instance_from_str=_read_resume,
    is_instance=lambda value: value in (True, False, "auto"),
    str_from_instance=lambda value: ["auto"] if value == "auto" else [] if value else ["no"],
)
"""--resume, --resume auto, or --no-resume, which is turned into --resume=no."""
LEFT = ("model.safetensors", "curve.png", "sample-data.*", "sample-model.*", "metrics.jsonl", "checkpoints")
"""What a run leaves in its folder."""


def doctor(model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="[RUN_OR_MODEL_OR_PRESET]")] = "") -> None:
    """Show versions, devices, what `auto` picks and why; and what sampling costs. Example: longstride doctor enwik8

    Args:
        model: A run, a saved model or a preset: also what sampling from it costs, in weights, cache and keys.
    """
    from longstride.commands.doctor import examine

    if not examine(model):
        sys.exit(1)


def plot_patterns(
    patterns: tuple[str, ...] = (),
    height: int = 6,
    width: int = 6,
    row: int | None = None,
    column: int | None = None,
    out: Path = Path("patterns.png"),
    force: bool = False,
) -> None:
    """Draw the paper's figure 3 for any patterns and image size.

    Example: longstride plot patterns --patterns 'strided(6)' 'fixed(6, 2)' --out patterns.svg

    Args:
        patterns: A column of the figure each, as text with a pattern for every head. Left out: full attention, strided
            and fixed attention with the width as their stride, as in the paper.
        height: Rows of the image.
        width: Bytes in a row of the image.
        row: The pixel whose view is drawn; about two thirds down if left out.
        column: The same across; the middle if left out.
        out: The picture to write, PNG or SVG by its ending.
        force: A file that is there may be replaced.
    """
    try:
        from longstride.pictures.patterns import Scheme, plot_patterns
    except ModuleNotFoundError as error:
        raise ValueError(
            f"plot patterns needs {error.name}, which is not installed: pip install 'longstride[plot]'"
        ) from None
    texts = {text: text for text in patterns} or {
        "Transformer": "dense()",
        "Sparse Transformer (strided)": f"strided({width})",
        "Sparse Transformer (fixed)": f"fixed({width}, 1)",
    }
    plot_patterns([Scheme(name, parse(text)) for name, text in texts.items()], out, height, width, row, column, force)
    print(f"wrote {out}")


def presets(dense: bool = False) -> None:
    """List the networks that have a name, with what they cost. Example: longstride presets

    Args:
        dense: Also their dense forms, with full attention.
    """
    from longstride.commands.presets import show

    show(dense)


def demo(folder: Path = Path("demo"), steps: int = 500) -> None:
    """Train a small model on bundled text, and compare it with gzip and xz. Example: longstride demo

    Args:
        folder: Where everything goes.
        steps: How long to train; 500 are about two minutes on two cores.
    """
    from longstride.commands.demo import demo as run

    run(folder, steps)


def data_prepare(
    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")],
    out: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")],
    kind: Kind | None = None,
    join: bool = False,
    max_bytes: int | None = None,
) -> None:
    """Turn files into a store that training reads. Example: longstride data prepare enwik8.zip enwik8

    Args:
        source: A file, or a folder of them: text (also packed), images, sound, or anything.
        out: The store's folder.
        kind: What the source is; left out, its names and contents say.
        join: Put all files together and split anew, also if some are named train, valid or test.
        max_bytes: The most that the source may unpack to; if left out, 1 GiB, or 100 times its size if that is more.
    """
    from longstride.data.prepare import prepare

    store = prepare(source, out, kind, max_bytes=max_bytes, join=join)
    sizes = ", ".join(f"{name} {size:,} bytes" for name, size in store.splits.items())
    print(f"{out}: {store.kind}, {sizes}")


def data_fetch(name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")], folder: Path = Path(".")) -> None:
    """Download a data set, checked; run again, it goes on where it stopped. Example: longstride data fetch enwik8

    Args:
        name: enwik8 or cifar10.
        folder: Where to put it.
    """
    from longstride.data.fetch import fetch

    print(f"wrote {fetch(name, folder)}")


def plot_run(
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN [RUN ...]")],
    out: Path | None = None, force: bool = False,
) -> None:  # fmt: skip
    """Draw a run on one page: curves, settings, samples; or compare several. Example: longstride plot run RUN

    Args:
        runs: The run's folder. Of several the curves are drawn together, and in what their settings differ.
        out: The picture to write, PNG or SVG by its ending; left out: page.png in the run, or runs.png here for several.
        force: A file that is there may be replaced.
    """
    from longstride.pictures.run import plot_run

    print(f"wrote {plot_run(runs, out, force)}")


def plot_attention(
    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_OR_MODEL")],
    position: tuple[int, ...] = (),
    layers: tuple[int, ...] = (),
    heads: tuple[int, ...] = (),
    data: Path | None = None,
    split: str = "valid",
    item: int = 0,
    out: Path = Path("attention.png"),
    force: bool = False,
) -> None:
    """Draw what each layer and head looks at: the paper's figure 2. Example: longstride plot attention RUN --layers 0 5

    Args:
        folder: A run, one of its checkpoints, or a saved model.
        position: Which byte is predicted; several get a picture each. Left out: about two thirds down. Row r, column c of an
            image is (r * width + c) * channels.
        layers: Which rows of panels; up to 8, evenly, if left out.
        heads: Which columns of panels; up to 8, evenly, if left out.
        data: What it looks at, a store or a source as for training; the run's own data if left out.
        split: Of the data.
        item: Which image, or which piece as long as the context.
        out: The picture to write, PNG or SVG by its ending.
        force: Files that are there may be replaced.
    """
    from longstride.pictures.attention import plot_attention

    for path in plot_attention(folder, position, layers, heads, data, split, item, out, force):
        print(f"wrote {path}")


def train(words: Sequence[str]) -> None:
    """Train a preset on data. Example: longstride train text-small --data enwik8.zip --out RUN --steps 1000"""
    from longstride.training import train as run
    from longstride.training import train_preset
    from longstride.training.fitting import fields_to_fit

    if words and words[0] in ("-h", "--help"):
        words = ["text-small", *words]
    if not words or words[0].startswith("-"):
        raise ValueError("train: which preset comes first, as in: longstride train text-small --data FILE --out RUN")
    resumed = _resumed(words)
    default = TypedConfig.of(resumed or train_preset(words[0]))
    fit = fields_to_fit(words) if resumed is None else []

    def verb(
        config: Annotated[TypedConfig, tyro.conf.arg(name="")] = default,
        resume: Annotated[Resume, RESUME] = False,
        until: int | None = None,
    ) -> None:
        """Train a preset on data. Example: longstride train text-small --data enwik8.zip --out RUN --steps 1000

        Every field of the preset can be changed: --model.layers 12 --optimizer.learning-rate 0.001. For images of another
        size than the preset's, context, embedding and stride follow from the data unless given.

        Args:
            resume: Go on with the run in --out, exactly where it stopped, with the settings that it has. --resume auto also
                begins a run that is not there: for batch systems that start a job again. --no-resume: begin a new one.
            until: Pause after this step, as Ctrl-C does.
        """
        found = run(config.checked(), resume, until, fit=fit)
        if not speaks():
            return
        print(f"{found.folder}: step {found.step}, {found.reason}; {found.speed}")
        if found.best_bits_per_byte is not None:
            print(f"best validation {found.best_bits_per_byte:.4f} bits per byte, at step {found.best_step}")
        print("there:", ", ".join(name for name in LEFT if list(found.folder.glob(name))))
        if not found.done:
            print("all is saved; the same command with --resume goes on from there")

    typed = [RESUME_NOT if word == "--no-resume" else word for word in words[1:]]
    tyro.cli(verb, prog=f"longstride train {words[0]}", args=typed)


def _resumed(words: Sequence[str]) -> TrainConfig | None:
    """The settings of the run that is to be resumed: what is typed with --resume is what differs from them."""
    folder = next((word.removeprefix("--out=") for word in words if word.startswith("--out=")), None)
    if "--out" in words[:-1]:
        folder = words[words.index("--out") + 1]
    last = next((word for word in reversed(words) if word.split("=")[0] in ("--resume", "--no-resume")), "--no-resume")
    if last in ("--no-resume", RESUME_NOT) or folder is None:
        return None
    path = Path(folder) / "config.json"
    return TrainConfig.from_json(read_text(path), str(path)) if path.is_file() else None


def evaluate(
    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_OR_MODEL")],
    data: Path | None = None,
    split: str = "valid",
    min_context: tuple[int, ...] = (0,),
    checkpoint: str | None = None,
    batch: int | None = None,
    device: str = "auto",
    precision: Precision | None = None,
    most_bytes: int | None = None,
    json: Path | None = None,
    force: bool = False,
) -> None:
    """Bits per byte of a split, every byte scored once. Example: longstride eval RUN --split test --min-context 0 256

    Args:
        folder: A run, whose best weights are taken, one of its checkpoints, or a saved model.
        data: A prepared store, or a source; left out, what the run was trained on.
        split: train, valid or test.
        min_context: Bytes that each scored byte has before it at least, those of the first window aside; a row of the
            table for each. More cost n / (n - min context) times as much, for a context of n. For images 0.
        checkpoint: One of the run's, such as step-1000, instead of its best weights.
        batch: Windows at a time; left out, as many as have 65,536 bytes. It changes nothing but rounding.
        device: Auto is the GPU if there is one.
        precision: Of activations; left out, what the model has.
        most_bytes: Score the first so many bytes only.
        json: The file for the results, with all they depend on. Left out: eval-SPLIT.json in the run, if the data is its
            own. Rows of the same evaluation that are there already stay.
        force: A file that has something else may be replaced.
    """
    from longstride.commands.evaluate import evaluate as run

    run(folder, data, split, min_context, checkpoint, batch, device, precision, most_bytes, json, force)


def sample(
    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_OR_MODEL")],
    request: Annotated[Request, tyro.conf.arg(name="")],
) -> None:
    """Make text, images or sound, or complete some. Example: longstride sample RUN --prompt 'The ' --temperature 0.8

    Args:
        folder: A run, whose best weights are taken, one of its checkpoints, or a saved model.
    """
    from longstride.commands.sample import sample as run

    run(folder, request)


def bench_attention(settings: Annotated[AttentionBenchmark, tyro.conf.arg(name="")]) -> None:
    """Measure our patterns beside SDPA dense and FlexAttention. Example: longstride bench attention --lengths 4096 16384"""
    from longstride.commands.bench.attention import run

    _measure_and_draw(run, settings, "plot_times")


def bench_sampling(settings: Annotated[SamplingBenchmark, tyro.conf.arg(name="")]) -> None:
    """Measure the time of a byte beside transformers and its floor. Example: longstride bench sampling --preset enwik8"""
    from longstride.commands.bench.sampling import run

    _measure_and_draw(run, settings, "plot_rates")


def _measure_and_draw(run: Callable[[Any], Any], settings: AttentionBenchmark | SamplingBenchmark, plot: str) -> None:
    # What draws is imported before the work, in case it is not installed.
    draw = None if settings.picture is None else getattr(import_module("longstride.pictures.benchmarks"), plot)
    rows = run(settings).rows
    if draw is not None:
        draw(rows, settings.picture)
        print(f"wrote {settings.picture}")


def bench_tune(settings: Annotated[TuneBenchmark, tyro.conf.arg(name="")]) -> None:
    """Find the kernels' settings anew for this GPU, and save the faster ones. Example: longstride bench tune --widths 64"""
    from longstride.commands.bench.tune import run

    run(settings)


VERBS: dict[str, Callable[..., None]] = {
    "doctor": doctor,
    "demo": demo,
    "presets": presets,
    "data prepare": data_prepare,
    "data fetch": data_fetch,
    "train": train,
    "eval": evaluate,
    "sample": sample,
    "plot run": plot_run,
    "plot attention": plot_attention,
    "plot patterns": plot_patterns,
    "bench attention": bench_attention,
    "bench sampling": bench_sampling,
    "bench tune": bench_tune,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs a verb. Bad input ends in one line on standard error and exit code 2."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    verb = next((name for name in VERBS if words[: len(name.split())] == name.split()), "")
    with told_in_one_line(verb):
        _run(verb, words)


def _run(verb: str, words: Sequence[str]) -> None:
    if not words or words[0] in ("-h", "--help"):
        print(_help(VERBS))
        return
    if words[0] == "--version":
        from longstride.version import __version__

        print(__version__)
        return
    group = {name: one for name, one in VERBS.items() if name.split()[0] == words[0] != name}
    if group and words[1:] in (["-h"], ["--help"]):
        print(_help(group))
    elif not verb:
        raise ValueError(_unknown(words))
    elif verb == "train":  # Its options' defaults are those of the preset that is named first.
        train(words[1:])
    else:
        tyro.cli(VERBS[verb], prog=f"longstride {verb}", args=words[len(verb.split()) :])


def _help(verbs: dict[str, Callable[..., None]]) -> str:
    lines = [f"  longstride {name:<18}{(verb.__doc__ or '').splitlines()[0]}" for name, verb in verbs.items()]
    return "\n".join(["usage: longstride VERB [options]", "", *lines, "", "Every verb has --help."])


def _unknown(words: Sequence[str]) -> str:
    typed = " ".join(word for word in words[:2] if not word.startswith("-"))
    group = [name for name in VERBS if name.split()[0] == words[0]]
    near = group or difflib.get_close_matches(typed, VERBS, n=1) or difflib.get_close_matches(words[0], VERBS, n=1)
    hint = f"did you mean {' or '.join(repr(name) for name in near)}?" if near else "longstride --help lists the verbs"
    return f"there is no verb {typed!r}; {hint}"
