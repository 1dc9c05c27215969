"""The verbs of the command line; the only place that wires things together.

longstride doctor
longstride presets
longstride plot patterns --patterns 'strided(6)' 'fixed(6, 2)' --out patterns.png
longstride bench attention --lengths 4096 16384
longstride bench tune
"""

import difflib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import tyro

from longstride.benchmarks.attention import AttentionBenchmark
from longstride.benchmarks.tune import TuneBenchmark
from longstride.notation import parse


def doctor() -> None:
    """Show versions, devices, and which implementation `auto` picks and why. Example: longstride doctor"""
    from longstride.doctor import report

    wrong = False
    for what, finding in report():
        print(f"{what:<16}{finding}")
        wrong |= "FAILED" in finding or "DISAGREES" in finding
    if wrong:
        sys.exit(1)


def plot_patterns(
    patterns: tuple[str, ...] = (),
    height: int = 6,
    width: int = 6,
    row: int | None = None,
    column: int | None = None,
    out: Path = Path("patterns.png"),
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
    """
    try:
        from longstride.plots import Scheme, plot_patterns
    except ModuleNotFoundError as error:
        raise ValueError(
            f"plot patterns needs {error.name}, which is not installed: pip install 'longstride[plot]'"
        ) from None
    texts = {text: text for text in patterns} or {
        "Transformer": "dense()",
        "Sparse Transformer (strided)": f"strided({width})",
        "Sparse Transformer (fixed)": f"fixed({width}, 1)",
    }
    plot_patterns([Scheme(name, parse(text)) for name, text in texts.items()], out, height, width, row, column)
    print(f"wrote {out}")


def presets(dense: bool = False) -> None:
    """List the networks that have a name, with what they cost. Example: longstride presets

    Args:
        dense: Also their dense forms, with full attention.
    """
    from longstride.model.catalogue import show

    show(dense)


def bench_attention(settings: Annotated[AttentionBenchmark, tyro.conf.arg(name="")]) -> None:
    """Measure our patterns beside SDPA dense and FlexAttention. Example: longstride bench attention --lengths 4096 16384"""
    from longstride.benchmarks.attention import run

    if settings.picture is None:
        run(settings)
        return
    from longstride.plots import plot_times

    plot_times(run(settings).rows, settings.picture)
    print(f"wrote {settings.picture}")


def bench_tune(settings: Annotated[TuneBenchmark, tyro.conf.arg(name="")]) -> None:
    """Find the kernels' settings anew for this GPU, and save the faster ones. Example: longstride bench tune --widths 64"""
    from longstride.benchmarks.tune import run

    run(settings)


VERBS: dict[str, Callable[..., None]] = {
    "doctor": doctor,
    "presets": presets,
    "plot patterns": plot_patterns,
    "bench attention": bench_attention,
    "bench tune": bench_tune,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs a verb. Bad input ends in one line on standard error and exit code 2."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help"):
        print(_help(VERBS))
        return
    if words[0] == "--version":
        from longstride.version import __version__

        print(__version__)
        return
    group = {name: verb for name, verb in VERBS.items() if name.split()[0] == words[0] != name}
    if group and words[1:] in (["-h"], ["--help"]):
        print(_help(group))
        return
    verb = next((name for name in VERBS if words[: len(name.split())] == name.split()), None)
    try:
        if verb is None:
            raise ValueError(_unknown(words))
        tyro.cli(VERBS[verb], prog=f"longstride {verb}", args=words[len(verb.split()) :])
    except (ValueError, OSError) as error:
        print(f"longstride: {error}", file=sys.stderr)
        sys.exit(2)


def _help(verbs: dict[str, Callable[..., None]]) -> str:
    lines = [f"  longstride {name:<18}{(verb.__doc__ or '').splitlines()[0]}" for name, verb in verbs.items()]
    return "\n".join(["usage: longstride VERB [options]", "", *lines, "", "Every verb has --help."])


def _unknown(words: Sequence[str]) -> str:
    typed = " ".join(word for word in words[:2] if not word.startswith("-"))
    group = [name for name in VERBS if name.split()[0] == words[0]]
    near = group or difflib.get_close_matches(typed, VERBS, n=1) or difflib.get_close_matches(words[0], VERBS, n=1)
    hint = f"did you mean {' or '.join(repr(name) for name in near)}?" if near else "longstride --help lists the verbs"
    return f"there is no verb {typed!r}; {hint}"
