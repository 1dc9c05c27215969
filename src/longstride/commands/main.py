"""The command line: the list of verbs. Finds the verb that the arguments name, imports it and calls it.

longstride doctor enwik8
longstride demo
longstride presets
longstride data prepare enwik8.zip enwik8
longstride train text-small --data enwik8 --out run --steps 1000
longstride runs
longstride eval run --split test --min-context 0 256 384
longstride sample run --prompt 'The ' --temperature 0.8
longstride plot run run
longstride plot attention run
longstride plot patterns --patterns 'strided(6)' 'fixed(6, 2)' --out patterns.png
longstride bench attention --lengths 4096 16384
longstride bench sampling --preset enwik8 --batches 1 64
longstride completion bash
"""

import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import NamedTuple

from longstride.commands.exits import exit_with_message


class Verb(NamedTuple):
    """A function in commands/verbs/. Its parameters are the flags."""

    module: str
    function: str
    summary: str
    """The first line of the function's docstring."""
    takes_words: bool = False
    """Whether the function parses the arguments itself, because its flags depend on them."""


VERBS: dict[str, Verb] = {
    "doctor": Verb("doctor", "doctor", "Show versions, devices, what `auto` selects and why; and the cost of sampling."),
    "demo": Verb("demo", "demo", "Train a small model on bundled text, and compare it with gzip and xz."),
    "presets": Verb("presets", "presets", "List the presets with their size and cost."),
    "data prepare": Verb("data", "data_prepare", "Turn files into a store that training reads."),
    "data fetch": Verb("data", "data_fetch", "Download a data set and verify it; a second call resumes."),
    "train": Verb("train", "train", "Train a preset on data.", takes_words=True),
    "runs": Verb("runs", "runs", "List runs with their step, best bits per byte and state, newest first."),
    "eval": Verb("evaluate", "evaluate", "Bits per byte of a split, every byte scored once."),
    "sample": Verb("sample", "sample", "Sample text, images or sound, or complete some."),
    "plot run": Verb("plot", "plot_run", "Draw a run on one page: curves, settings, samples; or compare several."),
    "plot attention": Verb("plot", "plot_attention", "Draw what each layer and head looks at: the paper's figure 2."),
    "plot patterns": Verb("plot", "plot_patterns", "Draw the paper's figure 3 for any patterns and image size."),
    "bench attention": Verb("bench", "bench_attention", "Measure our patterns, dense SDPA and FlexAttention."),
    "bench sampling": Verb("bench", "bench_sampling", "Measure the time per byte, ours and that of transformers."),
    "bench tune": Verb("bench", "bench_tune", "Search faster kernel settings for this GPU, and save them."),
    "completion": Verb("completion", "completion", "Print a script for completion by Tab in bash, zsh or fish."),
}
HELP, VERSION = ("help", "-h", "--help"), ("version", "-v", "-V", "--version")
SHOWN = 160
"""The most characters of an argument that an error message quotes."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs a verb. Bad input ends in one line on standard error and exit code 2."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["help"] and words[1:]:
        words = [*words[1:], "--help"]
    verb = next((name for name in VERBS if words[: len(name.split())] == name.split()), "")
    with exit_with_message(verb):
        _run(verb, words)


def _run(verb: str, words: Sequence[str]) -> None:
    if not words or words[0] in HELP:
        print(_help(VERBS))
        return
    if words[0] in VERSION:
        from longstride.version import __version__

        print(__version__)
        return
    group = {name: entry for name, entry in VERBS.items() if name.split()[0] == words[0] != name}
    if group and words[1:] in (["-h"], ["--help"]):
        print(_help(group))
    elif not verb:
        raise ValueError(_unknown(words))
    else:
        entry, typed = VERBS[verb], words[len(verb.split()) :]
        function = getattr(import_module(f"longstride.commands.verbs.{entry.module}"), entry.function)
        if entry.takes_words:
            function(typed)
        else:
            from longstride.commands.parser import parse

            parse(function, f"longstride {verb}", typed)()


def _help(verbs: Mapping[str, Verb]) -> str:
    from longstride.commands.help import format_entry, terminal_width

    width = terminal_width()
    lines = [line for name, verb in verbs.items() for line in format_entry(f"longstride {name}", verb.summary, width, 31)]
    return "\n".join(["usage: longstride VERB [options]", "", *lines, "", "Every verb has --help, with an example."])


def _unknown(words: Sequence[str]) -> str:
    """What is wrong with words that name no verb, and what was probably meant."""
    import difflib

    first, listed = words[0], "longstride --help lists the verbs"
    if first.startswith("-"):
        return f"a verb comes before {first[:SHOWN]!r}, as in: longstride train text-small --data FILE --out RUN; {listed}"
    seconds = [name.split()[1] for name in VERBS if name.split()[0] == first]
    second = next((word for word in words[1:2] if not word.startswith("-")), "")
    if seconds and not second:
        return f"{first} needs one of {', '.join(seconds)} after it; longstride {first} --help describes them"
    typed = f"{first} {second}".rstrip()
    near = difflib.get_close_matches(typed.lower(), VERBS, n=1) or [f"{first} {other}" for other in seconds]
    if not near:
        group = difflib.get_close_matches(first.lower(), [name.split()[0] for name in VERBS], n=1)
        near = [name for name in VERBS if [name.split()[0]] == group]
    hint = f"did you mean {' or '.join(repr(name) for name in near)}?" if near else listed
    return f"there is no verb {typed[:SHOWN]!r}; {hint}"
