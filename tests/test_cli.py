import json
import subprocess
import sys

import pytest
import torch

pytest.importorskip("tyro")

import longstride
from longstride import cli


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

    monkeypatch.setitem(api.IMPLEMENTATIONS, "blocked", lambda q, k, v, heads, scale: q + k + v)
    code, out, _ = run(capsys, "doctor")
    assert code == 1
    assert "DISAGREES with the oracle" in out


def test_doctor_says_which_settings_are_in_force(capsys, monkeypatch, tmp_path):
    from longstride.attention.kernels import saved

    path = tmp_path / "longstride" / "kernels.json"
    monkeypatch.delenv(saved.VARIABLE)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    place = '"kernel": "dq", "summary": true, "width": 64, "dtype": "float16"'
    row = f'{{{place}, "rows": 64, "columns": 64, "warps": 4, "stages": 3}}'
    contents = {
        None: (0, f"shipped; longstride bench tune saves a GPU's own in {path}"),
        f'{{"NVIDIA H200": [{row}]}}': (0, f"{path}: 1 for NVIDIA H200"),
        "{": (1, f"FAILED here: settings: in {str(path)!r}, Expecting property name"),
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
    import longstride.doctor

    monkeypatch.setattr(longstride.doctor, "devices", lambda: [torch.device("cuda")])
    monkeypatch.setattr(longstride.doctor, "_describe", lambda device: "a GPU")
    monkeypatch.setattr("longstride.attention.api._missing_for_triton", lambda on_gpu: "Triton")
    code, out, _ = run(capsys, "doctor")
    assert code == 1
    assert "FAILED here: attend: impl = 'auto' on cuda needs Triton" in out


def test_plot_patterns(capsys, tmp_path):
    path = tmp_path / "figure.svg"
    code, out, _ = run(capsys, "plot", "patterns", "--patterns", "strided(4)", "local(2) | column(4)", "--out", str(path))
    assert code == 0
    assert f"wrote {path}" in out
    assert path.exists()


def test_plot_patterns_is_the_papers_figure_by_default(capsys, tmp_path, monkeypatch):
    import longstride.plots

    called = []
    monkeypatch.setattr(longstride.plots, "plot_patterns", lambda schemes, *rest: called.append(schemes))
    run(capsys, "plot", "patterns", "--width", "8")
    assert [repr(scheme.heads) for scheme in called[0]] == [
        "(Dense(),)",
        "(Local(8), Column(8))",
        "(Block(8), Summary(8, 1))",
    ]


def test_without_matplotlib_it_says_what_to_install(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "longstride.plots", None)
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


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("polt patterns", "there is no verb 'polt patterns'; did you mean 'plot patterns'?"),
        ("plot", "did you mean 'plot run' or 'plot patterns'?"),
        ("doctro", "did you mean 'doctor'?"),
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
        ("bench attention --picture times.gif", "picture = 'times.gif' must end in .png or .svg"),
        ("bench attention --shapes cifar", "shapes has 'cifar'; the names are enwik8, imagenet64, cifar10"),
    ],
)
def test_mistakes_end_in_exit_code_2(capsys, monkeypatch, words, says):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    code, _, err = run(capsys, *words.split())
    assert code == 2
    assert says in err


@pytest.mark.parametrize("words", [[], ["--help"]])
def test_help_lists_every_verb(capsys, words):
    code, out, _ = run(capsys, *words)
    assert code == 0
    assert all(f"longstride {verb}" in out for verb in cli.VERBS)


def test_help_of_a_group_lists_its_verbs(capsys):
    code, out, _ = run(capsys, "plot", "--help")
    assert code == 0
    assert "longstride plot patterns" in out
    assert "bench" not in out


@pytest.mark.parametrize("verb", cli.VERBS)
def test_every_verb_has_help_with_an_example(capsys, verb):
    code, out, _ = run(capsys, *verb.split(), "--help")
    assert code == 0
    assert "Example: longstride" in out


def test_as_a_module():
    done = subprocess.run([sys.executable, "-m", "longstride", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == longstride.__version__
