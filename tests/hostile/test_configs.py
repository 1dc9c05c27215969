"""Configs, patterns and settings by somebody who means harm: a valid config or one line that says what is wrong, at once.

Each case has a second of CPU time and some hundred megabytes: what hangs, or takes the machine's memory, fails here.
"""

import json
import random
import resource
import runpy
import signal
from contextlib import contextmanager
from dataclasses import fields
from math import inf, nan

import pytest
import torch

from longstride.commands.doctor import show_sampling
from longstride.commands.exits import exit_with_message
from longstride.commands.main import main
from longstride.common import limits
from longstride.common.checks import short_repr
from longstride.common.limits import Limits, read_limits
from longstride.model import ModelConfig, SparseTransformer, cost, pretrained
from longstride.model.config import RULES as MODEL_RULES
from longstride.patterns import Block, Column, Dense, Local, Summary, connects, grid, notation, union
from longstride.training import OptimizerConfig, TrainConfig, train
from longstride.training.config import OPTIMIZER_RULES
from longstride.training.config import RULES as TRAIN_RULES
from tests.model.small import config, model
from tests.training.small import MODEL

SECONDS, MEMORY = 1, 2**29
"""What reading a config may take."""
assert train  # Imported here: the first use of the name would count as time that a config takes.


def _too_slow(*_):
    raise AssertionError("it takes too long")


@contextmanager
def bounded(seconds=SECONDS):
    """Some CPU time, and some memory beyond what there is now."""
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    before, most = signal.signal(signal.SIGPROF, _too_slow), resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY, most[1]))
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, most)
        signal.signal(signal.SIGPROF, before)


def refusal(make, seconds=SECONDS):
    """The one line that says no, or none."""
    with bounded(seconds):
        try:
            make()
            return None
        except ValueError as error:
            line = str(error)
    assert len(line.splitlines()) == 1
    assert len(line) < 1200
    return line


PRIMES = [one for one in range(3, 2000) if all(one % other for other in range(2, int(one**0.5) + 1))]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"layers": 10**6}, "config: layers must be at most 4,096, got 1,000,000; LONGSTRIDE_LIMITS=layers=N sets another"),
        ({"width": 10**12, "heads": 7}, "width must be at most 1,048,576, got 1,000,000,000,000"),
        ({"width": 10**8}, "width must be at most 1,048,576, got 100,000,000"),
        ({"heads": 10**9}, "heads must be at most 4,096, got 1,000,000,000"),
        ({"context": 2**60}, "context must be at most 1,099,511,627,776"),
        ({"width": 720720, "heads": 17}, "heads = 17 does not divide width = 720720; these do: 11, 12, 13"),
        (
            {"width": 2**20, "layers": 4096},
            "the weights of layers = 4,096, width = 1,048,576 .* must be at most 1,000,000,000,000",
        ),
        ({"context": 2**40, "embedding": "matrix(1)"}, "the weights of .*embedding = 'matrix.1.'.* must be at most"),
        ({"ff_ratio": inf}, "ff_ratio must be at least 0 and at most 1,024, got inf"),
        ({"ff_ratio": nan}, "ff_ratio must be at least 0 and at most 1,024, got nan"),
        ({"ff_ratio": 1e300}, "ff_ratio must be at least 0 and at most 1,024"),
        ({"qk_ratio": 10**400}, "qk_ratio must be at least 0 and at most 1,024, got 1000.* characters"),
        ({"layers": 10**5000}, "layers must be at most 4,096, got far more"),
        ({"layers": -(10**5000)}, "layers must be at least 1, got a very long int"),
        ({"embedding": "matrix({[]})"}, "embedding 'matrix.{..}.' does not read as one"),
        ({"embedding": "matrix(" + "9" * 5000 + ")"}, "does not read as one"),
        ({"embedding": "matrix(" + "[" * 190 + "]" * 190 + ")"}, "the width must be a whole number"),
        ({"pattern": "local({[]})"}, "'{.*}' must be a whole number"),
        ({"pattern": "grid(1, 1000000000)"}, "grid: p must be at most 16, got 1,000,000,000"),
        ({"pattern": "column(4611686018427387904)"}, "Column: l must be at most 1,099,511,627,776, got 4,611"),
        ({"pattern": "|".join(f"local({i})" for i in range(700))}, "the number of leaves must be at most 256, got 700"),
        ({"pattern": "|".join(["local(1)"] * 900)}, None),
        ({"pattern": "|".join(f"local({i})" for i in range(900))}, "the length of pattern must be at most 8,192"),
        (
            {"pattern": "+".join(["local(1)"] * 900), "heads": 4096, "width": 4096},
            "blocks times heads must be at most 32,768",
        ),
        ({"pattern": "merged(" * 150 + "local(1)" + ")" * 150}, None),
        ({"pattern": "(" * 1000 + "local(1)" + ")" * 1000}, "does not read as one"),
        ({"pattern": "a" + ".b" * 600}, "cannot read|does not read"),
        ({"pattern": "not " * 2000 + "a"}, "cannot read|does not read"),
        ({"pattern": "-" * 8000 + "1"}, "cannot read|does not read"),
        ({"pattern": '"\\d"'}, "does not read as one"),
        ({"pattern": "\0"}, "does not read as one"),
        ({"pattern": "\ud800"}, "does not read as one"),
    ],
    ids=lambda value: short_repr(value)[:60],
)
def test_what_took_minutes_or_ended_in_a_traceback(changes, says):
    found = refusal(lambda: config(**changes))
    if says is None:
        assert found is None
    else:
        with pytest.raises(ValueError, match=says):
            raise ValueError(found)


MOST = Limits()
LONG = "|".join(f"block({one})" for one in PRIMES[:256])


@pytest.mark.parametrize(
    "changes",
    [
        {
            "layers": MOST.layers,
            "width": 4096,
            "heads": MOST.heads,
            "context": MOST.positions,
            "embedding": "matrix(1048576)",
        },
        {"layers": 8, "width": 4096, "heads": 4096, "pattern": "distinct(merged(fixed(65536, 1)) + 7*summary(65536, 1))"},
        {"layers": MOST.layers, "heads": 8, "pattern": "4096*local(3)"},
        {"context": 2**20, "embedding": "matrix(1024)", "pattern": LONG},
        {"context": 2**40, "embedding": "matrix(1048576)", "pattern": LONG},
        {"context": 2**40, "embedding": "matrix(1048576)", "pattern": LONG.replace("block", "column")},
        {"pattern": "merged(" + ", ".join(f"grid({n}, 16)" for n in range(1, 500)) + ")"},
    ],
    ids=lambda changes: short_repr(changes)[:60],
)
def test_at_the_limits_nothing_hangs(changes):
    """Neither to read a config, nor to say what it costs, as `doctor` does of a folder from somebody else."""
    assert refusal(lambda: config(**changes)) is None
    refusal(lambda: cost.cost(config(**changes)), seconds=10)
    refusal(lambda: show_sampling("it", config(**changes)), seconds=10)


ODD = [
    None, True, False, 0, 1, -1, 2, 3, 0.0, -0.0, 0.5, 1.0, 1.5, -1e-9, 1e-320, 1e30, 1e300, -1e300, inf, -inf, nan, 2**31,
    2**40, 2**62, 2**63, 2**64, -(2**63), 10**30, 10**400, 10**4000, "", " ", "1", "inf", "off", "x" * 10_000, "\0",
    "\ud800", "a\nb", [], [[]], [1, 2], {}, {"a": 1}, {"layers": [3]}, "local(", "matrix()", "dense", "cuda:99", "é",
]  # fmt: skip
DEEP = "[" * 500 + "]" * 500
"""As text, since `json.dumps` gives up on it."""


def texts(whole, place):
    """A config's JSON with odd values in each field of one of its objects, and without that field."""
    for name in place(whole):
        for value in ODD:
            changed = json.loads(json.dumps(whole))
            place(changed)[name] = value
            yield json.dumps(changed)
        changed = json.loads(json.dumps(whole))
        place(changed)[name] = "DEEP"
        for raw in (DEEP, "1e400", "-1e400", "9" * 5000, "1E-5000"):
            yield json.dumps(changed).replace('"DEEP"', raw)
        del place(changed)[name]
        yield json.dumps(changed)


TRAIN = json.loads(TrainConfig(MODEL, "data", "run").to_json())


@pytest.mark.parametrize(
    ("read", "whole", "place"),
    [
        (ModelConfig.from_json, json.loads(MODEL.to_json()), lambda whole: whole),
        (TrainConfig.from_json, TRAIN, lambda whole: whole),
        (TrainConfig.from_json, TRAIN, lambda whole: whole["model"]),
        (TrainConfig.from_json, TRAIN, lambda whole: whole["optimizer"]),
    ],
    ids=["model", "train", "train's model", "train's optimizer"],
)
def test_odd_values_in_every_field(read, whole, place):
    for text in texts(whole, place):

        def read_back(text=text):
            made = read(text, "it/config.json")
            assert read(made.to_json()) == made

        found = refusal(read_back)
        assert found is None or found.startswith("it/config.json")


@pytest.mark.parametrize("seed", range(3))
def test_odd_values_in_several_fields(seed):
    chosen = random.Random(seed)
    for _ in range(200):
        whole = json.loads(json.dumps(TRAIN))
        for _ in range(chosen.randint(1, 4)):
            place = chosen.choice([whole, whole.get("model"), whole.get("optimizer")])
            if isinstance(place, dict) and place:
                place[chosen.choice(list(place))] = chosen.choice(ODD)
        text = json.dumps(whole)
        refusal(lambda text=text: TrainConfig.from_json(text))
        at = chosen.randrange(len(text))
        cut = text[:at] + chosen.choice(["", "[", '"', "\\", "1e9", "Infinity", "\0"]) + text[at + chosen.randint(0, 9) :]
        refusal(lambda cut=cut: TrainConfig.from_json(cut))


@pytest.mark.parametrize(
    ("kind", "rules"),
    [(ModelConfig, MODEL_RULES), (TrainConfig, TRAIN_RULES), (OptimizerConfig, OPTIMIZER_RULES)],
    ids=["model", "train", "optimizer"],
)
def test_every_field_has_a_rule(kind, rules):
    assert [field.name for field in fields(kind)] == list(rules)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Column(2**62), "Column: l must be at most"),
        (lambda: grid(1, 10**9), "grid: p must be at most 16"),
        (lambda: Dense().mask(10**6), "mask: n must be at most 65,536, got 1,000,000"),
        (lambda: connects([Dense()], 10**6), "connects: n must be at most 65,536"),
        (lambda: Dense().pairs(2**50), "pairs: n must be at most"),
        (lambda: union(*(Column(one) for one in range(1000, 2000))), "union: the number of leaves must be at most 256, got"),
        (
            lambda: union(*map(Block, PRIMES[:20])).pairs(2**40),
            "pairs: the steps that count a union of 20 leaves at n = 1,09",
        ),
        (lambda: notation.parse("grid(1, 16), " * 3000), "parse: the number of patterns must be at most 32,768"),
        (lambda: notation.parse("matrix({[]})"), "there is no pattern 'matrix'"),
        (lambda: notation.parse(3), "pattern 3 must be text"),
        (lambda: TrainConfig(MODEL, data=3), "train: data must be a path, got 3"),
        (lambda: TrainConfig(3), "train: model must be a ModelConfig, got 3"),
        (lambda: OptimizerConfig(learning_rate=1e300), "learning_rate must be at least 0 and at most 1,000, got 1e.300"),
        (lambda: ModelConfig.from_json("[" * 2**20), "config is not JSON: it has more than 100,000 lists"),
        (lambda: ModelConfig.from_json(" " * (2**24 + 1)), "config is not JSON: it has 16,777,217 characters; at most"),
    ],
)
def test_python_calls_are_refused_at_once(make, says):
    with pytest.raises(ValueError, match=says):
        raise ValueError(refusal(make))


def test_many_leaves_at_a_million_positions():
    """As inclusion and exclusion over all subsets has it, which took nine seconds."""
    with bounded():
        assert union(*(Column(one) for one in range(20, 40))).pairs(10**6) == 213569702510


@pytest.mark.parametrize("n", [10, 70])
@pytest.mark.parametrize("make", [Column, Local, Block, lambda l: Summary(l, 1), lambda l: Summary(l, l)])
def test_numbers_at_the_limit_of_positions_compute(make, n):
    """The largest number of a pattern overflows nothing in the mask or in plain attention."""
    from longstride import attend

    q, k, v = (torch.randn(1, 1, n, 8, requires_grad=True) for _ in range(3))
    pattern = make(MOST.positions)
    output = attend(q, k, v, pattern)
    assert torch.allclose(output, attend(q, k, v, pattern, impl="reference"), atol=1e-5)
    output.sum().backward()
    assert pattern.pairs(n) == int(pattern.mask(n).sum())


def folder_of(tmp_path, **changes):
    """A saved model, and another config beside its weights."""
    model().save_pretrained(tmp_path / "saved")
    (tmp_path / "saved/config.json").write_text(config(**changes).to_json())
    return tmp_path / "saved"


def test_a_config_that_asks_for_more_weights_than_there_are(tmp_path, monkeypatch):
    """Nothing is built, and nothing is loaded, before the sizes agree."""
    folder = folder_of(tmp_path, layers=4096)
    monkeypatch.setattr(pretrained, "load_file", pytest.fail)
    found = refusal(lambda: SparseTransformer.from_pretrained(folder))
    size = (folder / "model.safetensors").stat().st_size
    count = config(layers=4096).parameters
    assert f"it has {size:,} bytes" in found
    assert f"asks for {count:,} weights, which have {2 * count:,}" in found


@pytest.mark.parametrize("verb", ["sample", "eval", "doctor", "plot attention"])
@pytest.mark.parametrize("text", ['{"layers": 1000000000}', "[" * 5000, "Infinity", json.dumps({"model": {}}), " " * 2**21])
def test_verbs_refuse_such_a_folder(verb, text, tmp_path, capsys):
    model().save_pretrained(tmp_path)
    if text.startswith('{"layers'):
        text = json.dumps({**json.loads(config().to_json()), "layers": 10**9})
    (tmp_path / "config.json").write_text(text)
    assert ends([*verb.split(), str(tmp_path)], capsys).startswith("longstride: ")


def ends(words, capsys):
    """The one line that a command ends with, and exit code 2."""
    with bounded(), pytest.raises(SystemExit) as caught:
        main(words)
    captured = capsys.readouterr()
    assert caught.value.code == 2
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    return line


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("--model.ff-ratio", "inf", "ff_ratio must be at least 0 and at most 1,024, got inf"),
        ("--model.width", "100000000", "width must be at most 1,048,576, got 100,000,000"),
        ("--model.width", "1048576", "the weights of layers = 2, width = 1,048,576"),
        ("--model.context", str(2**60), "context must be at most"),
        ("--model.embedding", "matrix({[]})", "does not read as one"),
        ("--model.pattern", "|".join(f"local({i})" for i in range(700)), "the number of leaves must be at most 256"),
        ("--model.pattern", "column(4611686018427387904)", "Column: l must be at most"),
        ("--optimizer.learning-rate", "1e300", "learning_rate must be at least 0 and at most 1,000"),
        ("--optimizer.decay", "nan", "decay must be at least 0"),
        ("--batch", "1000000000000", "batch must be at most 1,048,576"),
    ],
    ids=lambda value: value[:30],
)
def test_the_command_line_says_it_in_one_line(option, value, says, tmp_path, capsys):
    words = ["train", "text-small", "--data", str(tmp_path / "data"), "--out", str(tmp_path / "run"), option, value]
    assert says in ends(words, capsys)
    assert not (tmp_path / "run").exists()


def test_weights_larger_than_the_memory_are_refused_before_any_is_allocated(tmp_path, monkeypatch, capsys):
    """Also where the network is moved to a GPU afterwards."""
    monkeypatch.setattr(cost, "memory_bytes", lambda device: 10_000)
    monkeypatch.setattr(torch.nn.Embedding, "__init__", pytest.fail)
    found = refusal(lambda: SparseTransformer(config()))
    assert "layers = 3, width = 16, context = 24 and embedding = 'matrix(4)' make" in found
    assert "and cpu has 0.0 GiB" in found
    assert "make the network smaller" in refusal(lambda: cost.check_memory(config(), torch.device("cuda")))
    assert refusal(lambda: cost.check_memory(config(), torch.device("cuda"), shares=10)) is None
    (tmp_path / "data.txt").write_text("text " * 1000)
    words = ["train", "text-small", "--data", str(tmp_path / "data.txt"), "--out", str(tmp_path / "run"), "--device", "cpu"]
    assert "make the network smaller" in ends(words, capsys)


def test_on_the_meta_device_any_size_is_built(monkeypatch):
    monkeypatch.setattr(cost, "memory_bytes", lambda device: 10_000)
    with torch.device("meta"):
        assert SparseTransformer(config()).parameter_count() == config().parameters


def _raise(error):
    raise error


@pytest.mark.parametrize(
    ("work", "says"),
    [
        (lambda: torch.empty(2**55), "longstride: .*can't allocate memory"),
        (lambda: torch.empty(2**60, 2**60), "longstride: .*overflow"),
        (lambda: bytearray(2**60), "longstride: The machine has too little memory. Try"),
        (lambda: _raise(torch.OutOfMemoryError("no more\nthan that")), "longstride: no more Try"),
        (lambda: _raise(ValueError("in\ntwo lines")), "longstride: in two lines"),
    ],
)
def test_too_little_memory_is_one_line(work, says, capsys):
    with pytest.raises(SystemExit) as caught, exit_with_message("train"):
        work()
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    with pytest.raises(ValueError, match=says):
        raise ValueError(line)


def test_other_errors_of_ours_are_not_hidden():
    with pytest.raises(RuntimeError, match="a mistake"), exit_with_message("train"):
        raise RuntimeError("a mistake")


def test_limits_are_set_by_the_environment(monkeypatch):
    monkeypatch.setenv(limits.VARIABLE, "layers=10000, width=4194304")
    read = runpy.run_path(limits.__file__)
    assert (read["LIMITS"].layers, read["LIMITS"].width, read["PROBLEM"]) == (10_000, 4_194_304, "")
    monkeypatch.setenv(limits.VARIABLE, "layer=10000")
    assert "cannot read 'layer=10000'; write it like layers=10000" in runpy.run_path(limits.__file__)["PROBLEM"]
    monkeypatch.setattr(limits, "LIMITS", read_limits("layers=10000"))
    assert config(layers=5000).layers == 5000
    monkeypatch.setattr(limits, "PROBLEM", "wrong")
    with pytest.raises(ValueError, match="wrong"):
        config()


@pytest.mark.parametrize("text", ["layers", "layers=", "layers=-1", "layers=1.5", "layers=" + "9" * 5000, "=", "layers=x"])
def test_wrong_limits_are_refused(text):
    with pytest.raises(ValueError, match="LONGSTRIDE_LIMITS: cannot read"):
        read_limits(text)
