import json
from dataclasses import replace
from math import inf, nan

import numpy as np
import pytest

from longstride.training import OptimizerConfig, TrainConfig
from tests.training.small import MODEL


def test_round_trip():
    changes = {"steps": 7, "batch": 6, "accumulate": 3, "ema": 0.5, "compile": True, "device": "cpu"}
    made = TrainConfig(MODEL, "data", "run", optimizer=OptimizerConfig("muon", clip=inf, final=1), **changes)
    assert TrainConfig.from_json(made.to_json()) == made


def test_what_is_left_out_is_the_papers():
    made = TrainConfig.from_json(json.dumps({"model": json.loads(MODEL.to_json())}))
    assert made == TrainConfig(MODEL)
    assert (made.optimizer.learning_rate, made.optimizer.warmup, made.optimizer.decay, made.optimizer.clip) == (
        0.00035, 5000, 0.01, 1.0,
    )  # fmt: skip


def test_paths_and_other_libraries_numbers_become_plain(tmp_path):
    made = TrainConfig(MODEL, tmp_path / "data", tmp_path / "run", steps=np.int64(3))
    assert made == TrainConfig(MODEL, str(tmp_path / "data"), str(tmp_path / "run"), steps=3)
    assert json.loads(made.to_json())["steps"] == 3


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"steps": 0}, "train: steps must be at least 1, got 0"),
        ({"steps": 1.5}, "train: steps must be a whole number"),
        ({"batch": True}, "train: batch must be a whole number"),
        ({"batch": 8, "accumulate": 3}, "train: accumulate = 3 must divide batch = 8"),
        ({"seed": -1}, "train: seed must be at least 0"),
        ({"keep": 0}, "train: keep must be at least 1"),
        ({"patience": -1}, "train: patience must be at least 0"),
        ({"ema": 1.0}, "train: ema must be at least 0 and less than 1, got 1.0"),
        ({"ema": nan}, "train: ema must be at least 0 and less than 1, got nan"),
        ({"compile": "no"}, "train: compile must be true or false, got 'no'"),
    ],
    ids=str,
)
def test_a_wrong_config_is_refused(changes, says):
    with pytest.raises(ValueError, match=says):
        TrainConfig(MODEL, **changes)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"name": "sgd"}, "optimizer: name must be one of adamw, muon, adafactor, got 'sgd'"),
        ({"learning_rate": -1}, "learning_rate must be at least 0 and at most 1,000, got -1"),
        ({"learning_rate": inf}, "learning_rate must be at least 0 and at most 1,000, got inf"),
        ({"learning_rate": nan}, "learning_rate must be at least 0 and at most 1,000, got nan"),
        ({"learning_rate": "1"}, "learning_rate must be a number, got '1'"),
        ({"final": 1.5}, "final must be at least 0 and at most 1, got 1.5"),
        ({"beta2": 1}, "beta2 must be at least 0 and less than 1, got 1"),
        ({"decay": True}, "decay must be a number, got True"),
        ({"clip": 0}, "clip must be more than 0"),
        ({"warmup": -1}, "warmup must be at least 0"),
    ],
    ids=str,
)
def test_a_wrong_optimizer_is_refused(changes, says):
    with pytest.raises(ValueError, match=f"optimizer: {says}" if "optimizer" not in says else says):
        OptimizerConfig(**changes)


GOOD = json.loads(TrainConfig(MODEL).to_json())


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "run/config.json is not JSON"),
        ("[]", "run/config.json must hold a JSON object, got a list"),
        ("{}", "run/config.json: model must be given"),
        (json.dumps({**GOOD, "model": 3}), "run/config.json: model must be an object, got 3"),
        (json.dumps({**GOOD, "optimizer": None}), "run/config.json: optimizer must be an object, got None"),
        (json.dumps({**GOOD, "stesp": 3}), r"run/config.json: there is no field 'stesp'; did you mean 'steps'\?"),
        (json.dumps({**GOOD, "optimizer": {"bata1": 0.5}}), r"config.json: optimizer: there is no field 'bata1'.*'beta1'"),
        (json.dumps({**GOOD, "steps": "many"}), "run/config.json: steps must be a whole number .*, got 'many'"),
        (
            json.dumps({**GOOD, "optimizer": {"beta1": 2}}),
            "run/config.json: optimizer: beta1 must be at least 0 and less than 1",
        ),
        (json.dumps({**GOOD, "model": {**GOOD["model"], "heads": 3}}), "run/config.json: model: heads = 3 does not divide"),
        (json.dumps({**GOOD, "data": None}), "run/config.json: data must be a path, got None"),
    ],
)
def test_a_damaged_file_is_refused_by_name(text, says):
    with pytest.raises(ValueError, match=says):
        TrainConfig.from_json(text, "run/config.json")


def test_a_changed_config_is_checked_again():
    with pytest.raises(ValueError, match="accumulate"):
        replace(TrainConfig(MODEL), accumulate=5)
