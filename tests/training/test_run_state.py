import json
from dataclasses import asdict

import pytest
import torch
from torch import nn

from longstride.training.precision import Updates
from longstride.training.run_state import RunState

GOOD = {"best": 2.5, "best_step": 3, "without_better": 1, "losses": [1.0, 2]}


def read(numbers):
    return RunState.read(numbers, 4, "state.json")


@pytest.mark.parametrize("run_state", [RunState(), RunState(2.5, 3, 1, [1.0, 2.0], 2)])
def test_what_is_saved_is_read(run_state):
    assert read(json.loads(json.dumps(asdict(run_state)))) == run_state


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"best": None}, "best and best_step must both be given or both be null"),
        ({"best": "low"}, "best must be a finite number, got 'low'"),
        ({"best": 10**400}, "best must be a finite number"),
        ({"best_step": 5}, "best_step must be at most its step, 4, got 5"),
        ({"best_step": True}, "best_step must be a whole number of at least 1, got True"),
        ({"without_better": -1}, "without_better must be at least 0, got -1"),
        ({"without_better": 5}, "without_better must be at most its step, 4, got 5"),
        ({"losses": "none"}, "losses must be a list, got str"),
        ({"losses": [1.0] * 5}, "the number of losses must be at most its step, 4, got 5"),
        ({"losses": [float("nan")]}, "losses must be a finite number, got nan"),
        ({"skipped": -1}, "skipped must be at least 0, got -1"),
        ({"skipped": 5}, "skipped must be at most its step, 4, got 5"),
    ],
    ids=str,
)
def test_what_is_forged_is_named(changes, says):
    with pytest.raises(ValueError, match=f"^state.json: {says}"):
        read(GOOD | changes)


def test_older_checkpoints_have_no_skipped_steps():
    assert read(GOOD).skipped == 0


@pytest.mark.parametrize("name", GOOD)
def test_what_is_missing_is_named(name):
    with pytest.raises(ValueError, match=f"^state.json: {name} is missing$"):
        read({key: value for key, value in GOOD.items() if key != name})


def scaled(precision="float16"):
    return Updates(nn.Linear(2, 2), [], precision, 1.0, torch.device("cpu"))


def test_a_loss_scale_is_read():
    saved = scaled().state() | {"scale": 1024.0, "_growth_tracker": 7}
    other = scaled()
    other.load_state(json.loads(json.dumps(saved)))
    assert other.state() == saved
    scaled("float32").load_state("whatever it is")


@pytest.mark.parametrize(
    "changes",
    [
        {"scale": 0.0}, {"scale": -1.0}, {"scale": "large"}, {"scale": 1e300}, {"scale": 10**400}, {"scale": None},
        {"growth_factor": 1.0}, {"backoff_factor": "half"}, {"growth_interval": 10**30}, {"_growth_tracker": -1},
        {"_growth_tracker": 1.5}, {"_growth_tracker": 10**30}, {"more": 1},
    ],
    ids=str,
)  # fmt: skip
def test_a_forged_loss_scale_is_refused(changes):
    updates = scaled()
    before = updates.state()
    with pytest.raises(ValueError, match=r"^scaler"):
        updates.load_state(before | changes)
    with pytest.raises(ValueError, match=r"^scaler must be an object with scale, "):
        updates.load_state([])
    assert updates.state() == before
