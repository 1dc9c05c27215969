"""A disk that is full, by a limit on the size of files: the system refuses to write, as it does then."""

import os
from threading import Event
from unittest.mock import Mock

import pytest

from longstride.training import checkpoint, train
from longstride.training.metrics import read_metrics
from longstride.training.run import Run
from tests.training.ranks import start
from tests.training.saved import names, part
from tests.training.small import config, same, store, weights
from tests.training.worker import limited


def curve(run):
    return [(row["step"], row["loss"], row.get("valid_bits_per_byte")) for row in read_metrics(run)]


# AdamW's state is larger than the weights, and Adafactor's is smaller.
@pytest.mark.parametrize(("name", "file"), [("adamw", "the state"), ("adafactor", "the weights")])
def test_a_run_stops_with_a_message_and_goes_on_when_there_is_room(name, file, tmp_path):
    how = {"data": store(tmp_path / "data"), "optimizer": {"name": name}, "steps": 20, "validate_every": 20, "ema": 0.0}
    train(config(tmp_path / "whole", **how))
    cut = config(tmp_path / "cut", **how)
    train(cut, until=5)
    folder = tmp_path / "cut/run/checkpoints"
    sizes = [path.stat().st_size for path in (part(folder / "step-5"), folder / "step-5/model.safetensors")]
    assert sizes[0] > sizes[1] if file == "the state" else sizes[0] < sizes[1]
    words = ["train", "text-small", "--out", cut.out, "--resume", "--until", "10"]
    (ended,) = start(limited, words, sum(sizes) // 2, [0], ranks=1, code=2)
    said = ended.err.splitlines()
    assert said[-1].startswith(f"longstride: train: {folder / 'step-10'} could not be written: ")
    assert "File too large" in said[-1]
    assert said[-1].endswith("; step-5 is whole, and --resume goes on from it")
    assert "Traceback" not in ended.err
    assert names(folder) == ["step-5"]
    assert train(cut, resume=True).step == 20
    assert same(weights(tmp_path / "whole/run"), weights(tmp_path / "cut/run"))
    assert curve(tmp_path / "whole/run") == curve(tmp_path / "cut/run")


def test_the_message_names_a_checkpoint_that_is_still_being_written(tmp_path, monkeypatch):
    """When the metrics cannot be: it is waited for first."""
    wanted, write_manifest, wait = Event(), checkpoint.write_manifest, checkpoint.Checkpoints.wait

    def late(folder):
        assert wanted.wait(60)
        write_manifest(folder)

    def waits(checkpoints):
        if checkpoints._pending_save is not None:
            wanted.set()
        wait(checkpoints)

    monkeypatch.setattr(checkpoint, "write_manifest", late)
    monkeypatch.setattr(checkpoint.Checkpoints, "wait", waits)
    monkeypatch.setattr(Run, "log", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(OSError, match=r"step 3: .*No space left on device; step-2 is whole, and --resume goes on from it$"):
        train(config(tmp_path, save_every=2, log_every=3))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written(tmp_path):
    made = config(tmp_path, steps=10)
    train(made, until=5)
    folder = tmp_path / "run/checkpoints"
    folder.chmod(0o500)
    try:
        with pytest.raises(OSError, match=r"step-10 could not be written: .*Permission denied.*; step-5 is whole"):
            train(made, resume=True)
    finally:
        folder.chmod(0o700)
    assert train(made, resume=True).step == 10
