import json
import runpy
import sys
from math import inf
from pathlib import Path

import pytest
import torch

from longstride.commands.export import export
from longstride.commands.main import main
from longstride.commands.models import show
from longstride.data import samples
from longstride.evaluation import bits_per_byte
from longstride.model import SparseTransformer, shipped
from longstride.model.card import Figure, read_card
from longstride.training import train
from longstride.training.config import TrainConfig
from tests.model import small as small_models
from tests.training.small import TEXT, config, store

ROOT = Path(__file__).parents[2]
MODEL = {"dropout": 0.0, "precision": "bfloat16"}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("export")
    train(config(folder, model=MODEL, steps=4))
    return folder / "run"


def refused(message, *words):
    with pytest.raises(SystemExit) as ending:
        main(["export", *map(str, words)])
    assert ending.value.code == 2
    return message


def test_a_run_becomes_a_small_model(run, tmp_path, capsys):
    main(["export", str(run), str(tmp_path / "mine")])
    folder = tmp_path / "mine"
    assert {path.name for path in folder.iterdir()} == {
        "config.json", "model.safetensors", "train.json", "card.json", "README.md",
    }  # fmt: skip
    best, found = SparseTransformer.from_pretrained(run), SparseTransformer.from_pretrained(folder)
    assert found.config == best.config
    for name, x in best.state_dict().items():
        assert torch.equal(found.state_dict()[name], x.half().float())
    card = read_card(folder)
    size = (folder / "model.safetensors").stat().st_size
    assert (card.name, card.kind, card.dtype, card.size, card.steps) == ("mine", "text", "float16", size, 4)
    assert size < 0.6 * (run / "model.safetensors").stat().st_size
    assert card.parameters == best.parameter_count()
    assert card.bits_per_byte == min(json.loads(line).get("valid_bits_per_byte", inf) for line in _metrics(run))
    assert card.sha256 in (folder / "README.md").read_text()
    assert f"wrote {folder}: {card.parameters:,} weights in float16, {size:,} bytes" in capsys.readouterr().out


def test_the_card_has_the_step_of_the_weights(tmp_path):
    """Of the best validation, not of the plan; and the bytes that there were to score."""
    data = store(tmp_path / "data", TEXT[:9_000], TEXT[9_000:9_200])
    train(config(tmp_path, data=data, model=MODEL, steps=2000, validate_every=2), until=3)
    card = export(tmp_path / "run", tmp_path / "mine")
    best = min(
        (json.loads(line) for line in _metrics(tmp_path / "run")), key=lambda row: row.get("valid_bits_per_byte", inf)
    )
    assert (card.steps, card.planned_steps, card.figures[0].bytes) == (best["step"], 2000, 192)
    assert f"{best['step']} of 2,000 steps" in (tmp_path / "mine/README.md").read_text()
    assert export(tmp_path / "run", tmp_path / "last", checkpoint="step-3").steps == 3
    assert export(tmp_path / "mine", tmp_path / "again").steps == best["step"]


def _metrics(run):
    return (run / "metrics.jsonl").read_text().splitlines()


def test_the_settings_name_no_paths_and_train_again(run, tmp_path):
    export(run, tmp_path / "mine")
    text = (tmp_path / "mine/train.json").read_text()
    assert str(run.parent) not in text
    settings = TrainConfig.from_json(text)
    assert settings.model == TrainConfig.from_json((run / "config.json").read_text()).model
    export(tmp_path / "mine", tmp_path / "again")
    assert (tmp_path / "again/train.json").read_text() == text
    data = store(tmp_path / "data", TEXT[:9_000], TEXT[9_000:12_000])
    words = ["--config", str(tmp_path / "mine"), "--init-from", str(tmp_path / "mine"), "--data", data]
    main(["train", *words, "--out", str(tmp_path / "tuned"), "--steps", "1"])
    assert json.loads((tmp_path / "tuned/run.json").read_text())["init_from"]["path"] == str(tmp_path / "mine")


def test_a_folder_for_transformers_is_a_saved_model(run, tmp_path):
    """Its config.json has the model where that of a run has it."""
    export(run, tmp_path / "mine")
    path = tmp_path / "mine/config.json"
    content = {"model_type": "longstride", "architectures": ["LongstrideForCausalLM"], "model": json.loads(path.read_text())}
    path.write_text(json.dumps(content))
    card = export(tmp_path / "mine", tmp_path / "again")
    assert card.steps == 4
    weights = [SparseTransformer.from_pretrained(tmp_path / name).state_dict() for name in ("mine", "again")]
    assert all(torch.equal(x, weights[1][name]) for name, x in weights[0].items())


def test_the_precision_and_a_checkpoint(run, tmp_path):
    card = export(run, tmp_path / "mine", "float32", "float32", "step-4")
    found = SparseTransformer.from_pretrained(tmp_path / "mine")
    assert (found.config.precision, card.dtype, card.steps, card.figures) == ("float32", "float32", 4, ())
    last = SparseTransformer.from_pretrained(run / "checkpoints/step-4")
    assert torch.equal(found.output.weight, last.output.weight)


def test_figures_come_from_results(run, tmp_path, capsys):
    main(["eval", str(run), "--min-context", "0", "8", "--most-bytes", "512", "--json", str(tmp_path / "bits.json")])
    card = export(run, tmp_path / "mine", results=[tmp_path / "bits.json"])
    assert [(figure.bytes, figure.min_context) for figure in card.figures] == [(512, 0), (512, 8)]
    assert card.figures[0].data == "data, valid"
    copied = export(tmp_path / "mine", tmp_path / "copy")
    assert (copied.figures, copied.kind, copied.name) == (card.figures, "text", "copy")
    (tmp_path / "bits.json").write_text("{}")
    with pytest.raises(ValueError, match=r"bits\.json is no results file; longstride eval --json writes one"):
        export(run, tmp_path / "other", results=[tmp_path / "bits.json"])
    assert not (tmp_path / "other").exists()


def test_rows_of_the_card_can_be_told_apart(run, tmp_path, capsys):
    (tmp_path / "book.txt").write_bytes(TEXT[:20_000])
    words = [str(run), "--data", str(tmp_path / "book.txt"), "--most-bytes"]
    files = [tmp_path / f"{number}.json" for number in range(3)]
    for file, more in zip(files, (["256", "--min-context", "0", "8"], ["512"], ["256", "--precision", "float32"])):
        main(["eval", *words, *more, "--json", str(file)])
    card = export(run, tmp_path / "mine", results=files)
    assert [(figure.data, figure.bytes, figure.min_context) for figure in card.figures] == [
        ("book.txt, valid", 256, 8),
        ("book.txt, valid", 512, 0),
        ("book.txt, valid, in float32", 256, 0),
    ]


def test_other_data_of_the_same_name_keeps_its_row(run, tmp_path, capsys):
    files = []
    for number, size in enumerate((20_000, 9_000)):
        (tmp_path / str(number)).mkdir()
        book = tmp_path / str(number) / "book.txt"
        book.write_bytes(TEXT[-size:])
        files.append(tmp_path / f"{number}.json")
        main(["eval", str(run), "--data", str(book), "--json", str(files[-1])])
    card = export(run, tmp_path / "mine", results=files)
    assert [figure.bytes for figure in card.figures] == [1000, 450]


def test_results_in_the_run_are_those_of_its_weights(run, tmp_path, capsys):
    main(["eval", str(run), "--most-bytes", "256"])
    try:
        assert export(run, tmp_path / "mine").figures[0].bytes == 256
        path = run / "eval-valid-first-256.json"
        path.write_text(path.read_text().replace('"weights_sha256": "', '"weights_sha256": "0'))
        assert export(run, tmp_path / "mine", force=True).figures[0].data == "data, validation of the run"
    finally:
        (run / "eval-valid-first-256.json").unlink()


def test_a_folder_that_is_not_free(run, tmp_path, capsys):
    export(run, tmp_path / "mine")
    cases = {
        tmp_path / "mine": "is not an empty folder; add --force to replace the model in it",
        run: "is what is exported; give another folder",
        run / "config.json": "is a file; give the folder that is to be made",
        run.parent: "is not an empty folder; give another",
    }
    for folder, message in cases.items():
        refused(message, run, folder)
        assert message in capsys.readouterr().err
    refused("", tmp_path / "nowhere", tmp_path / "mine")
    assert "export: " in capsys.readouterr().err
    main(["export", str(run), str(tmp_path / "mine"), "--force", "--dtype", "bfloat16"])
    assert read_card(tmp_path / "mine").dtype == "bfloat16"


@pytest.fixture(scope="module")
def shipping():
    return runpy.run_path(str(ROOT / "benchmarks/ship.py"))


@pytest.fixture
def text_model(run, shipping, tmp_path, monkeypatch):
    """A stand-in for `text`, made as the real one is."""
    monkeypatch.setitem(shipped.NAMES, "text", tmp_path / "package")
    monkeypatch.setitem(shipping["CHECKS"], "text", ("unseen-text", 1_000))
    monkeypatch.setenv("LONGSTRIDE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    main(["eval", str(run), "--most-bytes", "512", "--json", "bits.json"])
    words = [str(run), "text", "--results", "enwik8, validation=bits.json", "--samples", "Noise."]
    monkeypatch.setattr(sys, "argv", ["ship.py", *words])
    shipping["main"]()
    return tmp_path / "package/text"


def test_shipping(text_model, shipping, run, monkeypatch, capsys):
    card, model = read_card(text_model), SparseTransformer.from_pretrained("text")
    assert model.config.precision == "float32"
    assert card.figures[0].data == "enwik8, validation"
    assert (card.samples, card.licence) == ("Noise.", "CC BY-SA 3.0")
    assert card.check == Figure("unseen-text", 1_000, 0, card.check.bits_per_byte)
    monkeypatch.setitem(shipping["main"].__globals__, "LARGEST", 1000)
    with pytest.raises(SystemExit, match=r"at most 1,000 are shipped"):
        shipping["main"]()


def test_a_card_for_every_name(shipping):
    assert list(shipping["TEXTS"]) == list(shipping["CHECKS"]) == list(shipped.NAMES)
    words = [set(texts) for texts in shipping["TEXTS"].values()]
    assert all(names == {"title", "data", "licence", "terms", "limits"} for names in words)


@pytest.mark.parametrize("sizes", [(2, 2, 3), ()])
def test_a_check_is_bits_per_byte_of_the_first_bytes(shipping, sizes, monkeypatch, tmp_path):
    """Of whole images, for a model of images."""
    monkeypatch.setenv("LONGSTRIDE_CACHE", str(tmp_path))
    monkeypatch.setitem(shipping["CHECKS"], "piano", ("piano", 48))
    shape = {"context": 12, "embedding": "image(2, 2, 3)"} if sizes else {}
    model = small_models.model(**shape)
    data = samples.piano()[:48]
    expected = bits_per_byte(model, data.reshape(-1, *sizes) if sizes else data).bits_per_byte
    assert shipping["score"]("piano", model) == Figure("piano", 48, 0, expected)


def test_a_name_works_wherever_a_run_does(text_model, tmp_path, capfd):
    card = read_card(text_model)
    main(["eval", "text", "--most-bytes", "1000"])
    assert f"{card.check.bits_per_byte:.4f}" in capfd.readouterr().out
    main(["eval", "text", "--data", str(_book(tmp_path)), "--most-bytes", "200"])
    main(["sample", "text", "--prompt", "The ", "--length", "8"])
    assert "The " in capfd.readouterr().out
    main(["plot", "attention", "text", "--out", str(tmp_path / "look.png")])
    assert (tmp_path / "look.png").stat().st_size > 1000
    main(["doctor", "text"])
    words = ["--config", "text", "--init-from", "text", "--data", str(_book(tmp_path)), "--steps", "1"]
    main(["train", *words, "--out", "tuned"])
    assert json.loads((tmp_path / "tuned/run.json").read_text())["init_from"]["path"] == str(text_model)
    assert json.loads((tmp_path / "tuned/config.json").read_text())["init_from"] == str(text_model)
    assert sorted(path.name for path in text_model.iterdir()) == [
        "README.md", "card.json", "config.json", "model.safetensors", "train.json",
    ]  # fmt: skip


def _book(folder):
    (folder / "book.txt").write_bytes(TEXT[:20_000])
    return folder / "book.txt"


def test_the_list(text_model, capsys):
    show()
    main(["models"])
    out = capsys.readouterr().out
    assert out.count("CC BY-SA 3.0") == 2
    assert f"{read_card(text_model).bits_per_byte:.3f}" in out
    assert f"text: {text_model}" in out
