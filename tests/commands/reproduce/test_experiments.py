import shlex

import pytest

from longstride.commands.reproduce.experiments import (
    CONTEST,
    EXPERIMENTS,
    TABLE_2,
    TABLE_3,
    config_of,
    min_contexts,
    train_command,
)
from longstride.commands.verbs import train

ROWS = [(one, row) for one in EXPERIMENTS.values() for row in one.rows]
IDS = [f"{one.name}-{row.name}" for one, row in ROWS]


@pytest.mark.parametrize(("experiment", "row"), ROWS, ids=IDS)
def test_rows_are_networks(experiment, row):
    for scale in ("reduced", "full"):
        config = config_of(row, scale, on_gpu=True, seed=3)
        assert (config.compile, config.capture, config.model.recompute, config.seed) == (False, "auto", "auto", 3)
    tiny = config_of(row, "tiny", on_gpu=False)
    assert tiny.model.parameters < 100_000
    assert tiny.steps < 10
    assert min_contexts(experiment, row, config.model.context) == list(experiment.min_contexts)


def test_names_are_unique():
    for experiment in EXPERIMENTS.values():
        assert len({row.name for row in experiment.rows}) == len(experiment.rows)


@pytest.mark.parametrize("name", ["table2", "ablations"])
def test_rows_of_one_kind_see_the_same_bytes(name):
    for scale in ("reduced", "full", "tiny"):
        for data in ("text", "images"):
            configs = [config_of(row, scale, True) for row in EXPERIMENTS[name].rows if row.data == data]
            assert len({(one.steps, one.batch, one.model.context) for one in configs}) == 1


def test_table_2_changes_the_pattern_alone():
    for data, parameters in (("text", 94_949_888), ("images", 59_196_928)):
        configs = [config_of(row, "full", True) for row in TABLE_2.rows if row.data == data]
        assert [one.model.parameters for one in configs] == [parameters] * 3
        assert len({one.model.pattern for one in configs}) == 3
        assert len({one.optimizer for one in configs}) == 1
        short = [config_of(row, "reduced", True).model for row in TABLE_2.rows if row.data == data]
        assert {one.layers for one in short} == ({12} if data == "text" else {32})
        assert {one.dropout for one in short} == {0.0}


def test_the_papers_figures():
    assert [(row.paper_bits, row.paper_time) for row in TABLE_2.rows] == [
        (1.00, 1.31), (0.99, 0.55), (1.13, 0.35), (2.82, 0.54), (2.85, 0.47), (2.80, 0.38),
    ]  # fmt: skip
    assert TABLE_3.paper == {6144: 0.9952, 9216: 0.9936, 10752: 0.9932, 11904: 0.9930, 12096: 0.9922, 12160: 0.9908}


def test_the_contest_has_a_long_context_and_a_dense_one_beside_it():
    ours, narrow, dense = (config_of(row, "reduced", True) for row in CONTEST.rows)
    assert ours.model.context == narrow.model.context >= 8192
    assert (narrow.model.width, narrow.model.pattern, narrow.batch) == (512, ours.model.pattern, ours.batch)
    assert (dense.model.context, dense.model.pattern) == (1024, "dense()")
    assert ours.batch * ours.model.context == dense.batch * dense.model.context
    assert ours.model.parameters == dense.model.parameters
    assert (CONTEST.seconds, CONTEST.min_contexts[-1]) == (420, 512)


def test_the_network_of_table_3_is_one_of_table_2():
    (row,) = TABLE_3.rows
    (same,) = TABLE_2.select((row.name,))
    for scale in ("reduced", "full", "tiny"):
        assert config_of(row, scale, True) == config_of(same, scale, True)


def test_steps_divide_a_short_run():
    config = config_of(TABLE_2.rows[0], "reduced", True, steps=200)
    assert (config.steps, config.validate_every, config.save_every, config.log_every) == (200, 10, 40, 4)
    full = config_of(TABLE_2.rows[0], "full", True, steps=200)
    assert (full.steps, full.validate_every) == (200, 500)


def test_unknown_rows_are_named():
    with pytest.raises(ValueError, match=r"table2 has no row 'enwik8-fixd'; did you mean 'enwik8-fixed'.*cifar10-strided"):
        TABLE_2.select(("enwik8-fixd",))
    with pytest.raises(ValueError, match="has no row 'foo'; the names are enwik8-dense") as error:
        TABLE_2.select(("foo",))
    assert str(error.value).count("enwik8-dense") == 1


@pytest.mark.parametrize(("experiment", "row"), ROWS, ids=IDS)
def test_the_command_of_a_row_has_its_settings(experiment, row, monkeypatch, tmp_path):
    read = []
    monkeypatch.setattr(train, "_train", lambda preset, config, *_: read.append((preset, config)))
    config = config_of(row, "reduced", on_gpu=True, seed=2)
    words = shlex.split(train_command(row.preset, config))
    assert words[:2] == ["longstride", "train"]
    train.main(words[2:])
    assert read == [(row.preset, config)]
