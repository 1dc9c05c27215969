"""The command line. Finds the verb that the arguments name, imports its file and calls it.

longstride doctor enwik8
longstride demo
longstride presets
longstride models
longstride plan enwik8 --gpu-memory 16GB
longstride data prepare enwik8.zip enwik8
longstride train text-small --data enwik8 --out run --steps 1000
longstride runs
longstride eval run --split test --min-context 0 256 384
longstride sample run --prompt 'The ' --temperature 0.8
longstride serve run --port 8000
longstride play run
longstride export run my-model
longstride plot run run
longstride plot attention run
longstride plot patterns --patterns 'strided(6)' 'fixed(6, 2)' --out patterns.png
longstride bench attention --lengths 4096 16384
longstride bench step --cases enwik8 enwik8-dense
longstride bench memory --gpu-memory 16GB
longstride bench sampling --preset enwik8 --batches 1 64
longstride completion bash
"""

import codecs
import io
import sys
from collections.abc import Sequence

from longstride.commands.exits import exit_with_message
from longstride.commands.verbs import Verb, find_verbs, in_order

HELP, VERSION = ("help", "-h", "--help"), ("version", "-v", "-V", "--version")
SHOWN = 160
"""The most characters of an argument that an error message quotes."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs a verb. Bad input ends in one line on standard error and exit code 2."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["help"] and words[1:]:
        words = [*words[1:], "--help"]
    verbs = find_verbs()
    verb = next((name for name in verbs if words[: len(name.split())] == name.split()), "")
    _allow_all_letters()
    with exit_with_message(verb):
        _run(verb, words, verbs)


def _allow_all_letters() -> None:
    """Makes standard output spell letters that its encoding lacks as escapes, as standard error does."""
    if isinstance(sys.stdout, io.TextIOWrapper) and codecs.lookup(sys.stdout.encoding).name != "utf-8":
        sys.stdout.reconfigure(errors="backslashreplace")


def _run(name: str, words: Sequence[str], verbs: dict[str, Verb]) -> None:
    if not words or words[0] in HELP:
        print(_help(verbs))
        return
    if words[0] in VERSION:
        from longstride.version import __version__

        print(__version__)
        return
    group = {other: verb for other, verb in verbs.items() if other.split()[0] == words[0] != other}
    if group and words[1:] in (["-h"], ["--help"]):
        print(_help(group))
    elif not name:
        raise ValueError(_unknown(words, list(in_order(verbs))))
    else:
        verb, typed = verbs[name], words[len(name.split()) :]
        if verb.takes_words:
            verb.main(typed)
        else:
            from longstride.commands.parser import parse

            parse(verb.main, f"longstride {name}", typed)()


def _help(verbs: dict[str, Verb]) -> str:
    from longstride.commands.help import format_entry, terminal_width

    width = terminal_width()
    entries = ((f"longstride {name}", verb.summary) for name, verb in in_order(verbs).items())
    lines = [line for name, summary in entries for line in format_entry(name, summary, width, 31)]
    return "\n".join(["usage: longstride VERB [options]", "", *lines, "", "Every verb has --help, with an example."])


def _unknown(words: Sequence[str], verbs: Sequence[str]) -> str:
    """Returns the error message for arguments that name no verb, with the nearest verb if there is one."""
    import difflib

    first, listed = words[0], "longstride --help lists the verbs"
    if first.startswith("-"):
        return f"a verb comes before {first[:SHOWN]!r}, as in: longstride train text-small --data FILE --out RUN; {listed}"
    seconds = [name.split()[1] for name in verbs if name.split()[0] == first]
    second = next((word for word in words[1:2] if not word.startswith("-")), "")
    if seconds and not second:
        return f"{first} needs one of {', '.join(seconds)} after it; longstride {first} --help describes them"
    typed = f"{first} {second}".rstrip()
    group = difflib.get_close_matches(first.lower(), [name.split()[0] for name in verbs], n=1)
    if group and group[0] in verbs:  # A verb of one word: the second is its argument, as in "sampel run".
        near = group
    else:
        near = difflib.get_close_matches(typed.lower(), verbs, n=1) or [f"{first} {other}" for other in seconds]
        near = near or [name for name in verbs if [name.split()[0]] == group]
    hint = f"did you mean {' or '.join(repr(name) for name in near)}?" if near else listed
    return f"there is no verb {typed[:SHOWN]!r}; {hint}"
