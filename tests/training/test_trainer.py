import json
import signal
from dataclasses import replace
from math import log2

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from longstride.data import samples
from longstride.data.store import write_store
from longstride.model import SparseTransformer
from longstride.training import train, train_preset, trainer
from longstride.training.manifest import write_manifest
from longstride.training.metrics import read_metrics
from tests.training.small import TEXT, config, same, step, store, weights


def unigram_bits(data):
    share = np.bincount(data.ravel(), minlength=256) / data.size
    return -sum(p * log2(p) for p in share if p)


SMALL = {
    "text-small": ("text", TEXT, (), 2, 30, 0.8),
    "image-small": ("images", samples.patches(), (32, 32, 3), 1, 60, 0.92),
    "audio-small": ("audio", samples.piano(), (), 1, 30, 0.88),
}
"""Kind, data, item, batch and steps; and the share of what a byte's frequency alone gives that is left then."""


@pytest.mark.parametrize("name", ["text-small", pytest.param("image-small", marks=pytest.mark.slow), "audio-small"])
def test_small_presets_learn_real_data(name, tmp_path):
    """Well under what a byte's frequency alone gives."""
    kind, data, item, batch, steps, share = SMALL[name]
    part, rest = np.split(data, [len(data) * 9 // 10])
    rate = 12_000 if kind == "audio" else None
    write_store(tmp_path / "data", kind, {"train": part.ravel(), "valid": rest.ravel()}, item, rate)
    changes = {"steps": steps, "batch": batch, "validate_bytes": 12_288}
    found = train(train_preset(name, data=str(tmp_path / "data"), out=str(tmp_path / "run"), **changes))
    assert found.step == steps
    assert found.valid_bits_per_byte < share * unigram_bits(rest)
    shown = {"text": "txt", "images": "png", "audio": "wav"}[kind]
    assert all((tmp_path / "run" / f"{one}.{shown}").stat().st_size > 100 for one in ("sample-data", "sample-model"))


@pytest.mark.parametrize(
    "changes",
    [{}, {"ema": 0.9, "accumulate": 2}, {"optimizer": {"name": "muon"}}, {"optimizer": {"name": "adafactor"}}],
    ids=str,
)
def test_a_resumed_run_has_the_same_bits(changes, tmp_path):
    """With dropout, through a validation, a checkpoint and an improvement."""
    data = store(tmp_path / "data")
    whole = config(tmp_path / "whole", data=data, steps=20, **changes)
    train(whole)
    parts = config(tmp_path / "parts", data=data, steps=20, **changes)
    paused = train(parts, until=7)
    assert (paused.step, paused.reason) == (7, "paused after step 7")
    assert train(parts, resume=True).step == 20
    assert same(weights(tmp_path / "whole/run"), weights(tmp_path / "parts/run"))
    assert same(*(load_file(tmp_path / one / "run/model.safetensors") for one in ("whole", "parts")))
    losses = [
        {row["step"]: row.get("valid_bits_per_byte") for row in read_metrics(tmp_path / one / "run")}
        for one in ("whole", "parts")
    ]
    assert {step: bits for step, bits in losses[1].items() if bits} == {
        step: bits for step, bits in losses[0].items() if bits
    }


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_stop_at_30_and_resume_to_60(precision, tmp_path):
    """In float16 the loss scale goes on, too."""
    plain = {"data": store(tmp_path / "data"), "steps": 60, "model": {"precision": precision, "layers": 1}}
    train(config(tmp_path / "whole", **plain))
    parts = config(tmp_path / "parts", **plain)
    train(parts, until=30)
    train(parts, resume=True)
    assert same(weights(tmp_path / "whole/run"), weights(tmp_path / "parts/run"))


def test_what_a_run_leaves(tmp_path):
    made = config(tmp_path, steps=13)
    found = train(made)
    run = tmp_path / "run"
    rows = read_metrics(run)
    assert [row["step"] for row in rows] == [3, 6, 9, 12, 13]
    assert [row["step"] for row in rows if "valid_bits_per_byte" in row] == [6, 12, 13]
    for row in rows:
        assert row["bits_per_byte"] == pytest.approx(row["loss"] / np.log(2))
        assert row["bytes_per_second"] > 0
    assert found.best_bits_per_byte == min(row["valid_bits_per_byte"] for row in rows if "valid_bits_per_byte" in row)
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-10", "step-13"]
    assert json.loads((run / "config.json").read_text())["model"]["width"] == 32
    model = SparseTransformer.from_pretrained(run)
    assert model.config == made.model
    assert same(load_file(run / "model.safetensors"), dict(model.state_dict()))
    assert (run / "sample-data.txt").read_text() in TEXT.tobytes().decode("utf-8", "replace")


def test_it_stops_when_validation_stops_improving(tmp_path):
    found = train(config(tmp_path, steps=1000, patience=2, validate_every=1, optimizer={"learning_rate": 3.0, "clip": 1e9}))
    assert found.reason == "no improvement in the last 2 validations"
    assert found.best_step == found.step - 2


def test_an_interruption_saves_and_goes_on(tmp_path, monkeypatch):
    take_step = trainer.Trainer.take_step

    def interrupted(self, tokens):
        if self.step == 4:
            signal.raise_signal(signal.SIGINT)
        return take_step(self, tokens)

    data = store(tmp_path / "data")
    monkeypatch.setattr(trainer.Trainer, "take_step", interrupted)
    made = config(tmp_path / "cut", data=data)
    found = train(made)
    assert (found.step, found.reason) == (5, "interrupted")
    monkeypatch.undo()
    train(made, resume=True)
    train(config(tmp_path / "whole", data=data))
    assert same(weights(tmp_path / "whole/run"), weights(tmp_path / "cut/run"))


def test_dropout_is_another_one_at_every_step_and_seed(tmp_path):
    drawn = []
    for seed, number in ((0, 0), (0, 1), (1, 0), (0, 0)):
        made = trainer.Trainer(config(tmp_path / str(len(drawn)), seed=seed), False)
        made.step = number
        made.take_step(torch.from_numpy(made.training.batch(0, 0, 4)).to(made.device))
        drawn.append(torch.rand(8))
    assert torch.equal(drawn[0], drawn[3])
    assert not any(torch.equal(drawn[0], other) for other in drawn[1:3])


def test_accumulated_parts_are_one_batch(tmp_path):
    data = store(tmp_path / "data")
    plain = {"model": {"dropout": 0.0, "precision": "float64"}, "device": "cpu", "steps": 3, "data": data}
    train(config(tmp_path / "one", **plain))
    train(config(tmp_path / "four", accumulate=4, **plain))
    one, four = weights(tmp_path / "one/run"), weights(tmp_path / "four/run")
    for name, x in one.items():
        torch.testing.assert_close(four[name], x, rtol=1e-4, atol=1e-6)


def test_the_average_is_what_is_kept(tmp_path):
    made = config(tmp_path, steps=4, ema=0.5, validate_every=4, save_every=1, keep=9)
    train(made)
    run = tmp_path / "run"
    states = [load_file(run / f"checkpoints/step-{step}/model.safetensors") for step in (1, 2, 3, 4)]
    torch.manual_seed(made.seed)
    average = dict(SparseTransformer(made.model).state_dict())
    for number, state in enumerate(states):
        kept = min(0.5, (1 + number) / (10 + number))
        average = {name: kept * x + (1 - kept) * state[name] for name, x in average.items()}
    saved = load_file(run / "model.safetensors")
    for name, x in average.items():
        torch.testing.assert_close(saved[name], x)
    assert not torch.equal(saved["output.weight"], states[-1]["output.weight"])


@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
def test_what_is_not_finite_stops_before_the_weights_change(precision, tmp_path, monkeypatch):
    loss = SparseTransformer.loss
    made = trainer.Trainer(config(tmp_path, model={"precision": precision}), False)
    tokens = torch.from_numpy(made.training.batch(0, 0, 4)).to(made.device)
    made.take_step(tokens)
    before = {name: x.clone() for name, x in made.model.state_dict().items()}
    monkeypatch.setattr(SparseTransformer, "loss", lambda self, tokens: loss(self, tokens) * float("nan"))
    starts = ", ".join(map(str, made.training.starts(0, 1, 4)))
    with pytest.raises(FloatingPointError, match=f"step 2 has a loss of nan.* from {starts} on"):
        step(made, tokens)
    assert same(before, made.model.state_dict())


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]
)
def test_an_overflow_skips_the_step_and_halves_the_scale(device, tmp_path, monkeypatch):
    loss = SparseTransformer.loss
    made = trainer.Trainer(config(tmp_path, model={"precision": "float16"}, device=device), False)
    made.updates.loss_scale.growth_interval = 2
    tokens = torch.from_numpy(made.training.batch(0, 0, 4)).to(device)
    assert step(made, tokens)["skipped"] == 0
    first = made.updates.scale
    before = {name: x.clone() for name, x in made.model.state_dict().items()}
    monkeypatch.setattr(SparseTransformer, "loss", lambda self, tokens: loss(self, tokens) * float("inf"))
    assert step(made, tokens)["skipped"] == 1
    assert made.updates.scale == first / 2
    assert same(before, made.model.state_dict())
    monkeypatch.undo()
    for _ in range(2):
        assert step(made, tokens)["skipped"] == 0
    assert made.updates.scale == first


def test_an_overflow_of_the_loss_alone_halves_the_scale_too(tmp_path, monkeypatch):
    loss = SparseTransformer.loss
    made = trainer.Trainer(config(tmp_path, model={"precision": "float16"}), False)
    tokens = torch.from_numpy(made.training.batch(0, 0, 4)).to(made.device)
    scale = made.updates.scale
    monkeypatch.setattr(SparseTransformer, "loss", lambda self, tokens: loss(self, tokens) + float("inf"))
    assert [step(made, tokens)["skipped"] for _ in range(2)] == [1, 1]
    assert made.updates.scale == scale / 4


def test_an_overflow_in_one_optimizer_changes_nothing_in_the_other(tmp_path):
    made = trainer.Trainer(config(tmp_path, model={"precision": "float16"}, optimizer={"name": "muon"}), False)
    tokens = torch.from_numpy(made.training.batch(0, 0, 4)).to(made.device)
    made.take_step(tokens)
    before = {name: x.clone() for name, x in made.model.state_dict().items()}
    hook = made.model.blocks[0].ff.inner.weight.register_hook(lambda slopes: slopes * float("inf"))
    scale = made.updates.scale
    assert step(made, tokens)["skipped"] == 1
    assert made.updates.scale == scale / 2
    assert same(before, made.model.state_dict())
    hook.remove()
    assert step(made, tokens)["skipped"] == 0
    assert all(x.isfinite().all() for x in made.model.state_dict().values())


def test_what_no_scale_helps_stops_a_run_in_float16(tmp_path, monkeypatch):
    loss = SparseTransformer.loss
    monkeypatch.setattr(SparseTransformer, "loss", lambda self, tokens: loss(self, tokens) * float("nan"))
    with pytest.raises(FloatingPointError, match="has a loss of nan"):
        train(config(tmp_path, model={"precision": "float16"}, steps=100, validate_every=100))


def test_a_loss_that_is_not_finite_changes_nothing(tmp_path, monkeypatch):
    """Even if its gradients are."""
    loss = SparseTransformer.loss
    made = trainer.Trainer(config(tmp_path), False)
    before = {name: x.clone() for name, x in made.model.state_dict().items()}
    monkeypatch.setattr(SparseTransformer, "loss", lambda self, tokens: loss(self, tokens) + float("inf"))
    with pytest.raises(FloatingPointError, match="has a loss of inf"):
        step(made, torch.from_numpy(made.training.batch(0, 0, 4)).to(made.device))
    assert same(before, made.model.state_dict())


def test_a_finished_run_is_not_trained_on(tmp_path):
    made = config(tmp_path, steps=6)
    first = train(made)
    before = weights(tmp_path / "run")
    again = train(made, resume=True)
    assert (again.step, again.reason) == (6, "all steps are done")
    assert again.valid_bits_per_byte == first.valid_bits_per_byte
    assert same(before, weights(tmp_path / "run"))
    patient = config(
        tmp_path / "p", steps=1000, patience=1, validate_every=1, optimizer={"learning_rate": 3.0, "clip": 1e9}
    )  # fmt: skip
    stopped = train(patient)
    assert train(patient, resume=True).step == stopped.step


def test_other_data_is_not_resumed_with(tmp_path):
    made = config(tmp_path, steps=6)
    train(made, until=2)
    other = store(tmp_path / "other", train=TEXT[100_000:160_000])
    with pytest.raises(
        ValueError, match=f"other' has other bytes in train than .*run began with, {tmp_path}/data; leave --d"
    ):
        train(replace(made, data=other), resume=True)
    moved = store(tmp_path / "moved")
    (tmp_path / "data").rename(tmp_path / "gone")
    with pytest.raises(ValueError, match="/data; give a copy of that, or give another --out for a new run"):
        train(replace(made, data=other), resume=True)
    assert train(replace(made, data=moved), resume=True).step == 6


def test_data_in_the_cache_is_named_as_it_was_given(tmp_path, monkeypatch):
    monkeypatch.setenv("LONGSTRIDE_CACHE", str(tmp_path / "cache"))
    for name, text in (("book.txt", TEXT[:60_000]), ("other.txt", TEXT[60_000:120_000])):
        (tmp_path / name).write_bytes(bytes(text))
    made = config(tmp_path, data=str(tmp_path / "book.txt"), steps=6)
    train(made, until=2)
    for _ in range(2):  # Made, and found there.
        with pytest.raises(
            ValueError, match=f"^train: data = '{tmp_path}/other.txt' has .* began with, {tmp_path}/book.txt; "
        ):
            train(replace(made, data=str(tmp_path / "other.txt")), resume=True)
    (tmp_path / "book.txt").write_bytes(bytes(TEXT[60_000:120_000]))
    with pytest.raises(
        ValueError, match=f"^train: {tmp_path}/book.txt has other bytes in train than when .*run began; bring"
    ):
        train(made, resume=True)


BAD = [
    ({"data": ""}, "--data must be given"),
    ({"out": ""}, "--out must be given"),
    ({"device": "abacus"}, "device = 'abacus' cannot be used"),
    (
        {"model": {"context": 10_000, "embedding": "matrix(8)"}},
        r"\(valid\) has 8,000 bytes, less than one sequence of the context",
    ),
]


@pytest.mark.parametrize(("changes", "says"), BAD, ids=[says for _, says in BAD])
def test_what_is_wrong_is_refused_before_anything_is_written(changes, says, tmp_path):
    made = config(tmp_path, **{name: value for name, value in changes.items() if name == "model"})
    made = replace(made, **{name: value for name, value in changes.items() if name != "model"})
    with pytest.raises(ValueError, match=says):
        train(made)
    assert not (tmp_path / "run").exists()


def test_images_that_the_model_is_not_for(tmp_path):
    write_store(tmp_path / "images", "images", {"train": TEXT[:3840], "valid": TEXT[:3840]}, (8, 8, 1))
    with pytest.raises(ValueError, match=r"images of 8 x 8 x 1.*is for images of 16 x 4 x 1.*image\(8, 8, 1\)"):
        train(config(tmp_path, data=str(tmp_path / "images"), model={"embedding": "image(16, 4, 1)"}))


def test_a_run_does_not_lie_in_its_data(tmp_path):
    made = config(tmp_path)
    with pytest.raises(ValueError, match="lies in --data"):
        train(replace(made, out=f"{made.data}/run"))
    assert not (tmp_path / "data/run").exists()


def test_another_runs_folder_is_left_alone(tmp_path):
    made = config(tmp_path, steps=2)
    train(made)
    before = weights(tmp_path / "run")
    with pytest.raises(ValueError, match="already holds a run; add --resume"):
        train(made)
    with pytest.raises(ValueError, match="seed was 0 and is now 1"):
        train(replace(made, seed=1), resume=True)
    with pytest.raises(ValueError, match="model width was 32 and is now 64"):
        train(replace(made, model=replace(made.model, width=64)), resume=True)
    with pytest.raises(ValueError, match="holds no run to resume"):
        train(replace(made, out=str(tmp_path / "other")), resume=True)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/precious.txt").write_text("mine")
    with pytest.raises(ValueError, match="is not an empty folder"):
        train(replace(made, out=str(tmp_path / "full")))
    assert same(before, weights(tmp_path / "run"))


def test_a_refused_resumption_lets_go_of_the_folder(tmp_path):
    made = config(tmp_path, steps=6)
    train(made, until=5)
    path = tmp_path / "run/checkpoints/step-5/state.json"
    kept = path.read_text()
    path.write_text(json.dumps({**json.loads(kept), "losses": None}))
    write_manifest(path.parent)
    with pytest.raises(ValueError, match=r"step-5/state.json: losses must be a list, got NoneType") as refused:
        train(made, resume=True)
    path.write_text(kept)
    write_manifest(path.parent)
    assert refused.value  # Still there, with all that its frames hold.
    assert train(made, resume=True).step == 6


@pytest.mark.parametrize("text", ["[]", "null", "{", '{"splits": 3}'])
def test_a_damaged_note_of_the_data_is_named(text, tmp_path):
    made = config(tmp_path, steps=6)
    train(made, until=5)
    (tmp_path / "run/data.json").write_text(text)
    with pytest.raises(ValueError, match=r"data.json is damaged: .*give the same --data"):
        train(made, resume=True)


def test_a_disk_that_is_full_when_the_best_weights_are_written(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    made = config(tmp_path, steps=20, save_every=4)
    monkeypatch.setattr("longstride.model.pretrained.save_file", full)
    with pytest.raises(
        OSError,
        match=r"^train: step 6: .*No space left on device: '.*/model.safetensors'; step-4 is whole, and --resume goes on",
    ):
        train(made)
    monkeypatch.undo()
    assert train(made, resume=True).step == 20
