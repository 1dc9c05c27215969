import pytest

from longstride.commands.bench.settings import StepBenchmark
from longstride.commands.bench.step_cases import PAPER, SMALL, check_step, read_case


def read(text, **settings):
    return read_case(text, StepBenchmark(**settings), compiled=True)


def test_a_case_is_a_preset_with_changes():
    case = read("enwik8 optimizer=muon dropout=0.4 layers=12 batch=3 recompute=2*off+10*on qk_norm=true accumulate=3")
    config, model = case.config, case.config.model
    assert (config.optimizer.name, config.batch, config.accumulate, config.compile) == ("muon", 3, 3, True)
    assert (model.dropout, model.layers, model.recompute, model.qk_norm) == (0.4, 12, "2*off+10*on", True)


def test_what_a_case_does_not_name():
    config = read("enwik8").config
    assert (config.batch, config.optimizer.name, config.model.dropout, config.model.recompute) == (8, "adamw", 0.0, "off")
    given = {"batch": 5, "optimizer": "muon", "dropout": 0.1, "recompute": "on"}
    config = read("imagenet64 dropout=0.2", **given).config
    assert (config.batch, config.accumulate, config.optimizer.name) == (5, 1, "muon")
    assert (config.model.dropout, config.model.recompute) == (0.2, "on")


def test_patterns_of_one_network_are_compared():
    texts = ("enwik8 batch=4", "enwik8-dense batch=4", "enwik8 batch=4 pattern=interleave(strided(128))", "enwik8")
    networks = [read(text).network for text in texts]
    assert networks == ["enwik8 batch=4"] * 3 + ["enwik8"]
    assert read(texts[1]).config.model.pattern == "dense()"


@pytest.mark.parametrize(("on_gpu", "texts"), [(True, PAPER), (False, SMALL)])
def test_the_cases_of_a_machine(on_gpu, texts):
    cases = check_step(StepBenchmark(), on_gpu)
    assert tuple(case.text for case in cases) == texts
    assert {case.config.compile for case in cases} == {on_gpu}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("enwik9", "there is no preset 'enwik9'; did you mean 'enwik8'?"),
        ("", "there is no preset ''"),
        ("enwik8 muon", "'muon' is not of the form field=value"),
        ("enwik8 layers=", "'layers=' is not of the form field=value"),
        ("enwik8 layer=3", "there is no field 'layer'; did you mean 'layers'?"),
        ("enwik8 batch=many", "batch must be a number, got 'many'"),
        ("enwik8 batch=0", "batch must be at least 1"),
        ("enwik8 dropout=x", "dropout must be a number, got 'x'"),
        ("enwik8 qk_norm=banana", "qk_norm must be true or false, got 'banana'"),
        ("enwik8 optimizer=sgd", "name must be one of adamw, muon, adafactor"),
        ("enwik8 recompute=never", "recompute must be one of off"),
    ],
)
def test_bad_cases(text, says):
    with pytest.raises(ValueError, match=r"^bench step: cases has ") as error:
        check_step(StepBenchmark(cases=(text,)))
    assert says in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("settings", "says"),
    [({"steps": 0}, "steps must be"), ({"rounds": 0}, "rounds must be"), ({"cases": ("enwik8", "enwik8")}, "different")],
)
def test_bad_settings(settings, says):
    with pytest.raises(ValueError, match=says):
        check_step(StepBenchmark(**settings))
