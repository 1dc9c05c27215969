"""The commands of the guides, run one after the other in a folder that has what they name, with networks of a few numbers.

`tests/test_docs.py` parses all of them. Here those run that need neither a GPU nor hours; LARGE and SYNOPSIS name the rest.
"""

import re
import shlex
import shutil
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from longstride.commands.main import main
from longstride.data import samples
from longstride.data.audio import to_wav
from longstride.data.images import to_png
from tests.pages import GUIDES, name_of
from tests.test_docs import SMALLER

LARGE = {"enwik8", "cifar10", "text-modern", "images32", "bench", "demo", "reproduce", "serve", "play"}
"""Presets, models and verbs that take a GPU, or minutes, or that run until they are stopped."""
SYNOPSIS = re.compile(r"\[|\.\.\.|\bRUN\b|\bFILE\b|\bSHELL\b|\bPRESET\b|\bSTORE\b")
ITEM = 8, 8, 3
"""The images of these runs: height, width, channels."""
KINDS = [("--count 16", "patches"), ("image.png", "patches"), ("sound.wav", "piano")]
"""Where a page has `run` for any run: a word of the command, and the run that it is about."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Data, a run for each kind of it, and other files that the guides name."""
    folder = tmp_path_factory.mktemp("guides")
    random = np.random.RandomState(0)
    for name in ("book.txt", "other.txt", "held-out.txt"):
        (folder / name).write_bytes(samples.text()[:40_000])
    np.save(folder / "patches.npy", random.randint(0, 256, (500, *ITEM), dtype=np.uint8))
    np.save(folder / "held-out.npy", random.randint(0, 256, (40, *ITEM), dtype=np.uint8))
    to_png(random.bytes(192), ITEM, folder / "image.png")
    (folder / "piano.u8").write_bytes(random.bytes(60_000))
    for name in ("sound.wav", "recording.wav"):
        to_wav(random.bytes(1_200), folder / name)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        main(["train", "text-small", "--data", "book.txt", "--out", "run", *SMALLER])
        main(["train", "image-small-dense", "--data", "patches.npy", "--out", "patches", "--steps", "1", "--batch", "2"])
        main(["train", "audio-small", "--data", "piano.u8", "--out", "piano", *SMALLER])
    for name in ("text", "a-model", "demo/run-1"):
        shutil.copytree(folder / "run", folder / name)
    shutil.copytree(folder / "piano", folder / "audio")
    return folder


def blocks_of_commands(page: Path) -> list[str]:
    """The commands in indented blocks, without their comments; those in a sentence may be parts of commands."""
    return [re.sub(r"\s+#.*", "", line) for line in re.findall(r"^    longstride (.*)$", page.read_text(), re.M)]


def runs_here(command: str) -> bool:
    if "--format transformers" in command and not find_spec("transformers"):
        return False
    return not SYNOPSIS.search(command) and not LARGE.intersection(command.split()[:2])


def test_most_commands_run_here():
    every = [command for page in GUIDES for command in blocks_of_commands(page)]
    assert sum(map(runs_here, every)) > len(every) / 3


@pytest.mark.parametrize("page", [page for page in GUIDES if any(map(runs_here, blocks_of_commands(page)))], ids=name_of)
def test_commands_run(page, folder, tmp_path, monkeypatch, capfd):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    for command in filter(runs_here, blocks_of_commands(page)):
        smaller = re.sub(r" --(position|layers)( \d+)+", "", command)  # The runs here have fewer of both.
        words = [word.removesuffix(".xz").replace("wikipedia", "book.txt") for word in shlex.split(smaller)]
        for word, name in KINDS:
            if word in command:
                words = [name if part == "run" else part for part in words]
        if words[0] == "train":
            out, resumes = words[words.index("--out") + 1], "--resume" in words
            if not resumes:
                shutil.rmtree(out, ignore_errors=True)
            words += ["--steps", "6" if resumes else "1"] if resumes or "image" in words[1] else SMALLER
        elif words[0] in ("plot", "sample"):
            words.append("--force")
        try:
            main(words)
        except SystemExit as ending:
            assert not ending.code, f"{command}: {capfd.readouterr().err}"  # noqa: PT017
