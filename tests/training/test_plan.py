from dataclasses import replace

import pytest

from longstride.model.memory import WORKSPACE, forward_bytes
from longstride.training import train_preset
from longstride.training.muon import LARGEST_STACK
from longstride.training.plan import (
    CONTEXT_BYTES,
    MARGIN,
    MUON_BYTES,
    WORTHWHILE,
    fits,
    largest_batch,
    make_plan,
    nearest_plan,
    predict,
    recomputation_plan,
    usable,
    validation_rows,
)

GB, HOST = 10**9, 64 * 2**30
QUARTER = {"pattern": "interleave(strided(512))", "embedding": "matrix(512)", "context": 262_144}
LONG = {"context": 1_048_576, "pattern": "interleave(strided(1024))", "embedding": "matrix(1024)"}


def planned(name, gb, host=HOST, processes=1, **changes):
    model = {"recompute": "auto", **changes.pop("model", {})}
    return make_plan(train_preset(name, model=model, **changes), int(gb * GB), host, processes)


@pytest.mark.parametrize("gb", [6, 10, 16, 24, 40, 80, 141])
@pytest.mark.parametrize("name", ["enwik8", "cifar10", "music-65536"])
def test_a_plan_fits_and_is_no_slower_with_more_memory(name, gb):
    plan, more = planned(name, gb), planned(name, 1.3 * gb)
    assert plan.memory.peak <= usable(gb * GB) < gb * GB - CONTEXT_BYTES
    assert plan.memory == predict(plan.config)
    assert WORTHWHILE * more.seconds <= plan.seconds


def test_a_step_in_parts_may_be_the_fastest():
    """Fewer sequences at a time leave memory for what would be recomputed. FSDP gathers the weights for each part."""
    for gb, batch in ((6.44, 8), (10, 8), (30, 16)):
        config = train_preset("enwik8", batch=batch, model={"recompute": "auto"})
        plan, whole = make_plan(config, int(gb * GB), HOST), recomputation_plan(config, int(gb * GB), HOST)
        assert plan.config.accumulate > whole.config.accumulate == 1
        assert plan.seconds < WORTHWHILE * whole.seconds
    assert planned("enwik8", 30, batch=16, processes=2, parallel="fsdp").config.accumulate == 1


def test_with_enough_memory_nothing_is_recomputed():
    assert planned("enwik8", 80).config.model.recompute == "off"


def test_one_more_block_would_not_fit():
    """Blocks that keep the most are last in the network."""
    plan = planned("enwik8", 24)
    choices = plan.config.model.recomputed
    assert set(choices) == {"selective", "off"}
    first = choices.index("off")
    assert choices == ("selective",) * first + ("off",) * (len(choices) - first)
    more = replace(plan.config.model, recompute=f"{first - 1}*selective + {len(choices) - first + 1}*off")
    assert not fits(predict(replace(plan.config, model=more)), 24 * GB, HOST)


def test_inputs_go_to_host_memory_where_nothing_else_fits():
    plan = planned("music-65536", 16, model=LONG)
    assert plan.memory.peak < 16 * GB - CONTEXT_BYTES
    assert plan.config.model.recomputed[0] == "host"
    assert 0 < plan.memory.host <= HOST
    assert planned("music-65536", 16, host=4 * 2**30, model=LONG) is None


def test_segments_keep_fewer_inputs_where_the_host_has_little_memory():
    plan = planned("music-65536", 16, host=24 * 2**30, model=LONG)
    assert plan.config.model.recompute == "16*(host + 2*again)"
    assert plan.memory.host == 16 * 2**30
    assert plan.seconds > planned("music-65536", 16, model=LONG).seconds


def test_a_batch_that_does_not_fit_is_accumulated():
    plan = planned("enwik8", 3.5)
    assert plan.config.accumulate > 1
    assert plan.config.batch == train_preset("enwik8").batch
    assert planned("enwik8", 3.5, processes=2).config.accumulate < plan.config.accumulate


def test_recomputation_that_is_given_stays():
    assert planned("enwik8", 80, model={"recompute": "on"}).config.model.recompute == "on"
    assert planned("enwik8", 16, model={"recompute": "off"}).config.accumulate > 1


def test_shards_have_no_blocks_in_parts():
    assert "parts" not in planned("enwik8", 6, processes=2, parallel="fsdp").config.model.recompute
    assert planned("music-65536", 16, processes=2, batch=2, parallel="fsdp", model=LONG) is None


def test_the_nearest_plan_has_a_shorter_context():
    config = train_preset("music-65536", model={**LONG, "recompute": "auto"})
    plan = nearest_plan(config, 16 * GB, 4 * 2**30)
    assert plan.config.model.context == 524_288
    assert nearest_plan(config, 2**20, 0) is None
    assert nearest_plan(train_preset("cifar10", model={"recompute": "auto"}), 2**30, 0) is None


def test_the_nearest_plan_keeps_the_batch_in_parts_if_they_fit():
    config = train_preset("enwik8", batch=6, model={"recompute": "auto"})
    assert make_plan(config, int(2.9 * GB), 0) is None
    plan = nearest_plan(config, int(2.9 * GB), 0)
    assert (plan.config.model.context, plan.config.batch, plan.config.accumulate) == (6144, 6, 6)
    # One sequence alone needs no sum of gradients: a longer context rather than the batch.
    config = train_preset("music-65536", batch=2, model={"recompute": "auto"})
    plan = nearest_plan(config, int(3.85 * GB), 4 * 2**30)
    assert (plan.config.model.context, plan.config.batch, plan.config.accumulate) == (8192, 1, 1)
    shorter = replace(config, model=replace(config.model, context=8192))
    assert make_plan(shorter, int(3.85 * GB), 4 * 2**30) is None


def test_the_largest_batch():
    config = train_preset("enwik8", model={"recompute": "auto"})
    plan = largest_batch(config, 16 * GB, 0)
    assert plan.config.batch > 8
    more = make_plan(replace(config, batch=plan.config.batch + 1), 16 * GB, 0)
    assert more is None or more.config.accumulate > 1
    assert largest_batch(config, 2**30, 0) is None


def test_the_optimizer_counts():
    peaks = {
        name: predict(train_preset("music-65536", batch=1, optimizer={"name": name}, **more)).peak
        for name, more in [("adamw", {}), ("muon", {}), ("adafactor", {})]
    }
    averaged = predict(train_preset("music-65536", batch=1, ema=0.9)).peak
    assert peaks["adafactor"] < peaks["muon"] < peaks["adamw"] < averaged
    weights = train_preset("music-65536").model.parameters
    assert averaged - peaks["adamw"] == 4 * weights


def test_temporary_tensors_of_muon_count():
    config = train_preset("enwik8", batch=1, optimizer={"name": "muon"}, model={"context": 128, "recompute": "on"})
    model, memory = config.model, predict(config)
    assert memory.phase == "the optimizer"
    stack = min(LARGEST_STACK, model.layers * model.width * model.ff_width)
    assert memory.working == MUON_BYTES * stack + WORKSPACE


def test_gradients_that_exist_before_a_step_count():
    """Those of earlier parts, and the buckets of DDP."""
    once = predict(train_preset("enwik8", batch=2, model={"recompute": "off"}))
    for config, processes in ((train_preset("enwik8", batch=4, accumulate=2, model={"recompute": "off"}), 1),
                              (train_preset("enwik8", batch=4, model={"recompute": "off"}), 2)):  # fmt: skip
        more = predict(config, processes)
        assert more.gradients == more.weights > once.gradients


def test_a_validation_fits_beside_the_graph_of_a_step():
    for name, gb, model in (("enwik8", 6.44, {}), ("music-65536", 16, QUARTER), ("music-65536", 16, LONG)):
        plan = planned(name, gb, 100 * 2**30, model=model)
        assert 0 < plan.memory.validation < gb * GB - CONTEXT_BYTES
    captured = train_preset("enwik8", model={"recompute": "on"})
    one = forward_bytes(captured.model, 1)
    assert predict(captured).validation == predict(captured).peak + one
    weights = 4 * captured.model.parameters
    for plain in ({"capture": "off"}, {"optimizer": {"name": "adamw"}, "model": {"recompute": "host"}}):
        assert predict(train_preset("enwik8", **plain)).validation == 3 * weights + one
    long = replace(captured, batch=1, model=replace(captured.model, context=2**20, chunk=2**10))
    memory = predict(long)
    between = int(memory.peak / (1 - MARGIN) + CONTEXT_BYTES)
    assert memory.peak <= usable(between + 2)
    assert not fits(memory, between + 2, HOST)


def test_fewer_sequences_are_validated_where_memory_is_short():
    config = planned("enwik8", 6.44).config
    assert config.batch // config.accumulate == 4
    rows = [validation_rows(config, int(gb * GB)) for gb in (1, 6.44, 6.6, 80)]
    assert rows == sorted(rows)
    assert (rows[0], rows[1], rows[-1]) == (1, 1, 4)
    assert 1 < rows[2] < 4
    assert validation_rows(config, 80 * GB, 2) == 2


ENWIK8 = ("enwik8", {"batch": 8, "compile": True})
OFF = {"dropout": 0.0, "recompute": "off"}


@pytest.mark.parametrize(
    ("name", "changes", "model", "seconds"),
    [
        (*ENWIK8, OFF, 0.218),
        (*ENWIK8, {**OFF, "pattern": "interleave(strided(128))"}, 0.134),
        (*ENWIK8, {**OFF, "pattern": "dense()"}, 0.460),
        (*ENWIK8, {"recompute": "off"}, 0.222),
        (*ENWIK8, {"recompute": "on"}, 0.325),
        ("cifar10", {"batch": 16, "compile": True}, OFF, 0.083),
        ("cifar10", {"batch": 16}, OFF, 0.097),
        ("imagenet64", {"batch": 4, "accumulate": 1, "compile": True}, OFF, 0.112),
        ("music-65536", {}, {"recompute": "44*selective + 4*off"}, 0.19),
        ("music-65536", {}, {**QUARTER, "recompute": "19*host + 28*on + selective"}, 0.98),
        ("music-65536", {}, {**LONG, "recompute": "42*host + 6*parts"}, 6.27),
    ],
)
def test_estimated_times_of_steps_that_were_measured(name, changes, model, seconds):
    """On an H200, captured but for the last."""
    from longstride.training.step_time import step_seconds

    assert step_seconds(train_preset(name, model=model, **changes)) == pytest.approx(seconds, rel=0.15)
