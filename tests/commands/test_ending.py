"""The last lines of `longstride train`."""

from dataclasses import replace
from pathlib import Path

from longstride.commands.ending import describe_ending
from longstride.training import Summary
from longstride.training.reporting import DONE

TRAINED = Summary(Path("run"), 12, 4.6, 4.5, 4.5, 12, 7.0, 3284.0, 0.0, DONE, True)


def test_a_run_that_trained():
    assert describe_ending("text-small", TRAINED)[0] == "run: step 12, all steps are done; 7 s, 3,284 bytes/s"


def test_a_finished_run_says_how_to_train_longer():
    lines = describe_ending("text-small", replace(TRAINED, bytes_per_second=0.0))
    assert lines[0] == "run: step 12, all steps are done; nothing was left to train"
    assert lines[-1] == "to train longer: longstride train text-small --out run --resume --steps 24"
