"""Kernels of a step are compiled before the first one, and in parallel."""

import json
import os
import subprocess
import sys

import pytest
import torch

from longstride.training import first_step
from longstride.training.first_step import compiles_first
from longstride.training.trainer import Trainer
from tests.training.small import config, same, step


def test_a_pass_that_only_compiles_compiles_all_that_a_step_needs(tmp_path):
    """With Triton's compiler, for a Hopper GPU; launches are counted, not made."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", "tests.training.first_step", tmp_path]
    answer = json.loads(subprocess.run(words, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout)
    assert {"gelu_product", "gelu_product_gradient", "lane_forward", "lane_backward"} < set(answer["compiled before"])
    assert answer["compiled before"] == answer["loaded before"]
    assert answer["launched before"] == answer["compiled in the step"] == []
    assert set(answer["launched"]) == set(answer["compiled before"])
    assert answer["threads"] >= min(2, os.cpu_count())
    assert answer["changed"] == answer["gradients"] == []


@pytest.mark.parametrize(
    ("device", "is_wrapped", "recompute", "expected"),
    [
        ("cuda", False, "off", True),
        ("cuda", False, "off + parts", True),
        ("cuda", False, "2*parts", False),
        ("cuda", False, "host + again", False),
        ("cuda", True, "off", False),
        ("cpu", False, "off", False),
    ],
)
def test_which_runs_compile_first(device, is_wrapped, recompute, expected, tmp_path):
    made = config(tmp_path, model={"recompute": recompute})
    assert compiles_first(made, torch.device(device), is_wrapped) == expected


def test_only_the_first_step_has_a_pass_before_it(tmp_path, monkeypatch):
    """Compiled or not, the run has the same weights, as its steps set the seed of their dropout."""
    passes, final, compile_kernels = [], [], first_step.compile_kernels
    monkeypatch.setattr(first_step, "compile_kernels", lambda *given: (passes.append(1), compile_kernels(*given)))
    for first in (False, True):
        trainer = Trainer(config(tmp_path / str(first)), resume=False, say=lambda line: None)
        trainer.compiles_first = first
        for number in range(2):
            step(trainer, torch.from_numpy(trainer.training.batch(0, number, trainer.config.batch)))
        trainer.close()
        final.append(trainer.model.state_dict())
    assert passes == [1]
    assert same(*final)


def test_detection_of_anomalies_ignores_a_pass_that_only_compiles():
    """Its results, on memory that no kernel has filled, may be NaN."""
    model = torch.nn.Linear(2, 2)
    with torch.autograd.set_detect_anomaly(True):
        first_step.compile_kernels(model, lambda: (model.weight.sum() * 0).sqrt().backward())
        assert torch.is_anomaly_enabled()


def test_gradients_of_a_pass_that_fails_are_dropped():
    """They come from memory that no kernel has filled; a step after the error must not add to them."""
    model = torch.nn.Linear(2, 2)

    def fail():
        model(torch.ones(1, 2)).sum().backward()
        raise KeyError

    with pytest.raises(KeyError):
        first_step.compile_kernels(model, fail)
    assert model.weight.grad is None
