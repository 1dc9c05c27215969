import pytest

pytest.importorskip("tyro")

from longstride.commands.help import format_help, sections

TYRO = """usage: longstride try [-h] [--most {None}|INT] RUN [RUN ...]

Do something. Example: longstride try RUN

╭─ positional arguments ──────────────────╮
│ RUN [RUN ...]  The runs. (default: )    │
╰─────────────────────────────────────────╯
╭─ options ───────────────────────────────╮
│ -h, --help  show this help              │
│ --kind {None,text,images}               │
│             What it is, if the names of │
│             its files                   │
│             do not say. (default: None) │
│ --most {None}|INT                       │
│             The most. (default: 3)      │
╰─────────────────────────────────────────╯
╭─ model options ─────────────────────────╮
│ The network.                            │
│ ─────────────────────────────────────── │
│ --force, --no-force                     │
│             Replace it. (default: False)│
╰─────────────────────────────────────────╯
"""


def test_lines_are_joined_and_empty_defaults_left_out():
    positional, options, model = sections(TYRO)
    assert positional.entries == [("RUN [RUN ...]", "The runs. (required)")]
    assert options.entries == [
        ("-h, --help", "show this help"),
        ("--kind {text,images}", "What it is, if the names of its files do not say."),
        ("--most INT", "The most. (default: 3)"),
    ]
    assert (model.title, model.about) == ("model options", "The network.")
    assert model.entries == [("--force, --no-force", "Replace it. (default: no)")]


def test_the_whole_text():
    assert format_help(TYRO, 70).splitlines() == [
        "usage: longstride try [-h] [--most INT] RUN [RUN ...]",
        "",
        "Do something.",
        "Example: longstride try RUN",
        "",
        "positional arguments:",
        "  RUN [RUN ...]           The runs. (required)",
        "",
        "options:",
        "  -h, --help              show this help",
        "  --kind {text,images}    What it is, if the names of its files do not",
        "                          say.",
        "  --most INT              The most. (default: 3)",
        "",
        "model options:",
        "  The network.",
        "  --force, --no-force     Replace it. (default: no)",
    ]


def test_a_narrow_terminal_has_descriptions_below_the_flags():
    assert format_help(TYRO, 30).splitlines()[-8:] == [
        "  --most INT",
        "      The most. (default: 3)",
        "",
        "model options:",
        "  The network.",
        "  --force, --no-force",
        "      Replace it. (default:",
        "      no)",
    ]
