import io
import shlex
import signal
import sys
from dataclasses import replace
from math import log
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

import longstride.commands.demo as module
from longstride.data import samples
from longstride.data.store import open_store
from longstride.evaluation import bits_per_byte
from longstride.model import SparseTransformer, shipped
from longstride.model.card import Card, write_card
from longstride.training import train_preset
from longstride.training.metrics import read_metrics
from tests.model import small as models
from tests.training.small import MODEL


@pytest.fixture(autouse=True)
def small(monkeypatch, tmp_path):
    """Of the same parts, but seconds instead of minutes."""
    text = samples.text()[:100_000]
    monkeypatch.setattr(samples, "text", lambda: text)
    monkeypatch.setattr(samples, "unseen_text", lambda: text[:960])
    monkeypatch.setattr(module, "LENGTH", 20)
    monkeypatch.setitem(shipped.NAMES, "text", tmp_path / "package")
    monkeypatch.setattr(module, "HELD_OUT", 8_000)
    monkeypatch.setattr(module, "VALIDATION", 4_000)
    monkeypatch.setattr(module, "train_preset", lambda name, **changes: replace(train_preset(name, **changes), model=MODEL))


def demo(folder, steps):
    out = Console(file=io.StringIO(), width=100)
    return module.demo(folder, steps, out), out.file.getvalue()


def test_from_bytes_to_bits(tmp_path):
    bits, text = demo(tmp_path, 40)
    assert 3 < bits < 7.5  # 8 before the first step.
    assert f"{bits:.3f}" in text
    assert all(word in text for word in ("gzip -9", "xz -9", "The last 8,000 bytes", "longstride train text-small"))
    store = open_store(tmp_path / "wikipedia")
    assert store.splits == {"train": 88_000, "valid": 4_000, "test": 8_000}
    assert store.split("test").tobytes() == samples.text()[-8_000:].tobytes()
    names = {path.name for path in (tmp_path / "run-1").iterdir()}
    assert {"curve.png", "model.safetensors", "sample-data.txt", "sample-model.txt"} <= names
    assert f"The run is {tmp_path / 'run-1'}: curve.png, " in text  # On one line, however long.


def test_a_second_run_has_its_own_folder_and_the_same_data(tmp_path):
    _, text = demo(tmp_path, 1)
    assert "88,000 bytes of Wikipedia, 1 step." in text
    written = (tmp_path / "wikipedia/train.bin").stat().st_mtime_ns
    _, text = demo(tmp_path, 2)
    assert f"The run is {tmp_path / 'run-2'}" in text
    assert (tmp_path / "wikipedia/train.bin").stat().st_mtime_ns == written
    assert [read_metrics(tmp_path / f"run-{number}")[-1]["step"] for number in (1, 2)] == [1, 2]


def test_held_out_bits_are_those_of_the_test_split(tmp_path):
    model = SparseTransformer(MODEL).eval()
    torch.nn.init.normal_(model.output.weight)  # Else every byte has 8 bits.
    whole = samples.text()[-8_000:].reshape(-1, MODEL.context)
    with torch.no_grad():
        nats = model.nats(torch.from_numpy(whole)).double().mean()
    found = module.held_out_bits(model, module._store(tmp_path / "data"))
    assert found == pytest.approx(float(nats) / log(2), rel=1e-5)


def test_compressed_bits(tmp_path):
    store = module._store(tmp_path / "data")
    found = module.compressed_bits(store.split("test").tobytes(), store.split("train").tobytes())
    assert [name for name in found if name != "zstd -19"] == ["gzip -9", "xz -9", "xz -9 that has read the training text"]
    alone, knowing = found["xz -9"], found["xz -9 that has read the training text"]
    assert 1 < knowing < alone < 8
    assert 1 < found["gzip -9"] < 8


def test_the_text_model_writes_and_is_measured_on_unseen_text(tmp_path, monkeypatch):
    model = models.model(context=48)
    model.save_pretrained(tmp_path / "package/text", "float16")
    out = Console(file=io.StringIO(), width=100)
    monkeypatch.setattr(module, "zstd", lambda: None)
    bits = module.show_text_model(out)
    saved = SparseTransformer.from_pretrained("text")
    assert bits == pytest.approx(bits_per_byte(saved, samples.unseen_text()).bits_per_byte, rel=1e-6)
    text = out.file.getvalue()
    assert "The " in text
    assert all(
        word in text for word in (f"{bits:.3f}", "gzip -9", "xz -9", "960 bytes", "zstd is left out", "sequences of 48")
    )
    write_card(tmp_path / "package/text", Card("text", "text", data="A book. By X.", parameters=2_500_000), model.config)
    monkeypatch.setattr(module, "zstd", lambda: lambda data, level: data[: level * 12])
    module.show_text_model(out)
    text = out.file.getvalue()
    assert "2.5 million weights, trained on A book, writes" in text.replace("\n", " ")
    assert "zstd -19 " in text
    assert "1.900" in text  # 19 * 12 of 960 bytes.
    assert text.count("zstd is left out") == 1


def test_an_interruption_ends_the_line_of_the_text(tmp_path, monkeypatch):
    def interrupted(*_, **__):
        yield [b"ca"]
        raise KeyboardInterrupt

    models.model(context=48).save_pretrained(tmp_path / "package/text", "float16")
    monkeypatch.setattr(module, "generate", interrupted)
    out = Console(file=io.StringIO(), width=100)
    with pytest.raises(KeyboardInterrupt):
        module.show_text_model(out)
    assert out.file.getvalue().endswith("\nThe ca\n")


def test_without_the_text_model_the_demo_says_so(tmp_path):
    out = Console(file=io.StringIO(), width=100)
    assert module.show_text_model(out) is None
    assert "text is not here" in out.file.getvalue()


def test_zstd(monkeypatch):
    for found in (None, "zstandard"):
        for name in ("compression.zstd", "zstandard"):
            stand_in = SimpleNamespace(compress=lambda data, level: data[:level]) if name == found else None
            monkeypatch.setitem(sys.modules, name, stand_in)
        compress = module.zstd()
        assert (compress and compress(b"abcdef", 3)) == (b"abc" if found else None)


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interruption_exits_as_its_signal_and_says_how_to_go_on(tmp_path, monkeypatch, capsys, number, expected):
    from longstride.commands.main import main
    from longstride.training.trainer import Trainer

    take_step = Trainer.take_step

    def interrupted(self, tokens):
        signal.raise_signal(number)
        return take_step(self, tokens)

    monkeypatch.setattr(Trainer, "take_step", interrupted)
    run = tmp_path / "run-1"
    with pytest.raises(SystemExit) as end:
        main(["demo", "--folder", str(tmp_path), "--steps", "9"])
    assert end.value.code == expected
    assert (run / "checkpoints/step-1").is_dir()
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"all is saved; to go on: longstride train text-small --out {run} --resume"
    monkeypatch.setattr(Trainer, "take_step", take_step)
    main(shlex.split(last.partition("longstride ")[2]))
    assert f"{run}: step 9, all steps are done" in capsys.readouterr().out


def test_it_needs_no_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    _, text = demo(tmp_path, 1)
    assert "pictures or samples could not be written: plot run needs matplotlib" in text


def test_no_steps(tmp_path):
    with pytest.raises(ValueError, match="steps must be at least 1, got 0"):
        demo(tmp_path, 0)
