"""Kinds of data: the list, and a new kind that is one class and one line in that list."""

import subprocess
import sys
from typing import get_args

import pytest

from longstride.commands.sample import sample
from longstride.data.kind import DataKind
from longstride.data.kinds import KINDS, KindName, all_kinds, kind_class
from longstride.data.prepare import guess_kind, prepare
from longstride.data.store import open_store
from longstride.data.streams import stream_plan
from longstride.sampling.request import Request
from longstride.training import train
from tests.data.small import contents, some_images
from tests.training.small import config


class Symbols(DataKind):
    """Card suits, one byte each."""

    name = "symbols"
    label = "symbols"
    nouns = ("row", "rows")
    suffixes = (".sym",)
    ending = ".sym"
    needs_ending = True
    can_join = True
    default_length = 12
    letters_per_byte = 1
    signs = (("♠", "a spade"), ("♥", "a heart"), ("♦", "a diamond"), ("♣", "a club"))

    @classmethod
    def plan(cls, source, limit=None, join=False, others=()):
        return stream_plan(cls.name, source, False, limit, join)

    def spell_byte(self, byte):
        return "♠♥♦♣"[byte % 4]

    def spell(self, tokens, first, end, has_glyph):
        return "".join(map(self.spell_byte, tokens[first:end].tolist()))

    def byte_label(self, byte):
        return self.spell_byte(byte)

    def write_together(self, samples, path, prompts, originals, scale=1):
        path.write_text("\n".join("".join(map(self.spell_byte, one)) for one in samples), encoding="utf-8")


@pytest.fixture
def symbols(monkeypatch):
    monkeypatch.setitem(KINDS, "symbols", f"{__name__}:Symbols")


def test_the_list_has_the_names_of_the_classes():
    assert [kind.name for kind in all_kinds()] == list(KINDS) == list(get_args(KindName))
    assert all(issubclass(kind_class(name), DataKind) for name in KINDS)
    suffixes = [suffix for kind in all_kinds() for suffix in kind.suffixes]
    assert len(set(suffixes)) == len(suffixes), "a suffix belongs to one kind"


def test_the_list_is_imported_without_numpy():
    code = "import sys, longstride.data.kinds; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("name", KINDS)
def test_a_sample_that_was_written_is_data_and_a_prompt(tmp_path, name):
    """Also of a kind that converts its files: names keep splits apart, and a prompt is no raw file."""
    kind = kind_class(name)((4, 4, 3) if kind_class(name).has_items else ())
    data = {split: some_images(1, (48,), seed).tobytes() for seed, split in enumerate(("train", "valid", "test"))}
    if name == "text":
        data = {split: bytes(byte % 64 + 32 for byte in given) for split, given in data.items()}
    options = dict.fromkeys(kind.prompt_options) | {"items": ()}
    for split, given in data.items():
        path = tmp_path / "made" / split / f"a{kind.ending}"
        path.parent.mkdir(parents=True)
        kind.write_sample(given, path)
        (prompt,) = kind.read_prompts("test", path, 96, options)
        assert len(prompt.data) >= 24
        assert given.startswith(prompt.data)
    assert contents(prepare(tmp_path / "made", tmp_path / "store", name, progress=False)) == data


def test_a_folder_with_a_new_kind_and_notes(tmp_path, symbols):
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "a.sym").write_bytes(bytes(range(100)))
    assert guess_kind(tmp_path / "set") == guess_kind(tmp_path / "set" / "a.sym") == "symbols"
    (tmp_path / "set" / "b.txt").write_text("notes" * 100)
    store = prepare(tmp_path / "set", tmp_path / "text", "text", progress=False)
    assert sum(store.splits.values()) == 500, "text leaves out files with the suffix of another kind"


def test_a_new_kind_is_one_class_and_one_line(tmp_path, symbols, monkeypatch):
    pytest.importorskip("matplotlib")
    from longstride.pictures import attention
    from longstride.pictures.run import plot_run

    (tmp_path / "a.sym").write_bytes(bytes(n * n % 4 for n in range(4000)))
    store = prepare(tmp_path / "a.sym", tmp_path / "store", progress=False)
    assert store.kind == open_store(tmp_path / "store").kind == "symbols"

    run = tmp_path / "run"
    train(config(tmp_path, data=str(tmp_path / "store"), steps=2))
    assert (run / "sample-data.txt").is_file()

    made = sample(run, Request(count=3))
    assert [len(one) for one in made] == [12] * 3
    rows = (run / "sample.sym").read_text(encoding="utf-8").split("\n")
    assert [len(row) for row in rows] == [12] * 3
    assert set("".join(rows)) <= set("♠♥♦♣")
    with pytest.raises(ValueError, match=r"must end in .sym, or be a folder, for symbols"):
        sample(run, Request(out=tmp_path / "a.txt"))
    with pytest.raises(ValueError, match="scale = 2 is for images, and the model makes symbols; leave it out"):
        sample(run, Request(scale=2))

    figures = []
    monkeypatch.setattr(attention, "write_figure", lambda figure, path: figures.append(figure))
    attention.plot_attention(run, out=tmp_path / "attention.png")
    texts = "\n".join(text.get_text() for text in figures[0].texts)
    assert "♠: a spade. ♥: a heart." in texts
    assert "♦: " not in texts
    assert "It is ♠" in texts or "It is ♥" in texts  # Squares modulo 4 are 0 or 1.
    assert plot_run([run]).is_file()
