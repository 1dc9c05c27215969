"""README and docs: every command parses, examples run, links resolve, the README stays short."""

import io
import re
import shutil
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path
from urllib.parse import unquote

import pytest

from longstride.commands.main import main
from longstride.data import samples
from tests.pages import GUIDES, PAGES, ROOT, anchors, blocks, commands, links, make_targets, name_of, words_of

GROUPS = {"data", "plot", "bench"}
SMALLER = ["--steps", "2", "--batch", "1", "--validate-bytes", "512", "--model.layers", "1"]
TORCHRUN = {"--standalone", "--nnodes", "--nproc-per-node", "--max-restarts", "--shutdown-timeout"}
UNKNOWN = "--no-such-flag"
MOST_WORDS = 900
SIZES = {r"steps=\d+": "steps=1"}
"""What Python blocks are shortened by."""


def verb_of(words: list[str]) -> list[str]:
    """The verb; for train with a preset, on which its flags depend."""
    if words[0] == "train":
        preset = words[1] if len(words) > 1 and words[1].islower() else "text-small"
        return ["train", preset]
    return words[: 2 if words[0] in GROUPS else 1]


@cache
def help_text(*verb: str) -> str:
    """What `longstride VERB --help` prints, on a wide terminal."""
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out):
        patch.setenv("COLUMNS", "400")
        try:
            main([*verb, "--help"])
        except SystemExit as ending:
            assert not ending.code, f"longstride {' '.join(verb)} --help fails"  # noqa: PT017
    return out.getvalue()


def has_flag(text: str, flag: str) -> bool:
    return re.search(rf"(?<![\w-]){re.escape(flag)}(?![\w-])", text) is not None


@pytest.mark.parametrize("page", GUIDES, ids=name_of)
def test_commands_parse(page, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for command in commands(page):
        synopsis = "[" in command or "..." in command
        words = words_of(re.sub(r"[\[\]|]|\.\.\.", " ", command) if synopsis else command)
        if words[0].startswith("-") or words[0] == "help":
            continue
        verb = verb_of(words)
        assert help_text(*verb)
        for flag in (word.split("=")[0] for word in words if word.startswith("--")):
            if ".FIELD" not in flag and flag != "--help":
                assert has_flag(help_text(*verb), flag), f"{command!r}: there is no {flag}"
        if not synopsis and len(words) > len(verb) and "--help" not in words:
            arguments = [*verb, *words[len(verb) :], UNKNOWN]
            with pytest.raises(SystemExit) as ending:
                main(arguments)
            message = capsys.readouterr().err
            assert ending.value.code == 2
            assert UNKNOWN in message, f"{command!r}: {message}"


@pytest.mark.parametrize("page", GUIDES, ids=name_of)
def test_flags_in_the_text_exist(page):
    verbs = ["train text-small", "eval", "sample", "demo", "presets", "data prepare", "data fetch", "plot run"]
    verbs += ["plot attention", "plot patterns", "bench attention", "bench step", "bench memory"]
    verbs += ["bench sampling", "bench tune", "export", "reproduce", "serve"]
    every = "\n".join(help_text(*verb.split()) for verb in verbs)
    for flag in re.findall(r"`(--[a-z][\w.-]*)[^`]*`", page.read_text()):
        assert flag in TORCHRUN or has_flag(every, flag), f"there is no {flag}"


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """A folder in which the README's five minutes have been run, smaller."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "book.txt").write_bytes(samples.text()[:40_000])
    (folder / "held-out.txt").write_bytes(samples.text()[50_000:51_000])
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        text = (ROOT / "README.md").read_text().split("## Five minutes")[1].split("##")[0]
        lines = re.findall(r"^    (longstride .*)$", text, re.M)
        assert [line.split()[1] for line in lines] == ["train", "eval", "sample", "plot"]
        for line in lines:
            words = words_of(line)
            main([*words, *SMALLER] if words[0] == "train" else words)
    return folder


def test_five_minutes(folder):
    for name in ("model.safetensors", "eval-test.json", "page.png", "metrics.jsonl"):
        assert (folder / "run" / name).is_file()


@pytest.mark.parametrize("page", [page for page in GUIDES if blocks(page, "python")], ids=name_of)
def test_python_blocks_run(page, folder, monkeypatch, tmp_path):
    if page.name == "transformers.md":
        pytest.importorskip("transformers")
    for name in ("book.txt", "held-out.txt"):
        shutil.copy(folder / name, tmp_path)
    shutil.copytree(folder / "run", tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    for block in blocks(page, "python"):
        for long, short in SIZES.items():
            block = re.sub(long, short, block)
        exec(compile(block, name_of(page), "exec"), {})


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_resolve(page):
    for link in links(page):
        if link.startswith(("http:", "https:")):
            continue
        path, _, anchor = unquote(link).partition("#")
        target = page.parent / path if path else page
        assert target.exists(), f"{link} leads nowhere"
        if anchor:
            assert anchor in anchors(target), f"{link}: there is no such heading"


@pytest.mark.parametrize("page", GUIDES, ids=name_of)
def test_named_files_exist(page):
    for path in re.findall(r"`((?:src|tests|docs|benchmarks|examples|\.ci)/[\w./-]*)`", page.read_text()):
        assert (ROOT / path).exists(), f"{path} does not exist"


def test_make_targets_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for page in GUIDES:
        assert make_targets(page) <= targets
    assert make_targets(ROOT / "README.md") >= {"demo", "test"}


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().split()) <= MOST_WORDS
