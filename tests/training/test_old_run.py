"""A run made by the first version whose checkpoints have a manifest (commit 14dfe5b), paused at step 4 of 8."""

import json
import tarfile
from pathlib import Path

import pytest
import torch

from longstride.commands.evaluate import evaluate
from longstride.commands.sample import sample
from longstride.data.prepare import prepare
from longstride.model import SparseTransformer
from longstride.sampling.request import Request
from longstride.training import TrainConfig, train

LOSSES = {5: 5.543726921081543, 6: 5.543210029602051, 7: 5.534886837005615, 8: 5.533464431762695}
"""Of the steps after the pause, as that version trained them."""


@pytest.fixture
def run(tmp_path):
    """The run, unpacked, and its data, prepared again: the bytes of the splits must be the same."""
    (tmp_path / "squares.txt").write_bytes(b"".join(b"%d\n" % (n * n) for n in range(400)))
    prepare(tmp_path / "squares.txt", tmp_path / "store", progress=False)
    with tarfile.open(Path(__file__).with_name("old_run.tar.xz")) as archive:
        archive.extractall(tmp_path / "run", filter="data")
    path = tmp_path / "run" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"data": str(tmp_path / "store"), "out": str(path.parent)}))
    return path.parent


def test_an_old_run_is_resumed(run):
    config = TrainConfig.from_json((run / "config.json").read_text(), "config.json")
    train(config, resume=True)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = {row["step"]: row["loss"] for row in rows if row["step"] in LOSSES}
    # Not bit-identical: gradients of norms are summed in another order since then (docs/log.md).
    assert losses == pytest.approx(LOSSES, rel=1e-5)


def test_an_old_run_is_loaded_sampled_and_evaluated(run):
    tokens = torch.arange(32, dtype=torch.uint8)[None]
    best, last = (SparseTransformer.from_pretrained(folder).eval() for folder in (run, run / "checkpoints/step-4"))
    assert torch.equal(best(tokens), last(tokens))
    assert sample(run, Request(length=5, prompt="1", out=run / "made.txt", device="cpu"))[0].startswith(b"1")
    (score,) = evaluate(run, device="cpu")
    assert 7.9 < score.bits_per_byte < 8
