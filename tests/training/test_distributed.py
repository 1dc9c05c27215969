"""Two processes train as one does. Each has half of every batch."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from longstride.training.averaging import averaging_dtype
from longstride.training.capture import PLAIN_STEPS
from longstride.training.config import PARALLEL
from longstride.training.metrics import read_metrics
from tests.training.ranks import start, torchrun
from tests.training.small import same, store
from tests.training.worker import (
    SHAKEN,
    SHORT,
    captured,
    counted,
    ended,
    interrupted,
    loaded,
    overflowed,
    refused,
    saved,
    shared_muon,
    shared_weights,
    sparing,
    trained,
    trained_in_float32,
    watched,
)

FIGURES = ("loss", "gradient_norm", "valid_bits_per_byte")


@pytest.fixture
def folder(tmp_path):
    store(tmp_path / "data")
    return tmp_path


def both(**changes):
    """As one model on both, and as a part of it on each."""
    return [{"name": how, "parallel": how, **changes} for how in PARALLEL]


def figures(folder, name, first=1):
    """Of each step from the first on."""
    return [[row.get(one) for one in FIGURES] for row in read_metrics(folder / name / "run") if row["step"] >= first]


def assert_near(found, wanted, within=1e-5):
    assert len(found) == len(wanted)
    for ours, theirs in zip(found, wanted):
        assert ours == [None if x is None else pytest.approx(x, rel=0, abs=within) for x in theirs]


CASES = [
    ({}, trained),
    ({"accumulate": 2}, trained),
    ({"steps": 10, "ema": 0.9, "validate_every": 4, "validate_bytes": 320, "model": {"recompute": "on"}}, trained),
    ({"steps": 6, "optimizer": {"name": "muon"}}, trained_in_float32),
]


@pytest.mark.parametrize(("changes", "work"), CASES, ids=[str(changes) for changes, _ in CASES])
def test_two_ranks_agree_with_one(changes, work, folder):
    """In losses, gradients and validations, to what rounding leaves; both ranks end with the same."""
    work(folder, [{"name": "one", **changes}])
    first, second = start(work, folder, both(**changes))
    assert first.found == second.found
    for how in PARALLEL:
        assert_near(figures(folder, how), figures(folder, "one"))
        assert (folder / how / "run/sample-model.txt").read_text() == (folder / "one/run/sample-model.txt").read_text()


@pytest.mark.parametrize(
    "changes",
    [
        {"accumulate": 2, "ema": 0.9, "model": {"recompute": "on"}},
        {"optimizer": {"name": "muon"}},
        {"averaging": "float16", "model": {"precision": "float16"}},
    ],
    ids=str,
)
def test_captured_steps_average_as_ddp_does(changes, folder):
    """With the same bits, as two numbers have one sum; and also if the run is resumed."""
    plans = [{"name": how, "capture": how, "steps": 8, "save_every": 4, **changes} for how in ("off", "on")]
    first, second = start(captured, folder, plans)
    assert first.found == second.found
    assert first.found[1:] == [[8 - PLAIN_STEPS], 8]
    cut = [{**plans[1], "name": "cut"}]
    start(captured, folder, cut, False, 4)
    start(captured, folder, cut, True)
    for name in ("on", "cut"):
        assert figures(folder, name) == figures(folder, "off")
        assert same(*(load_file(folder / one / "run/checkpoints/step-8/model.safetensors") for one in (name, "off")))


def test_captured_steps_begin_with_the_weights_of_the_first_process():
    first, second = start(shared_weights)
    assert first.found[0] != second.found[0]
    assert first.found[1] == second.found[1]


def test_gradients_averaged_in_half_precision_are_near(folder):
    half = {"precision": "float16"}
    plans = {name: both(averaging=name, model=half) for name in ("float16", "float32")}
    start(trained, folder, [{**plan, "name": f"{plan['name']} {name}"} for name, two in plans.items() for plan in two])
    for how in PARALLEL:
        assert figures(folder, f"{how} float16") != figures(folder, f"{how} float32")
        assert_near(figures(folder, f"{how} float16"), figures(folder, f"{how} float32"), within=1e-3)


@pytest.mark.parametrize("count", [8, pytest.param(100, marks=pytest.mark.slow)])
def test_a_group_ends_while_its_trainer_is_still_there(count, folder):
    """PyTorch's threads then wait for each other, once in four times, if DistributedDataParallel is."""
    half = {"averaging": "float16", "model": {"precision": "float16"}}
    assert [done.found for done in start(ended, folder, half, count, limit=20 + count)] == [count, count]


def test_half_precisions_that_would_lose_gradients_are_refused(folder):
    """Without a scaled loss, or where they cannot be added; also by a process that is alone."""
    plans = [
        {"averaging": "float16"},
        {"averaging": "float16", "model": {"precision": "bfloat16"}},
        {"averaging": "bfloat16"},
    ]
    says = (
        "train: averaging = 'float16' needs --model.precision float16, which scales the loss: else small gradients are 0; "
        "use float32"
    )
    wanted = [says, says, "train: averaging = 'bfloat16' needs GPUs: CPUs cannot average in it; use float32"]
    assert refused(folder, plans) == wanted
    assert [done.found for done in start(refused, folder, plans)] == [wanted, wanted]
    assert not (folder / "run").exists()
    with pytest.raises(ValueError, match=r"use float32 or bfloat16$"):
        averaging_dtype("float16", "bfloat16", torch.device("cuda"))
    assert averaging_dtype("auto", "float16", torch.device("cuda")) == torch.float16


def test_a_batch_that_cannot_be_shared_is_refused(folder):
    """By all ranks, before anything is written."""
    for done in start(refused, folder, [{"batch": 6, "accumulate": 2}, {"batch": 3}]):
        assert done.found == [
            f"train: batch = {batch} must be a multiple of 2 processes times accumulate = {parts}"
            for batch, parts in ((6, 2), (3, 1))
        ]
    assert not (folder / "run").exists()


def test_an_optimizer_that_needs_whole_weights_is_refused(folder):
    for done in start(refused, folder, [{"parallel": "fsdp", "optimizer": {"name": "adafactor"}}]):
        assert done.found == [
            "train: PyTorch's Adafactor cannot work on parts of weights; use --parallel ddp, or adamw or muon"
        ]


def test_three_ranks_resume_with_the_same_bits(folder):
    """DDP orders gradients anew after its first pass, and three numbers have more than one sum; no weight has three parts of
    one size."""
    for name, resume, until in (("whole", False, None), ("cut", False, 7), ("cut", True, None)):
        plans = [{**plan, "name": f"{name} {plan['name']}"} for plan in both(batch=6)]
        start(trained, folder, plans, resume, until, ranks=3)
    for how in PARALLEL:
        assert figures(folder, f"cut {how}") == figures(folder, f"whole {how}")


def test_saved_on_any_number_of_ranks_and_loaded_on_any(folder):
    """Weights, optimizers' state and averages have the same bits, and the run goes on where it was."""
    one = [{"name": "one", "ema": 0.9}]
    trained(folder, [{"name": "whole", "ema": 0.9}], until=10)
    first, second = start(saved, folder, both(ema=0.9), 7)
    assert first.found == second.found
    before = dict(zip(("one", *PARALLEL), saved(folder, one, 7) + first.found))
    for loader, plans in {"one": one, "two": both(ema=0.9)}.items():
        cases = [(saver, {**plan, "name": f"{plan['name']} from {saver}"}) for saver in before for plan in plans]
        for saver, plan in cases:
            shutil.copytree(folder / saver, folder / plan["name"])
        given = folder, [plan for _, plan in cases], 10
        after = loaded(*given) if loader == "one" else start(loaded, *given)[1].found
        for (saver, plan), state in zip(cases, after):
            assert state == before[saver]
            assert_near(figures(folder, plan["name"]), figures(folder, "whole", first=8))


def test_weights_that_are_spread_are_not_whole_all_at_once(folder):
    """When they are made, saved, validated and loaded: not by a process that does not write them."""
    first, second = start(sparing, folder, {"parallel": "fsdp", "steps": 4, "save_every": 2, "validate_every": 2})
    assert second.found["moved"] == first.found["moved"] == 0
    assert second.found["whole"] == 1
    assert first.found["weights"] == second.found["weights"] > 4 * first.found["loaded"] > 0


def test_one_process_may_go_on_with_what_was_spread(folder):
    """It need not be told that it is alone now."""
    assert [done.found[0][:2] for done in start(trained, folder, both(), False, 5)] == [[5, "paused after step 5"]] * 2
    assert trained(folder, both(), True, 8)[1][:2] == [8, "paused after step 8"]
    assert_near(figures(folder, "fsdp"), figures(folder, "ddp"))


@pytest.mark.parametrize(
    ("shard", "plans"),
    [
        (False, both() + both(optimizer={"name": "muon"})[:1]),
        (True, both(optimizer={"name": "muon"})[1:]),
    ],
    ids=["loss", "shard"],
)
def test_an_overflow_on_one_rank_skips_the_step_on_all(shard, plans, folder):
    """The scale is halved and grows back, and weights stay equal. A shard's overflow is seen by its owner alone."""
    plans = [{**plan, "name": str(number)} for number, plan in enumerate(plans)]
    first, second = start(overflowed, folder, plans, shard)
    assert first.found == second.found
    for rows in first.found:
        skipped, scales, states = zip(*rows)
        assert skipped == (0,) * SHAKEN + (1, 0, 0)
        before = scales[SHAKEN - 1]
        assert scales[SHAKEN:] == (before / 2, before / 2, before)
        assert states[SHAKEN] == states[SHAKEN - 1]
        assert len({state["model output.weight"] for state in states}) == len(states) - 1


def test_weights_stay_equal_on_all_ranks(folder):
    """To the bit, with dropout that is another one on each, through 10 steps."""
    first, second = start(saved, folder, both(model={"dropout": 0.2}), 10)
    assert first.found == second.found
    assert first.found[0] != first.found[1]


def test_muon_shares_its_matrices():
    """Each rank orthogonalizes its part of a stack: of five and of one here. The weights are the same on all."""
    (alone,) = start(shared_muon, ranks=1)
    assert alone.found[1] == [5, 1] * 3
    for count, parts in ((2, [[3, 1], [2]]), (3, [[2, 1], [2], [1]])):
        done = start(shared_muon, ranks=count)
        assert [one.found[1] for one in done] == [part * 3 for part in parts]
        assert all(one.found[0] == done[0].found[0] for one in done)
        for ours, theirs in zip(done[0].found[0], alone.found[0]):
            torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=0, atol=2e-3)


@pytest.mark.parametrize("how", PARALLEL)
def test_accumulation_averages_gradients_once(how, folder):
    """Not in each of its parts; weights that are spread are put together in each."""
    plans = [{"name": str(parts), "parallel": how, "accumulate": parts, "batch": 8} for parts in (1, 4)]
    for done in start(counted, folder, plans):
        once, parts = done.found
        gather = once.pop("_allgather_base_", 0), parts.pop("_allgather_base_", 0)
        assert once == parts
        assert (sum(once.values()) > 1, gather[1]) == (True, 4 * gather[0])


def test_only_the_first_rank_writes_and_prints(folder):
    """Of the others there are their parts of checkpoints, and nothing else."""
    first, second = start(watched, folder, both(steps=4, save_every=2, log_every=2))
    for how in PARALLEL:
        assert [row["step"] for row in read_metrics(folder / how / "run")] == [2, 4]
        assert f"{how}/run/metrics.jsonl" in first.found
    assert [line.split("  ")[0] for line in first.err.splitlines()] == ["step 2/4", "step 4/4"] * 2
    assert (first.out, second.out, second.err) == ("", "", "")
    assert second.found == [
        f"{how}/run/checkpoints/step-{step}/state/part-2.safetensors" for how in PARALLEL for step in (2, 4)
    ]


@pytest.mark.parametrize("how", PARALLEL)
def test_a_signal_to_one_rank_ends_all(how, folder):
    """After the same step, which is saved."""
    first, second = start(interrupted, folder, [{"parallel": how}])
    assert first.found == second.found
    assert first.found[0][:2] == [SHAKEN + 1, "interrupted"]
    assert (folder / f"run/run/checkpoints/step-{SHAKEN + 1}/manifest.json").exists()
    assert start(trained, folder, [{"parallel": how}], True)[0].found[0][:2] == [20, "all steps are done"]


def test_torchrun_starts_anew_after_a_process_is_lost(folder):
    """And the run goes on by itself, to the same bits."""
    lost = folder / "lost"
    shutil.copytree(folder / "data", lost / "data")
    torchrun("tests.training.worker", str(lost))
    start(trained, folder, [SHORT])
    for path in ("model.safetensors", "checkpoints/step-8/model.safetensors"):
        assert same(load_file(folder / "run/run" / path), load_file(lost / "run/run" / path))
    assert figures(lost, "run") == figures(folder, "run")


@pytest.mark.slow
def test_torchrun_starts_a_command_of_one_process_anew(folder):
    """Which goes on with the run, and with the accumulation that it planned."""
    words = (
        f"train text-small --data {folder}/data --out {folder}/run --gpu-memory 1060MB --batch 8 --steps 5 --save-every 2 "
        "--model.layers 2 --model.context 2048 --model.width 32 --model.heads 2 --device cpu"
    ).split()
    torchrun("tests.training.worker", "", *words, ranks=1)
    assert json.loads((folder / "run/config.json").read_text())["accumulate"] > 1
    assert (folder / "run/checkpoints/step-5/manifest.json").exists()
