"""`longstride sample`, from the command line to text, pictures and sound."""

import io
import os
import re
import subprocess
import sys
import wave
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

import longstride.commands.sample
from longstride import generate
from longstride.commands import main as cli
from longstride.common.console import Progress
from longstride.data import audio, images
from longstride.data.image_files import from_png
from longstride.data.store import write_store
from longstride.model import SparseTransformer
from longstride.sampling.data_kind import find_data_kind
from longstride.sampling.outputs import plan_output
from longstride.sampling.request import Request
from longstride.training import TrainConfig
from longstride.training.source import open_source
from tests.training.small import MODEL, TEXT

ITEM = (4, 5, 3)
MODELS = {
    "text": replace(MODEL, dropout=0.0),
    "audio": replace(MODEL, dropout=0.0),
    "bytes": replace(MODEL, dropout=0.0),
    "images": replace(MODEL, dropout=0.0, context=60, embedding="image(4, 5, 3)"),
}
RATE = 4000


def a_run(folder, kind):
    """As training leaves one, with a network that has learned nothing and yet prefers some bytes."""
    data = TEXT[:6000]
    item, rate = (ITEM, None) if kind == "images" else ((), RATE if kind == "audio" else None)
    store = write_store(folder / "data", kind, {"train": data, "valid": data}, item, rate)
    model = SparseTransformer(MODELS[kind])
    torch.nn.init.normal_(model.output.weight, std=0.2)
    run = folder / "run"
    model.save_pretrained(run)
    (run / "config.json").write_text(TrainConfig(model=MODELS[kind], data=str(folder / "data"), out=str(run)).to_json())
    (run / "data.json").write_text(store.to_json())
    return run


@pytest.fixture(params=["text", "images", "audio", "bytes"])
def any_run(request, tmp_path):
    return request.param, a_run(tmp_path, request.param)


def run(capfdbinary, *words):
    """(exit code, standard output, standard error)"""
    code = 0
    try:
        cli.main(["sample", *map(str, words), "--device", "cpu"])
    except SystemExit as end:
        code = int(end.code or 0)
    sys.stdout.flush()
    captured = capfdbinary.readouterr()
    return code, captured.out.decode(), captured.err.decode()


def wanted(folder, prompts, length=None, **how):
    """The same by the Python API, prompts and all."""
    made = list(prompts)
    for new in generate(SparseTransformer.from_pretrained(folder), prompts, length, **how):
        made = [one + some for one, some in zip(made, new)]
    return made


def refused(capfdbinary, says, *words):
    code, out, err = run(capfdbinary, *words)
    assert (code, out) == (2, "")
    assert err.startswith("longstride: ")
    assert len(err.splitlines()) == 1
    assert says in err


def unframed(path, item, gap=2):
    """The images of a sheet: [rows, columns, height, width, channels]."""
    pixels = np.asarray(Image.open(path))
    height, width = item[0] + gap, item[1] + gap
    rows, columns = (pixels.shape[0] + gap) // height, (pixels.shape[1] + gap) // width
    found = [
        [pixels[r * height : r * height + item[0], c * width : c * width + item[1]] for c in range(columns)]
        for r in range(rows)
    ]
    return np.array(found).reshape(rows, columns, *item)


def test_a_text_is_printed(capfdbinary, tmp_path):
    """The prompt first. Nothing is written, and standard output holds the text alone."""
    folder = a_run(tmp_path, "text")
    before = sorted(folder.iterdir())
    code, out, err = run(capfdbinary, folder, "--prompt", "Où", "--length", 30, "--seed", 5)
    assert code == 0
    (made,) = wanted(folder, ["Où".encode()], 30, seed=5)
    assert out == made.decode("utf-8", "replace")
    assert out.startswith("Où")
    assert re.fullmatch(r"30 bytes in 0:\d\d, [\d,]+ bytes/s\n", err)
    assert sorted(folder.iterdir()) == before


def test_a_text_beyond_the_context(capfdbinary, tmp_path):
    folder = a_run(tmp_path, "text")
    words = ["--prompt", "To", "--length", 150, "--count", 2, "--out", tmp_path / "text.txt"]
    code, _, err = run(capfdbinary, folder, *words)
    assert code == 0
    line = "152 bytes are more than the context of 64: the window slides, and each further one begins with the last 32 bytes"
    assert err.startswith(line)
    expected = wanted(folder, [b"To"] * 2, 150)
    there = (tmp_path / "text.txt").read_bytes()
    assert all(one.decode("utf-8", "replace").encode() in there for one in expected)
    assert [len(one) for one in expected] == [152, 152]


def test_characters_come_whole_and_others_are_replaced(capfdbinary, tmp_path, monkeypatch):
    folder = a_run(tmp_path, "text")
    flushed = []

    def bytes_that_come(model, prompts, length, **how):
        for one in "é".encode() + b"\xff\x1b[31ma" + "€".encode()[:2]:
            yield [bytes([one])]
            flushed.append(capfdbinary.readouterr().out)

    monkeypatch.setattr(longstride.commands.sample, "generate", bytes_that_come)
    run(capfdbinary, folder)
    sys.stdout.flush()
    assert [x.decode() for x in flushed[:4]] == ["", "é", "\ufffd", "\x1b"]
    flushed.clear()
    monkeypatch.setattr("longstride.sampling.outputs.StandardOutput.__init__", on_a_terminal)
    _, out, err = run(capfdbinary, folder)
    assert b"".join(flushed).decode() == "é\ufffd\ufffd[31ma"  # No colours.
    assert out == "\ufffd\n"
    assert err.count("\n") == 1  # And no bar.


def test_ends_of_lines_on_a_terminal(capfdbinary, monkeypatch):
    monkeypatch.setattr("longstride.sampling.outputs.StandardOutput.__init__", on_a_terminal)
    stream = longstride.commands.sample.StandardOutput()
    for some in (b"a\r", b"\nb\rc\r\n", b"d\r", b"e\r"):
        stream.write(some)
    stream.close()
    assert capfdbinary.readouterr().out.decode() == "a\nb\ufffdc\nd\ufffde\ufffd\n"


def test_a_checkpoints_samples_have_its_name(tmp_path):
    folder = a_run(tmp_path, "text")
    source = open_source("sample", folder)
    kind = find_data_kind(source, MODELS["text"], None)
    for weights, name in ((folder, "sample.txt"), (folder / "checkpoints/step-500", "sample-step-500.txt")):
        assert plan_output(Request(), replace(source, weights=weights), kind, 2).combined == folder / name


def test_nothing_waits_in_a_buffer(tmp_path, monkeypatch):
    path = tmp_path / "out"
    with path.open("wb") as file:
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(file))
        longstride.commands.sample.StandardOutput().write(b"a")
        assert path.read_bytes() == b"a"
        monkeypatch.undo()


def on_a_terminal(stream, begin=longstride.commands.sample.StandardOutput.__init__):
    begin(stream)
    stream.terminal = True


def test_default_lengths(capfdbinary, any_run):
    """500 bytes of text would be more than this context has."""
    kind, folder = any_run
    _, out, _ = run(capfdbinary, folder, "--kind", kind, *(["--out", folder / "a.txt"] if kind == "text" else []))
    size = MODELS[kind].context
    name = {"text": "a.txt", "images": "sample.png", "audio": "sample.wav", "bytes": "sample.bin"}[kind]
    noun = {"text": "text", "images": "image", "audio": "sound", "bytes": "sample"}[kind]
    assert re.fullmatch(rf"wrote {folder / name}: 1 {noun}, {size} bytes in 0:\d\d, [\d,]+ bytes/s\n", out)
    (made,) = wanted(folder, [b""])
    if kind == "text":
        assert (folder / name).read_bytes() == made.decode("utf-8", "replace").encode()
    elif kind == "images":
        assert from_png(folder / name) == (made, ITEM)
    elif kind == "audio":
        with wave.open(str(folder / name)) as file:
            assert file.getframerate() == RATE
        assert b"".join(x.tobytes() for x in audio.read(folder / name, RATE)) == made
    else:
        assert (folder / name).read_bytes() == made


def test_samples_are_the_same_whatever_the_batch(capfdbinary, tmp_path):
    folder = a_run(tmp_path, "bytes")
    for batch in (1, 3, 7):
        run(capfdbinary, folder, "--count", 7, "--batch", batch, "--out", tmp_path / f"by{batch}", "--seed", 3)
    made = wanted(folder, [b""] * 7, seed=3)
    assert len(set(made)) == 7
    for batch in (1, 3, 7):
        assert [path.read_bytes() for path in sorted((tmp_path / f"by{batch}").iterdir())] == made


def test_settings_are_passed_on(capfdbinary, tmp_path):
    folder = a_run(tmp_path, "bytes")
    seen = set()
    for name, value in (("seed", 1), ("temperature", 0.3), ("top_k", 2), ("top_p", 0.2)):
        run(capfdbinary, folder, f"--{name}", value, "--length", 40)
        (made,) = wanted(folder, [b""], 40, **{name: value})
        assert (folder / "sample.bin").read_bytes() == made
        seen.add(made)
    assert len(seen) == 4


def test_several_texts_in_a_file_and_in_a_folder(capfdbinary, tmp_path):
    folder = a_run(tmp_path, "text")
    made = [one.decode("utf-8", "replace") for one in wanted(folder, [b"To"] * 11, 20)]
    words = [folder, "--prompt", "To", "--length", 20, "--count", 11]
    _, out, err = run(capfdbinary, *words)
    assert out.startswith(f"wrote {folder / 'sample.txt'}: 11 texts, 220 bytes")
    assert err.splitlines()[-1].startswith("220 of 220 bytes  ")
    parts = [f"==== sample {number} ====\n{one}\n" for number, one in enumerate(made)]
    assert (folder / "sample.txt").read_bytes().decode() == "\n".join(parts)
    texts = tmp_path / "new" / "texts"
    run(capfdbinary, *words, "--out", texts)
    assert [path.name for path in sorted(texts.iterdir())][::10] == ["sample-00.txt", "sample-10.txt"]
    assert [path.read_bytes().decode() for path in sorted(texts.iterdir())] == made


def test_files_of_an_earlier_call_are_named_and_kept(capfdbinary, tmp_path):
    """Nothing says whose they are. Names of other forms are no samples."""
    folder, texts = a_run(tmp_path, "text"), tmp_path / "texts"
    words = [folder, "--length", 5, "--out", texts]

    def others(*more):
        code, _, err = run(capfdbinary, *words, *more)
        assert code == 0
        return [line.split(" also has ")[1] for line in err.splitlines() if " also has " in line]

    assert others("--count", 5) == []
    for name in ("sample-data.txt", "sample-9.png", "sample.txt", "my-sample-7.txt"):
        (texts / name).write_text("kept")
    assert others("--count", 5, "--force") == []
    before = {path.name: path.read_bytes() for path in texts.iterdir()}
    assert others("--count", 4, "--force") == ["1 file that this call did not write: sample-4.txt"]
    two = ["--count", 2, "--force", "--seed", 5]
    assert others(*two) == ["3 files that this call did not write: sample-2.txt, sample-3.txt, sample-4.txt"]
    changed = {path.name for path in texts.iterdir() if path.read_bytes() != before.get(path.name)}
    assert changed == {"sample-0.txt", "sample-1.txt"}
    assert others("--count", 11) == [
        "5 files that this call did not write: sample-0.txt, sample-1.txt, sample-2.txt and 2 more"
    ]


def test_a_prompt_from_a_file(capfdbinary, tmp_path):
    """As it is, also if it is no UTF-8."""
    for kind in ("bytes", "text"):
        folder = a_run(tmp_path / kind, kind)
        (tmp_path / "prompt").write_bytes(b"\xff\0abc\r\n")
        run(capfdbinary, folder, "--prompt-file", tmp_path / "prompt", "--out", tmp_path / f"{kind}.out")
    (made,) = wanted(folder, [b"\xff\0abc\r\n"])
    assert (tmp_path / "text.out").read_bytes() == made.decode("utf-8", "replace").encode()
    assert (tmp_path / "bytes.out").read_bytes()[:7] == b"\xff\0abc\r\n"


def test_a_sheet_and_a_folder_of_images(capfdbinary, tmp_path):
    folder = a_run(tmp_path, "images")
    made = wanted(folder, [b""] * 5)
    run(capfdbinary, folder, "--count", 5)
    found = unframed(folder / "sample.png", ITEM)
    assert found.shape[:2] == (2, 3)
    assert [image.tobytes() for image in found.reshape(6, *ITEM)[:5]] == made
    run(capfdbinary, folder, "--count", 5, "--out", tmp_path / "images")
    names = ["sample-0.png", "sample-1.png", "sample-2.png", "sample-3.png", "sample-4.png"]
    assert sorted(path.name for path in (tmp_path / "images").iterdir()) == [*names, "sheet.png"]
    assert [from_png(tmp_path / "images" / name)[0] for name in names] == made
    assert (tmp_path / "images/sheet.png").read_bytes() == (folder / "sample.png").read_bytes()


def test_images_are_scaled_up(capfdbinary, tmp_path):
    folder = a_run(tmp_path, "images")
    made = np.frombuffer(b"".join(wanted(folder, [b""] * 2)), np.uint8).reshape(2, *ITEM)
    run(capfdbinary, folder, "--count", 2, "--scale", 3, "--out", tmp_path / "images")
    large = (3 * ITEM[0], 3 * ITEM[1], ITEM[2])
    found = [np.asarray(Image.open(tmp_path / f"images/sample-{number}.png")) for number in range(2)]
    assert np.array_equal(found, made.repeat(3, axis=1).repeat(3, axis=2))
    assert np.array_equal(unframed(tmp_path / "images/sheet.png", large)[0], found)


@pytest.fixture
def originals(tmp_path):
    """The same three as an array, as a folder, and the first alone."""
    found = np.random.default_rng(1).integers(0, 256, (3, *ITEM), np.uint8)
    np.save(tmp_path / "originals.npy", found)
    (tmp_path / "originals").mkdir()
    for number, one in enumerate(found):
        images.to_png(one, ITEM, tmp_path / f"originals/{number}.png")
    return found


def test_images_are_completed(capfdbinary, tmp_path, originals):
    """Original, what was kept, and completions: a row for each image."""
    folder = a_run(tmp_path, "images")
    for name, share, rows, chosen in (
        ("originals.npy", None, 2, [0, 1, 2]),
        ("originals", 0.25, 1, [0, 1, 2]),
        ("originals/1.png", 0.75, 3, [1]),
        ("originals.npy", 0.5, 2, [2, 0]),
    ):
        words = ["--prompt-file", tmp_path / name, "--count", 2]
        words += [] if share is None else ["--keep-top", share]
        words += ["--items", *chosen] if chosen == [2, 0] else []
        code, out, _ = run(capfdbinary, folder, *words)
        assert code == 0
        assert f": {2 * len(chosen)} images, {2 * len(chosen) * (60 - 15 * rows)} bytes" in out
        found = unframed(folder / "sample.png", ITEM)
        assert found.shape[:2] == (len(chosen), 4)
        prompts = [originals[item].tobytes()[: 15 * rows] for item in chosen for _ in range(2)]
        made = wanted(folder, prompts)
        for number, (item, row) in enumerate(zip(chosen, found)):
            assert (row[0] == originals[item]).all()
            assert (row[1][:rows] == originals[item][:rows]).all()
            assert (row[1][rows:] == 128).all()
            assert [image.tobytes() for image in row[2:]] == made[2 * number : 2 * number + 2]


def test_a_grey_image_for_a_model_of_colours(capfdbinary, tmp_path, originals):
    folder = a_run(tmp_path, "images")
    Image.fromarray(originals[0][:, :, 0]).save(tmp_path / "grey.png")
    run(capfdbinary, folder, "--prompt-file", tmp_path / "grey.png")
    original, _, _ = unframed(folder / "sample.png", ITEM)[0]
    assert (original == originals[0][:, :, :1]).all()


def test_sounds_are_completed(capfdbinary, tmp_path):
    folder = a_run(tmp_path, "audio")
    codes = np.random.default_rng(2).integers(0, 256, 500, np.uint8).tobytes()
    audio.to_wav(codes, tmp_path / "a.wav", RATE)
    for words, kept, size in (
        (["--seconds", 0.005], 20, 64),
        (["--seconds", 0.005, "--length", 7], 20, 27),
        ([], 32, 64),  # Half of the context, which is less than a second.
    ):
        code, _, _ = run(capfdbinary, folder, "--prompt-file", tmp_path / "a.wav", *words)
        assert code == 0
        found = b"".join(piece.tobytes() for piece in audio.read(folder / "sample.wav", RATE))
        assert found == wanted(folder, [codes[:kept]], size - kept)[0]


def test_several_sounds_follow_each_other(capfdbinary, tmp_path):
    folder = a_run(tmp_path, "audio")
    run(capfdbinary, folder, "--count", 2)
    found = b"".join(piece.tobytes() for piece in audio.read(folder / "sample.wav", RATE))
    first, second = wanted(folder, [b""] * 2)
    assert (found[:64], found[64:-64], found[-64:]) == (first, b"\x80" * (RATE // 4), second)


def test_a_saved_model_says_what_it_makes_or_is_told(capfdbinary, tmp_path, monkeypatch):
    """Its files go where one stands."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for kind, config in MODELS.items():
        SparseTransformer(config).save_pretrained(tmp_path / kind)
    assert run(capfdbinary, tmp_path / "images")[0] == 0
    assert from_png("sample.png")[1] == ITEM
    refused(capfdbinary, "does not say what its bytes are; give --kind text, audio or bytes", tmp_path / "text")
    assert run(capfdbinary, tmp_path / "text", "--kind", "audio", "--length", 5)[0] == 0
    with wave.open("sample.wav") as file:
        assert (file.getframerate(), file.getnframes()) == (12_000, 5)
    refused(capfdbinary, "embedding 'matrix(8)' says how large they are", tmp_path / "text", "--kind", "images")
    assert run(capfdbinary, tmp_path / "images", "--kind", "bytes")[0] == 0
    assert len((tmp_path / "here/sample.bin").read_bytes()) == 60
    refused(capfdbinary, "sample.png is there already; add --force to replace it", tmp_path / "images")
    assert sorted(path.name for path in (tmp_path / "images").iterdir()) == ["config.json", "model.safetensors"]


def test_nothing_is_replaced_unless_it_may_be(capfdbinary, tmp_path):
    folder = a_run(tmp_path, "images")
    path = tmp_path / "mine.png"
    path.write_bytes(b"mine")
    refused(capfdbinary, f"{path} is there already; add --force", folder, "--out", path)
    assert path.read_bytes() == b"mine"
    assert run(capfdbinary, folder, "--out", path, "--force")[0] == 0
    assert from_png(path)[1] == ITEM
    (tmp_path / "many").mkdir()
    (tmp_path / "many/sample-1.png").write_bytes(b"mine")
    refused(capfdbinary, "sample-1.png is there already", folder, "--count", 3, "--out", tmp_path / "many")
    assert [path.name for path in (tmp_path / "many").iterdir()] == ["sample-1.png"]
    for _ in range(2):  # Its own it may.
        assert run(capfdbinary, folder)[0] == 0
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--temperature 0", "sample: temperature must be at least 0.001, got 0.0; top_k = 1 takes the most likely byte"),
        ("--temperature -1", "sample: temperature must be at least 0.001, got -1.0\n"),
        ("--temperature nan", "sample: temperature must be a finite number, got nan"),
        ("--top-k 0", "sample: top_k must be at least 1, got 0"),
        ("--top-k 257", "sample: top_k must be at most 256, as there are no more bytes, got 257"),
        ("--top-p 0", "sample: top_p must be above 0 and at most 1, got 0.0"),
        ("--top-p 1.5", "sample: top_p must be above 0 and at most 1, got 1.5"),
        ("--count 0", "sample: count must be at least 1, got 0"),
        ("--batch 0", "sample: batch must be at least 1, got 0"),
        ("--length 0", "sample: length must be at least 1, got 0"),
        ("--prompt " + 64 * "x", "sample: prompt has 64 bytes, and the context is 64; give at most 63"),
        ("--prompt a --prompt-file README.md", "sample: prompt = 'a' and prompt_file = 'README.md': give one"),
        ("--prompt-file nowhere.txt", "sample: prompt_file = 'nowhere.txt' does not exist; give a file"),
        ("--prompt-file /", "sample: prompt_file = '/' is a folder; give a file in it"),
        ("--keep-top 0.5", "sample: keep_top = 0.5 is for images, and the model makes text; leave it out"),
        ("--scale 2", "sample: scale = 2 is for images, and the model makes text; leave it out"),
        ("--scale 0", "sample: scale must be at least 1, got 0"),
        ("--scale 65", "sample: scale must be at most 64, got 65"),
        ("--seconds 1", "sample: seconds = 1.0 is for audio, and the model makes text; leave it out"),
        ("--checkpoint step-3", "has no checkpoint 'step-3'; it has none yet"),
        ("--device nowhere", "device = 'nowhere' cannot be used: there is no such device; give auto, cpu, cuda or cuda:1"),
        ("--kind audio --out a.mp3", "sample: out = 'a.mp3' must end in .wav, or be a folder, for audio"),
        ("--kind bytes --count 2 --out a.bin", "sample: count = 2 of bytes do not go into one file; give --out a folder"),
        ("--out Makefile.txt/a.txt", "cannot be written"),
    ],
)
def test_what_is_refused(capfdbinary, tmp_path, monkeypatch, words, says):
    folder = a_run(tmp_path, "text")
    (tmp_path / "Makefile.txt").touch()
    monkeypatch.chdir(tmp_path)
    words = words.split()
    if "--device" in words:
        code = 0
        with pytest.raises(SystemExit) as ended:
            cli.main(["sample", str(folder), *words])
        code, err = ended.value.code, capfdbinary.readouterr().err.decode()
        assert code == 2
        assert says in err
        return
    refused(capfdbinary, says, folder, *words)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["Makefile.txt", "data", "run"]


def test_a_prompt_of_another_kind_is_refused(capfdbinary, tmp_path):
    """By its name, so also if it holds something else. Any file is bytes."""
    for name in ("a.wav", "a.png"):
        (tmp_path / name).write_bytes(b"the prompt")
    says = "is a file of {}, and the model makes {}; give one of {}"
    as_bytes = ", or --kind bytes to take the file's bytes as they are"
    folders = {kind: a_run(tmp_path / kind, kind) for kind in MODELS}
    for made, name, text in (
        ("text", "a.wav", says.format("sound", "text", "text") + as_bytes),
        ("text", "a.png", says.format("images", "text", "text") + as_bytes),
        ("audio", "a.png", says.format("images", "audio", "sound") + as_bytes),
        ("images", "a.wav", says.format("sound", "images", "images") + "\n"),
    ):
        refused(capfdbinary, text, folders[made], "--prompt-file", tmp_path / name)
    for made, *words in (("text", "--kind", "bytes"), ("bytes",)):
        assert run(capfdbinary, folders[made], "--prompt-file", tmp_path / "a.wav", *words)[0] == 0


def test_many_processes_are_refused(capfdbinary, tmp_path, monkeypatch):
    folder = a_run(tmp_path, "text")
    monkeypatch.setenv("WORLD_SIZE", "2")
    refused(capfdbinary, "sample: 2 processes were started, and would all make and write the same", folder)


def test_what_is_refused_with_images(capfdbinary, tmp_path, originals):
    folder = a_run(tmp_path, "images")
    (tmp_path / "broken.png").write_bytes((tmp_path / "originals/0.png").read_bytes()[:60])
    (tmp_path / "no.png").write_bytes(b"no image")
    images.to_png(bytes(60), (5, 4, 3), tmp_path / "turned.png")
    np.save(tmp_path / "many.npy", np.zeros((65, *ITEM), np.uint8))
    for says, *words in (
        ("prompt = 'a' is text, and the model makes images; give an image, as in --prompt-file a.png", "--prompt", "a"),
        ("length = 9 is not for images, which are made whole; leave it out", "--length", 9),
        ("keep_top = 0.5 says what is kept of --prompt-file; give that, too", "--keep-top", 0.5),
        (f"prompt_file = '{tmp_path / 'broken.png'}' cannot be read to its end", "--prompt-file", tmp_path / "broken.png"),
        (f"prompt_file = '{tmp_path / 'no.png'}' cannot be read as PNG or JPEG", "--prompt-file", tmp_path / "no.png"),
        ("is 5 x 4 x 3, and the model makes images of 4 x 5 x 3", "--prompt-file", tmp_path / "turned.png"),
        ("has 65 images; say which, as in --items 0 1 2", "--prompt-file", tmp_path / "many.npy"),
        ("items must be 0 to 2, got 3", "--prompt-file", tmp_path / "originals.npy", "--items", 3),
        ("keep_top must be between 0 and 1, got 1.0", "--prompt-file", tmp_path / "originals", "--keep-top", 1),
        ("keep_top = 0.1 keeps 0 of 4 rows; give a number between 0.125 and 0.875", "--prompt-file",
         tmp_path / "originals", "--keep-top", 0.1),
        ("must end in .png, or be a folder, for images", "--out", tmp_path / "a.jpg"),
    ):  # fmt: skip
        refused(capfdbinary, says, folder, *words)
    assert not (folder / "sample.png").exists()


def test_what_is_refused_with_sound(capfdbinary, tmp_path):
    folder = a_run(tmp_path, "audio")
    audio.to_wav(bytes(40), tmp_path / "a.wav", RATE)
    (tmp_path / "no.wav").write_bytes(b"no sound")
    for says, *words in (
        ("prompt = 'a' is text, and the model makes audio; give a sound", "--prompt", "a"),
        ("seconds = 0.012, and " + str(tmp_path / "a.wav") + " has 0.010", "--prompt-file", tmp_path / "a.wav",
         "--seconds", 0.012),
        ("seconds = 0.016 is 64 bytes, and the context is 64; give at most 0.015", "--prompt-file", tmp_path / "a.wav",
         "--seconds", 0.016),
        ("seconds must be above 0, got -1.0", "--prompt-file", tmp_path / "a.wav", "--seconds", -1),
        ("seconds must be a finite number, got inf", "--prompt-file", tmp_path / "a.wav", "--seconds", "inf"),
        (f"prompt_file = '{tmp_path / 'no.wav'}' cannot be read as sound", "--prompt-file", tmp_path / "no.wav"),
    ):  # fmt: skip
        refused(capfdbinary, says, folder, *words)


def test_weights_that_are_not_finite(capfdbinary, tmp_path):
    folder = a_run(tmp_path, "text")
    model = SparseTransformer.from_pretrained(folder)
    with torch.no_grad():
        model.norm.bias[0] = float("nan")
    model.save_pretrained(tmp_path / "model")
    code, _, err = run(capfdbinary, tmp_path / "model", "--kind", "text")
    assert code == 2
    assert "model/model.safetensors: 'norm.bias' has a value of nan; all must be finite" in err
    with torch.no_grad():
        model.norm.bias.fill_(3e38)
        model.output.weight.fill_(3e38)
    model.save_pretrained(tmp_path / "large")
    code, _, err = run(capfdbinary, tmp_path / "large", "--kind", "text")
    assert code == 2
    assert "longstride: sample: the logits are not finite" in err


def test_a_folder_that_is_no_model_or_has_no_weights(capfdbinary, tmp_path):
    refused(capfdbinary, "is no run and no saved model: it has no config.json", tmp_path)
    folder = a_run(tmp_path, "text")
    (folder / "model.safetensors").unlink()
    refused(capfdbinary, "has no weights yet", folder)
    (folder / "data.json").write_text("{")
    torch.save({}, folder / "model.safetensors")
    refused(capfdbinary, "model.safetensors cannot be read", folder)


def test_an_interruption_keeps_what_there_is(capfdbinary, any_run, monkeypatch):
    """Texts and sounds as far as they have come, images that are whole."""
    kind, folder = any_run
    size = MODELS[kind].context

    def interrupted(*given, **how):
        for number, new in enumerate(generate(*given, **how)):
            if how["first"] and number == 7:
                raise KeyboardInterrupt
            yield new

    monkeypatch.setattr(longstride.commands.sample, "generate", interrupted)
    monkeypatch.setattr(os, "_exit", sys.exit)  # Threads of other tests may still be there.
    made = wanted(folder, [b""] * 2)
    out = folder / "out"
    code, said, err = run(capfdbinary, folder, "--count", 3, "--batch", 1, "--out", out)
    assert code == 130
    assert err.splitlines()[-1] == "longstride: interrupted"
    ending = {"text": "txt", "images": "png", "audio": "wav", "bytes": "bin"}[kind]
    assert (out / f"sample-0.{ending}").exists()
    assert (out / f"sample-1.{ending}").exists() == (kind != "images")
    assert not (out / f"sample-2.{ending}").exists()
    assert f"{1 if kind == 'images' else 2} of 3 " in said
    if kind == "bytes":
        assert (out / "sample-1.bin").read_bytes() == made[1][:7]
        assert len((out / "sample-0.bin").read_bytes()) == size
    if kind == "text":
        monkeypatch.setattr(
            longstride.commands.sample, "generate", lambda *given, **how: interrupted(*given, **how | {"first": 1})
        )
        code, said, err = run(capfdbinary, folder, "--prompt", "To")
        assert (code, said[:2]) == (130, "To")
        assert err.splitlines()[-1] == "longstride: interrupted"


def test_a_reader_that_has_enough(tmp_path):
    """As in: longstride sample RUN | head"""
    folder = a_run(tmp_path, "text")
    command = [sys.executable, "-m", "longstride", "sample", str(folder), "--device", "cpu", "--prompt", "To be"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.read(2) == b"To"
        process.stdout.close()
        said = process.stderr.read().decode()
    assert process.returncode in (0, 141)  # 0 if all was written before the pipe was closed.
    assert re.fullmatch(r"\d+ bytes in .*\n", said)


def test_a_reader_that_is_gone(tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    done = by_itself(a_run(tmp_path, "text"), "--prompt", "To be", stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert done.returncode == 141
    assert re.fullmatch(r"\d+ bytes in .*\n", done.stderr)


def by_itself(folder, *words, **streams):
    command = [sys.executable, "-m", "longstride", "sample", str(folder), "--device", "cpu", *map(str, words)]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.run(command, text=True, check=False, env=buffered, **streams)


def test_nobody_reads_how_far_it_is(tmp_path):
    """The work goes on."""
    folder = a_run(tmp_path, "text")
    reader, writer = os.pipe()
    os.close(reader)
    done = by_itself(folder, "--count", 3, "--batch", 1, "--out", tmp_path / "three", stdout=subprocess.PIPE, stderr=writer)
    os.close(writer)
    assert done.returncode == 0
    assert f"wrote {tmp_path / 'three'}: 3 texts" in done.stdout
    assert len(list((tmp_path / "three").iterdir())) == 3


def test_standard_output_is_closed(tmp_path):
    done = by_itself(a_run(tmp_path, "text"), stderr=subprocess.PIPE, preexec_fn=lambda: os.close(1))
    assert done.returncode == 0
    assert re.fullmatch(r"\d+ bytes in .*\n", done.stderr)


def test_standard_error_is_closed(tmp_path):
    done = by_itself(a_run(tmp_path, "text"), "--length", 9, stdout=subprocess.PIPE, preexec_fn=lambda: os.close(2))
    assert done.returncode == 0
    assert done.stdout
    assert "bytes/s" not in done.stdout


def test_both_in_one_place(tmp_path):
    """As in: longstride sample RUN 2>&1 | cat"""
    folder = a_run(tmp_path, "text")
    done = by_itself(folder, "--length", 20, "--prompt", "To be", stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert re.search(r"\n20 bytes in .*\n\Z", done.stdout)
    assert done.stdout.startswith("To be")


def test_a_pipe_may_lead_to_the_terminal_that_a_bar_is_on(tmp_path, monkeypatch):
    reader, writer = os.pipe()
    for place, is_file in ((os.fdopen(writer, "wb"), False), ((tmp_path / "out").open("wb"), True)):
        with io.TextIOWrapper(place) as stdout:
            monkeypatch.setattr(sys, "stdout", stdout)
            assert longstride.commands.sample.StandardOutput().file == is_file
            monkeypatch.undo()
    os.close(reader)


@pytest.mark.parametrize(("file", "terminal", "shown"), [(True, True, True), (True, False, False), (False, True, False)])
def test_when_there_is_a_bar_beside_a_text(capfdbinary, tmp_path, monkeypatch, file, terminal, shown):
    """Only if the text goes to a file, and somebody is there to see it."""
    found = []

    def opened(stream, begin=longstride.commands.sample.StandardOutput.__init__):
        begin(stream)
        stream.file = file

    def noted(progress, total, console, shown, begin=Progress.__init__):
        found.append(shown)
        begin(progress, total, console, shown=False)

    monkeypatch.setattr("longstride.sampling.outputs.StandardOutput.__init__", opened)
    monkeypatch.setattr(Progress, "__init__", noted)
    monkeypatch.setattr("longstride.common.console.StandardError.is_terminal", terminal)
    assert run(capfdbinary, a_run(tmp_path, "text"), "--length", 3)[0] == 0
    assert found == [shown]
