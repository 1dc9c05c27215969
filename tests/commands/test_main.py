import errno
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("tyro")

import longstride
from longstride.commands import main as cli
from longstride.commands.exits import exit_with_message
from longstride.commands.verbs import find_verbs
from longstride.data.store import open_store
from longstride.patterns.notation import parse


def run(capsys, *words):
    """(exit code, standard output, standard error)"""
    code = 0
    try:
        cli.main(words)
    except SystemExit as end:
        code = int(end.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_doctor_says_what_runs_and_why(capsys):
    code, out, _ = run(capsys, "doctor")
    assert code == 0
    for expected in (
        "longstride",
        "torch",
        "triton",
        "device cpu",
        "auto on cpu",
        "blocked: ",
        "agrees with the oracle here",
    ):
        assert expected in out


def test_doctor_sees_a_wrong_result(capsys, monkeypatch):
    import longstride.attention.api as api

    monkeypatch.setitem(api.IMPLEMENTATIONS, "blocked", lambda q, k, v, *_: q + k + v)
    code, out, _ = run(capsys, "doctor")
    assert code == 1
    assert "DISAGREES with the oracle" in out


def test_doctor_says_which_settings_are_in_force(capsys, monkeypatch, tmp_path):
    from longstride.attention.kernels import saved

    path = tmp_path / "longstride" / "kernels.json"
    monkeypatch.delenv(saved.VARIABLE)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    row = '"dq summary d64 float16": {"rows": 64, "columns": 64, "warps": 4, "stages": 3, "per_processor": 0}'
    contents = {
        None: (0, f"shipped; longstride bench tune saves a GPU's own in {path}"),
        f'{{"NVIDIA H200": {{{row}}}}}': (0, f"{path}: 1 for NVIDIA H200"),
        "{": (1, f"FAILED here: settings: {path} is not JSON: Expecting property name"),
    }
    for content, (expected_code, expected) in contents.items():
        if content is not None:
            path.parent.mkdir(exist_ok=True)
            path.write_text(content)
        saved.in_force.cache_clear()
        code, out, _ = run(capsys, "doctor")
        assert code == expected_code
        assert f"settings        {expected}" in out
    saved.in_force.cache_clear()


def test_doctor_says_what_is_missing(capsys, monkeypatch):
    import longstride.commands.doctor

    monkeypatch.setattr(longstride.commands.doctor, "devices", lambda: [torch.device("cuda")])
    monkeypatch.setattr(longstride.commands.doctor, "_describe", lambda device: "a GPU")
    monkeypatch.setattr("longstride.attention.implementation._missing_for_triton", lambda on_gpu: "Triton")
    code, out, _ = run(capsys, "doctor")
    assert code == 1
    assert "FAILED here: attend: impl = 'auto' on cuda needs Triton" in out


def test_doctor_of_a_preset_adds_what_sampling_costs(capsys):
    code, out, _ = run(capsys, "doctor", "text-small")
    assert code == 0
    assert "agrees with the oracle here" in out
    assert "text-small: 1,081,544 parameters" in out
    assert "cache           0.28 MiB a stream" in out


def test_plot_patterns(capsys, tmp_path):
    path = tmp_path / "figure.svg"
    code, out, _ = run(capsys, "plot", "patterns", "--patterns", "strided(4)", "local(2) | column(4)", "--out", str(path))
    assert code == 0
    assert f"wrote {path}" in out
    assert path.exists()


def test_plot_patterns_of_a_network(capsys, monkeypatch):
    import longstride.pictures.patterns

    called = []
    monkeypatch.setattr(longstride.pictures.patterns, "plot_patterns", lambda schemes, *rest: called.extend(schemes))
    text = "column(4) + 3*distinct(merged(fixed(4, 2)))"  # Longer than a line above a column.
    run(capsys, "plot", "patterns", "--patterns", text, "--heads", "3")
    first, second = called
    assert first == (text.replace(" 3", "\n3") + "\nblock 1 of 4", parse("column(4)"))
    assert second.name.endswith("\nblock 2 of 4")
    assert second.heads == parse("block(4) | summary(4, 2), block(4) | summary(4, 2, 1)")
    assert run(capsys, "plot", "patterns", "--patterns", "3*lokal(4)")[2].count("there is no 'lokal'; did you mean 'local'?")


def test_plot_patterns_is_the_papers_figure_by_default(capsys, tmp_path, monkeypatch):
    import longstride.pictures.patterns

    called = []
    monkeypatch.setattr(longstride.pictures.patterns, "plot_patterns", lambda schemes, *rest: called.append(schemes))
    run(capsys, "plot", "patterns", "--width", "8")
    assert [repr(scheme.heads) for scheme in called[0]] == [
        "(Dense(),)",
        "(Local(8), Column(8))",
        "(Block(8), Summary(8, 1))",
    ]


def test_without_matplotlib_it_says_what_to_install(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, _, err = run(capsys, "plot", "patterns")
    assert code == 2
    assert "pip install 'longstride[plot]'" in err


def test_bench_attention(capsys, tmp_path):
    path = tmp_path / "result.json"
    words = "bench attention --lengths 32 64 128 --heads 2 --peers sdpa --repeats 1 --patterns merged(strided(8)) --json"
    code, out, _ = run(capsys, *words.split(), str(path))
    assert code == 0
    assert "SDPA dense" in out
    assert "time ~ pairs^" in out
    result = json.loads(path.read_text())
    assert [(row["n"], row["name"]) for row in result["rows"]] == [
        (n, name) for n in (32, 64, 128) for name in ("SDPA dense", "merged(strided(8))")
    ]
    assert all(row["forward_ms"] > 0 and row["both_ms"] > 0 and row["peak_mib"] > 0 for row in result["rows"])
    assert {"device", "threads", "torch", "python", "longstride"} <= result["machine"].keys()
    assert result["settings"]["heads"] == 2
    assert [growth["name"] for growth in result["growth"]] == ["SDPA dense", "merged(strided(8))"]


@pytest.mark.parametrize("flag", ["--json", "--picture"])
@pytest.mark.parametrize(
    "words",
    [
        "bench attention --lengths 32 --peers none --repeats 1 --patterns local(8) --device cpu",
        "bench sampling --preset text-small --batches 1 --positions 8 --bytes 2 --repeats 1 --peers none --device cpu",
        "bench step --cases text-small --peers none --steps 1 --rounds 1 --device cpu",
        "bench memory --contexts 64 --steps 1 --device cpu",
    ],
)
def test_benchmarks_replace_no_file_and_make_no_folder_unasked(capsys, tmp_path, words, flag):
    verb, suffix = " ".join(words.split()[:2]), {"--json": ".json", "--picture": ".svg"}[flag]
    path = tmp_path / f"result{suffix}"
    path.write_text("precious")
    code, out, err = run(capsys, *words.split(), flag, str(path))
    says = f"longstride: {verb}: {path} is there already; add --force to replace it, or give another {flag}\n"
    assert (code, out, err) == (2, "", says)
    assert path.read_text() == "precious"
    missing = tmp_path / "new" / path.name
    code, _, err = run(capsys, *words.split(), flag, str(missing), "--force")
    assert code == 2
    assert f"cannot be written: there is no folder {missing.parent}; make it first" in err
    code, _, _ = run(capsys, *words.split(), flag, str(path), "--force")
    assert code == 0
    assert "precious" not in path.read_text()
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_bench_sampling(capsys, tmp_path):
    words = "bench sampling --preset text-small --batches 1 2 --positions 8 --bytes 2 --repeats 1 --device cpu"
    files = {"--json": tmp_path / "result.json", "--picture": tmp_path / "rates.svg"}
    code, out, _ = run(capsys, *words.split(), *(str(word) for pair in files.items() for word in pair))
    assert code == 0
    assert f"wrote {tmp_path / 'rates.svg'}" in out
    result = json.loads((tmp_path / "result.json").read_text())
    ours = [(row["batch"], row["timed"]) for row in result["rows"] if row["name"] == "longstride"]
    assert ours == [(1, 2), (2, 2)]
    assert "<!-- longstride -->" in (tmp_path / "rates.svg").read_text()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("polt patterns", "there is no verb 'polt patterns'; did you mean 'plot patterns'?"),
        ("plot", "plot needs one of run, attention, patterns after it; longstride plot --help describes them"),
        ("plot xyzzy", "there is no verb 'plot xyzzy'; did you mean 'plot run' or 'plot attention' or 'plot patterns'?"),
        ("--steps 3", "a verb comes before '--steps', as in: longstride train text-small --data FILE --out RUN;"),
        ("TRAIN text-small", "there is no verb 'TRAIN text-small'; did you mean 'train'?"),
        ("doctro", "did you mean 'doctor'?"),
        ("sampel run", "there is no verb 'sampel run'; did you mean 'sample'?"),
        ("bnech step", "there is no verb 'bnech step'; did you mean 'bench step'?"),
        ("xyz", "longstride --help lists the verbs"),
        ("plot patterns --patterns lokal(3)", "there is no pattern 'lokal'; did you mean 'local'?"),
        ("plot patterns --patterns summary(3,4)", "c = 4 cells do not fit into a block of l = 3"),
        ("plot patterns --out figure.gif", "'figure.gif' must end in .png or .svg"),
        ("plot patterns --height x", "--height"),
        ("bench attention --lengths 0", "lengths must be at least 1, got 0"),
        ("bench attention --heads 0", "heads must be at least 1, got 0"),
        ("bench attention --patterns strided(4)", "is 2 heads; write 'merged(strided(4))'"),
        ("bench attention --device nowhere", "device = 'nowhere' cannot be used"),
        ("bench attention --impl bloked", "did you mean 'blocked'?"),
        ("bench attention --impl triton", "needs a CUDA device"),
        ("bench attention --lengths 64 64", "lengths must be one or more different ones, got [64, 64]"),
        ("bench attention --device meta", "device = 'meta' cannot be used"),
        ("bench attention --lenghts 4", "--lengths"),
        ("bench attention --json .", "json = '.' cannot be written"),
        ("bench attention --picture times.gif", "bench attention: times.gif must end in .png or .svg"),
        ("doctor enwik9", "doctor: there is no folder 'enwik9', and there is no preset 'enwik9'; did you mean 'enwik8'?"),
        ("doctor .", "doctor: . is no run and no saved model: it has no config.json"),
        ("bench sampling --preset text-smal", "there is no preset 'text-smal'; did you mean 'text-small'?"),
        (
            "bench sampling --preset text-small",
            "12,000, and the context of text-small is 512; give at most 510",
        ),
        ("bench sampling --bytes 0", "bytes must be at least 1, got 0"),
        ("bench sampling --picture rates.gif", "rates.gif must end in .png or .svg"),
        ("bench sampling --device nowhere", "device = 'nowhere' cannot be used"),
        ("bench attention --compile 64", "compile has '64', which is not measured; give 256, 1024, 4096, 16384 or all"),
        ("bench attention --read nowhere.json", "nowhere.json"),
        ("bench attention --shapes cifar", "shapes has 'cifar'; the names are enwik8, imagenet64, cifar10"),
    ],
)
def test_mistakes_end_in_exit_code_2(capsys, monkeypatch, words, says):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    code, _, err = run(capsys, *words.split())
    assert code == 2
    assert says in err


TINY = (
    "--model.layers 1 --model.width 16 --model.heads 1 --model.context 64 --model.pattern local(8) "
    "--model.embedding matrix(8) --steps 4 --batch 2 --validate-bytes 512 --device cpu"
)


@pytest.fixture
def text_file(tmp_path, monkeypatch):
    monkeypatch.setenv("LONGSTRIDE_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "letters.txt"
    path.write_text("to be, or not to be, that is the question\n" * 400)
    return path


def train_words(data, out, *more):
    return ["train", "text-small", "--data", str(data), "--out", str(out), *TINY.split(), *more]


def test_train(capsys, tmp_path, text_file):
    out = tmp_path / "run"
    code, said, err = run(capsys, *train_words(text_file, out, "--optimizer.learning-rate", "0.01"))
    assert code == 0
    assert f"{out}: step 4, all steps are done; " in said
    assert said.endswith(
        " bits per byte, at step 4\nwritten: model.safetensors, curve.png, sample-data.*, sample-model.*, metrics.jsonl, "
        "checkpoints\n"
    )
    assert err.startswith("step 4/4  ")
    assert {"config.json", "curve.png", "metrics.jsonl", "model.safetensors"} <= {path.name for path in out.iterdir()}
    config = json.loads((out / "config.json").read_text())
    assert (config["model"]["width"], config["optimizer"]["learning_rate"]) == (16, 0.01)
    assert config["optimizer"]["name"] == "muon"  # As the preset has it.


def test_train_pauses_and_resumes(capsys, tmp_path, text_file):
    out = tmp_path / "run"
    code, said, _ = run(capsys, *train_words(text_file, out, "--until", "2"))
    assert code == 0
    assert f"{out}: step 2, paused after step 2; " in said
    code, _, err = run(capsys, *train_words(text_file, out))
    assert (code, err) == (
        2,
        f"longstride: train: {out} already holds a run; add --resume to go on with it, or give another --out\n",
    )
    code, said, _ = run(capsys, "train", "text-small", "--out", str(out), "--resume")  # With the settings that it has.
    assert code == 0
    assert "step 4, all steps are done" in said
    (tmp_path / "full").mkdir()
    (tmp_path / "full/precious.txt").write_text("mine")
    code, _, err = run(capsys, *train_words(text_file, tmp_path / "full"))
    assert (code, err) == (2, f"longstride: train: {tmp_path / 'full'} is not an empty folder; give another --out\n")


def test_a_signal_during_the_last_step_leaves_a_finished_run(capsys, tmp_path, text_file, monkeypatch):
    from longstride.training.trainer import Trainer

    take_step = Trainer.take_step

    def interrupted(self, tokens):
        if self.step == 3:
            signal.raise_signal(signal.SIGTERM)
        return take_step(self, tokens)

    monkeypatch.setattr(Trainer, "take_step", interrupted)
    code, said, _ = run(capsys, *train_words(text_file, tmp_path / "run"))
    assert (code, "step 4, all steps are done" in said) == (0, True)


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_train_says_how_to_go_on(capsys, tmp_path, text_file, monkeypatch, number, expected):
    from longstride.training.trainer import Trainer

    take_step = Trainer.take_step

    def interrupted(self, tokens):
        signal.raise_signal(number)
        return take_step(self, tokens)

    monkeypatch.setattr(Trainer, "take_step", interrupted)
    out = tmp_path / "a run"
    code, said, err = run(capsys, *train_words(text_file, out))
    assert code == expected
    assert said.startswith(f"{out}: step 1, interrupted; ")
    assert "finishing this step and saving" in err
    assert (out / "checkpoints/step-1").is_dir()
    monkeypatch.setattr(Trainer, "take_step", take_step)
    way = said.splitlines()[-1].removeprefix("all is saved; to go on: longstride ")
    code, said, _ = run(capsys, *shlex.split(way))
    assert (code, "step 4, all steps are done" in said) == (0, True)


def test_train_needs_no_matplotlib(capsys, tmp_path, text_file, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, said, err = run(capsys, *train_words(text_file, tmp_path / "run"))
    assert code == 0
    assert "best validation" in said
    assert (
        "training is complete, but pictures or samples could not be written: plot run needs matplotlib: pip install" in err
    )
    code, _, err = run(capsys, "plot", "run", str(tmp_path / "run"))
    assert code == 2
    assert "pip install 'longstride[plot]'" in err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("train", "train: a preset comes first, as in: longstride train text-small --data FILE --out RUN"),
        (
            "train --data x --out y",
            "train: a preset comes first, as in: longstride train text-small --data FILE --out RUN",
        ),
        (
            "train empty.txt --out run",
            "train: 'empty.txt' is no preset; if it is the data: longstride train text-small --data empty.txt --out RUN; "
            "longstride presets lists the presets",
        ),
        ("train text-smal --data x", "there is no preset 'text-smal'; did you mean 'text-small'?"),
        ("train text-small --out run", "train: --data must be given: a prepared store, or files to make one of"),
        ("train text-small --data x", "train: --out must be given: the folder of the run"),
        ("train text-small --data nowhere --out run", "nowhere does not exist; give a file or a folder"),
        (
            "train text-small --data x --out run --resume",
            "train: run holds no run to resume; leave --resume out to begin one",
        ),
        (
            "train text-small --out rnu --resume",
            "train: rnu holds no run to resume; leave --resume out to begin one",
        ),
        ("train text-small --steps 0", "train: steps must be at least 1, got 0"),
        ("data prepare nowhere out", "nowhere does not exist; give a file or a folder"),
        ("data prepare empty.txt out", "empty.txt is empty"),
        ("data prepare . out", "out lies in the source, .; give a folder outside of it"),
        ("data fetch enwik9", "fetch: there is no data set 'enwik9'; did you mean 'enwik8'?"),
        ("plot run .", ". is no run: it has no metrics.jsonl"),
        ("plot run . --out curve.gif", "plot run: curve.gif must end in .png or .svg"),
        ("plot run", "plot run: which run comes next, as in: longstride plot run RUN"),
        ("plot attention nowhere", "plot attention: nowhere is no run and no saved model: there is no such folder"),
        ("plot attention . --out look.gif", "plot attention: look.gif must end in .png or .svg"),
        ("demo --steps 0", "demo: steps must be at least 1, got 0"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(capsys, monkeypatch, tmp_path, words, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").touch()
    code, out, err = run(capsys, *words.split())
    assert code == 2
    assert (out, err) == ("", f"longstride: {says}\n")
    assert [path.name for path in tmp_path.iterdir()] == ["empty.txt"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("train text-small --modle.layers 3", "--model.layers"),
        ("train text-small --optimizer.learning-rat 3", "--optimizer.learning-rate"),
        ("train text-small --steps many", "--steps"),
        ("train text-small --model.heads 5", "heads = 5 does not divide"),
        ("train text-small --optimizer.name sgd", "adamw"),
        ("data prepare", "SOURCE"),
        ("data prepare a b --kind sounds", "audio"),
        ("data prepear", "did you mean 'data prepare'?"),
        ("train text-small book.txt", "unexpected 'book.txt'; data comes after its flag: --data book.txt"),
    ],
)
def test_wrong_options_name_the_right_ones(capsys, words, says):
    code, _, err = run(capsys, *words.split())
    assert code == 2
    assert says in err


def test_train_help_has_the_presets_own_defaults(capsys):
    _, out, _ = run(capsys, "train", "cifar10", "--help")
    assert "180000" in out
    assert "--model.pattern" in out


def test_data_prepare(capsys, tmp_path, text_file):
    out = tmp_path / "store"
    code, said, _ = run(capsys, "data", "prepare", str(text_file), str(out))
    assert code == 0
    store = open_store(out)
    assert sum(store.splits.values()) == text_file.stat().st_size
    assert said == f"{out}: text, " + ", ".join(f"{name} {size:,} bytes" for name, size in store.splits.items()) + "\n"
    code, said, _ = run(capsys, *train_words(out, tmp_path / "run"))
    assert code == 0
    assert not (tmp_path / "cache").exists()


def test_data_prepare_with_other_limits(capsys, tmp_path):
    (tmp_path / "set").mkdir()
    for name in ("train", "valid", "README"):
        (tmp_path / "set" / f"{name}.txt").write_text(name * 10)
    source, out = str(tmp_path / "set"), str(tmp_path / "made")
    code, said, error = run(capsys, "data", "prepare", source, out, "--max-bytes", "20")
    assert (code, said) == (2, "")
    assert error.endswith(f"if that is right: longstride data prepare {source} STORE --max-bytes N\n")
    code, said, error = run(capsys, "data", "prepare", source, out)
    assert (code, said) == (0, f"{out}: text, train 50 bytes, valid 50 bytes\n")
    assert error == f"{source}: left out, 60 of 160 bytes: README.txt\n"
    code, said, error = run(capsys, "data", "prepare", source, str(tmp_path / "all"), "--join")
    assert (code, error) == (0, "")
    assert "train 144 bytes, valid 8 bytes, test 8 bytes" in said


def test_data_prepare_of_a_kind(capsys, tmp_path, text_file):
    code, said, _ = run(capsys, "data", "prepare", str(text_file), str(tmp_path / "store"), "--kind", "bytes")
    assert code == 0
    assert f"{tmp_path / 'store'}: bytes, " in said


def test_data_fetch(capsys, tmp_path, monkeypatch):
    import longstride.data.fetch

    monkeypatch.setattr(longstride.data.fetch, "fetch", lambda name, folder, force: folder / f"{name}{force}.zip")
    for more, name in (((), "enwik8False.zip"), (("--force",), "enwik8True.zip")):
        code, out, _ = run(capsys, "data", "fetch", "enwik8", "--folder", str(tmp_path), *more)
        assert (code, out) == (0, f"wrote {tmp_path / name}\n")


def test_plot_run(capsys, tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "bits_per_byte": 8.0, "learning_rate": 0.1}\n')
    for words, path in (((), tmp_path / "page.png"), (("--out", str(tmp_path / "a.svg")), tmp_path / "a.svg")):
        code, out, _ = run(capsys, "plot", "run", str(tmp_path), *words)
        assert (code, out) == (0, f"wrote {path}\n")
        assert path.stat().st_size > 1000


def test_plot_run_compares(capsys, tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text('{"step": 1, "bits_per_byte": 8.0}\n')
    path = tmp_path / "both.svg"
    code, out, _ = run(capsys, "plot", "run", str(tmp_path / "a"), str(tmp_path / "b"), "--out", str(path))
    assert (code, out) == (0, f"wrote {path}\n")
    assert path.is_file()


def test_plot_attention(capsys, tmp_path):
    from tests.pictures.small import saved

    folder, data = saved(tmp_path, "text")
    words = ("plot", "attention", str(folder), "--data", str(data), "--out", str(tmp_path / "look.png"))
    options = "--position 5 9 --layers 0 2 --heads 1 --split train --item 2"
    code, out, _ = run(capsys, *words, *options.split())
    assert (code, out) == (0, "".join(f"wrote {tmp_path / f'look-{position}.png'}\n" for position in (5, 9)))
    for wrong, says in (
        ("--position 96", "plot attention: position must be 0 to 95, got 96"),
        ("--layers 0 3", "plot attention: layers must be 0 to 2, got 3"),
        ("--heads 2", "plot attention: heads must be 0 to 1, got 2"),
        ("--item 3", "plot attention: item must be 0 to 2, got 3; it is a window of 96 bytes"),
    ):
        code, out, err = run(capsys, *words, *wrong.split())
        assert (code, out) == (2, "")
        assert err.startswith(f"longstride: {says}")
    assert not (tmp_path / "look.png").exists()


def test_plot_attention_without_matplotlib(capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    (tmp_path / "config.json").write_text("{}")
    code, _, err = run(capsys, "plot", "attention", str(tmp_path))
    assert code == 2
    assert "pip install 'longstride[plot]'" in err


def test_demo(capsys, tmp_path, monkeypatch):
    import longstride.commands.demo

    called = []
    monkeypatch.setattr(longstride.commands.demo, "demo", lambda *arguments: called.append(arguments))
    assert run(capsys, "demo", "--folder", str(tmp_path), "--steps", "3")[0] == 0
    assert run(capsys, "demo")[0] == 0
    assert called == [(tmp_path, 3), (Path("demo"), 640)]


def test_ctrl_c_is_one_line(capsys, monkeypatch):
    import longstride.commands.presets

    def show(dense):
        raise KeyboardInterrupt

    monkeypatch.setattr(longstride.commands.presets, "show", show)
    monkeypatch.setattr(os, "_exit", sys.exit)  # Threads of other tests may still be there.
    assert run(capsys, "presets") == (130, "", "longstride: interrupted\n")


@pytest.mark.parametrize("words", [[], ["--help"]])
def test_help_lists_every_verb(capsys, words):
    code, out, _ = run(capsys, *words)
    assert code == 0
    assert all(f"longstride {verb}" in out for verb in find_verbs())


def test_help_of_a_group_lists_its_verbs(capsys):
    code, out, _ = run(capsys, "plot", "--help")
    assert code == 0
    assert "longstride plot patterns" in out
    assert "bench" not in out


@pytest.mark.parametrize("verb", find_verbs())
def test_every_verb_has_help_with_an_example(capsys, verb):
    code, out, _ = run(capsys, *verb.split(), "--help")
    assert code == 0
    assert "Example: longstride" in out


def test_as_a_module():
    done = subprocess.run([sys.executable, "-m", "longstride", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == longstride.__version__


def test_a_reader_that_has_enough():
    """As in: longstride presets | head -1"""
    reader, writer = os.pipe()
    os.close(reader)
    for words, code in (("presets", 141), ("--help", 141), ("data prepare --help", 141)):
        command = [sys.executable, "-m", "longstride", *words.split()]
        for unbuffered in ("", "1"):
            environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
            done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False, env=environment)
            assert (words, done.returncode, done.stderr) == (words, code, "")
    os.close(writer)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_no_room_for_what_is_printed():
    with open("/dev/full", "w") as full:
        environment = {**os.environ, "PYTHONUNBUFFERED": ""}
        done = subprocess.run(
            [sys.executable, "-m", "longstride", "--help"], stdout=full, stderr=subprocess.PIPE, text=True, env=environment
        )  # fmt: skip
    says = "longstride: [Errno 28] No space left on device: standard output; free some space, or choose another place\n"
    assert (done.returncode, done.stderr) == (2, says)


def test_letters_that_standard_output_lacks(tmp_path):
    """Where it is not UTF-8, names are printed with escapes; the verb does not fail."""
    words = ["plot", "patterns", "--out", str(tmp_path / "\u00f6.png")]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-m", "longstride", *words], capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"wrote {tmp_path}/\\xf6.png\n", "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_no_room_for_progress(tmp_path, text_file, unbuffered):
    """Training goes on without the lines of its log."""
    out = tmp_path / "run"
    words = train_words(text_file, out, "--steps", "2", "--log-every", "1")
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "longstride", *words], stdout=subprocess.PIPE, stderr=full, text=True,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        )  # fmt: skip
    assert (done.returncode, done.stdout.splitlines()[0].split(";")[0]) == (0, f"{out}: step 2, all steps are done")


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "; free some space, or choose another place"),
        (errno.EROFS, "; choose another place"),
        (errno.EACCES, "; change its permissions, or choose another place"),
        (errno.EIO, ""),
    ],
)
def test_an_error_of_the_system_has_a_remedy(number, remedy, capsys):
    with pytest.raises(SystemExit) as end, exit_with_message("train"):
        raise OSError(number, "Why", "a/file")
    assert (end.value.code, capsys.readouterr().err) == (2, f"longstride: [Errno {number}] Why: 'a/file'{remedy}\n")


def test_train_resumes_if_there_is_a_run(capsys, tmp_path, text_file):
    """As batch systems need it: the same words begin a run, go on with it and end it."""
    out = tmp_path / "run"
    for more, says in ((["--until", "2"], "step 2, paused"), ([], "step 4, all steps"), ([], "step 4, all steps")):
        code, said, _ = run(capsys, *train_words(text_file, out, "--resume", "auto", *more))
        assert code == 0
        assert f"{out}: {says}" in said
    for words in (["--no-resume"], ["--resume", "--no-resume"], ["--resume=auto", "--no-resume"]):
        code, _, err = run(capsys, *train_words(text_file, out, *words))
        assert code == 2
        assert "already holds a run" in err
    code, said, _ = run(capsys, "train", "text-small", "--out", str(out), "--no-resume", "--resume=auto")
    assert (code, "step 4, all steps are done" in said) == (0, True)
    code, _, err = run(capsys, *train_words(text_file, out, "--resume", "always"))
    assert code == 2
    assert "--resume stands alone, or before auto, got 'always'" in " ".join(err.replace("│", "").split())
    code, said, _ = run(capsys, "train", "--help")
    assert code == 0
    assert "--resume [auto]" in said


QUIET = """if True:
    import sys
    from longstride.commands.main import main
    try:
        main({words!r})
    except SystemExit as end:
        print("code", end.code)
    print("imported", sorted({{"torch", "numpy", "rich", "matplotlib"}} & sys.modules.keys()))
"""


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("--help", None),
        ("--version", None),
        ("-v", None),
        ("help", None),
        ("polt", 2),
        ("train --help", 0),
        ("help eval", 0),
        ("sample --help", 0),
        ("bench tune --help", 0),
        ("plot run --help", 0),
        ("train text-small --stesp 3", 2),
        ("train text-smal", 2),
        ("train text-small --model.heads 5 --data x --out y", 2),
        ("eval RUN --batch x", 2),
        ("eval nowhere", 2),
        ("sample nowhere", 2),
        ("sample nowhere --temperature -1", 2),
        ("plot attention nowhere", 2),
        ("plot run nowhere", 2),
        ("doctor nowhere", 2),
        ("train text-small --data nowhere --out run", 2),
        ("train text-small --data . --out run --init-from nowhere", 2),
        ("train text-small --data . --out .", 2),
        ("bench attention --lengths 0", 2),
        ("bench attention --patterns nothing", 2),
        ("bench sampling --preset nothing", 2),
        ("completion nothing", 2),
    ],
)
def test_help_and_bad_arguments_import_nothing_heavy(words, code):
    done = subprocess.run(
        [sys.executable, "-c", QUIET.format(words=words.split())], capture_output=True, text=True, check=True
    )
    assert done.stdout.endswith(("" if code is None else f"code {code}\n") + "imported []\n")
    assert len(done.stderr.splitlines()) == (code == 2)


def test_help_has_several_names(capsys):
    assert run(capsys, "-v") == run(capsys, "--version") == run(capsys, "version")
    assert run(capsys, "help", "plot") == run(capsys, "plot", "--help")


@pytest.mark.parametrize("width", [50, 80, 200])
@pytest.mark.parametrize("verb", ["", *find_verbs()])
def test_help_fits_the_terminal(capsys, monkeypatch, verb, width):
    monkeypatch.setenv("COLUMNS", str(width))
    code, out, _ = run(capsys, *verb.split(), "--help")
    assert code == 0
    longest = max(out.splitlines(), key=len)
    assert len(longest) <= min(width, 120) or len(longest.split()) == 1  # A word that is longer than a line.


@pytest.mark.parametrize("verb", find_verbs())
def test_every_flag_has_a_description(capsys, monkeypatch, verb):
    from longstride.commands import parser

    texts = []
    monkeypatch.setattr(parser, "format_help", lambda text, width: texts.append(text) or "")
    code, _, _ = run(capsys, *verb.split(), "--help")
    assert code == 0
    found = [entry for section in parser.sections(texts[0]) for entry in section.entries]
    assert found
    for flags, about in found:
        assert re.match(r"-|[A-Z\[]{2}", flags), flags
        assert len(re.sub(r"\((default|required).*", "", about).split()) > 0, flags
        assert "None" not in flags + about
        assert "(default: )" not in about


def test_help_of_train_lists_the_presets_and_marks_what_is_required(capsys, monkeypatch):
    from longstride.model import PRESETS

    monkeypatch.setenv("COLUMNS", "100")
    _, out, _ = run(capsys, "train", "--help")
    assert "usage: longstride train PRESET" in out
    assert run(capsys, "train", "--data", "book.txt", "--help")[:2] == (0, out)
    assert all(name in out for name in PRESETS)
    told = " ".join(out.replace("│", "").split())
    assert "or a folder of them. (required)" in told
    assert "The run's folder. (required)" in told
    assert "compile the blocks with torch.compile. (default: no)" in told
    assert "write metrics for TensorBoard, too. (default: no)" in told
