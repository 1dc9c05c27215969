import sys

import pytest

pytest.importorskip("matplotlib")

import numpy as np
from PIL import Image

from longstride.data.audio import to_wav
from longstride.data.images import sheet
from longstride.pictures.run import duration_text, plot_run, printable, read_settings, read_wav, summarize
from longstride.training.curve import draw_bits
from longstride.training.run import Run
from tests.training.small import config

ROWS = [
    {"step": 10, "bits_per_byte": 7.0, "learning_rate": 0.1, "gradient_norm": 2.0, "seconds_per_step": 3.0,
     "bytes_per_second": 1000.0},
    {"step": 20, "bits_per_byte": 6.0, "learning_rate": 0.2, "gradient_norm": float("inf"), "seconds_per_step": 4.0,
     "bytes_per_second": 2000.0, "valid_bits_per_byte": 6.1234, "memory_gib": 1.5},
    {"step": 25, "bits_per_byte": float("nan"), "learning_rate": 0.1, "gradient_norm": 0.5, "seconds_per_step": 2.0,
     "bytes_per_second": 3000.0, "valid_bits_per_byte": 6.5},
]  # fmt: skip


def run(folder, rows=ROWS, **changes):
    folder.mkdir(parents=True)
    made = Run(folder)
    for row in rows:
        made.log(row)
    if changes:
        (folder / "config.json").write_text(config(folder.parent, **changes).to_json())
    return folder


def text_samples(folder):
    (folder / "sample-data.txt").write_text("held out $^$ \u4e2d\n" * 40, encoding="utf-8")
    (folder / "sample-model.txt").write_bytes(b"\xff made\x00\n")
    (folder / "sample.txt").write_text("drawn by its probabilities", encoding="utf-8")


def image_samples(folder):
    for name in ("sample-data", "sample-model", "sample"):
        sheet(np.arange(4 * 12, dtype=np.uint8), (2, 2, 3), 2, folder / f"{name}.png")


def sound_samples(folder):
    for name in ("sample-data", "sample-model", "sample"):
        to_wav(np.arange(200, dtype=np.uint8), folder / f"{name}.wav", 12_000)


@pytest.fixture
def words(monkeypatch):
    """SVG with text as text, and what stands in it."""
    import matplotlib

    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")
    return lambda path: path.read_text(encoding="utf-8")


def test_a_page_in_the_run(tmp_path):
    folder = run(tmp_path / "run", seed=7)
    text_samples(folder)
    assert plot_run([folder]) == folder / "page.png"
    with Image.open(folder / "page.png") as picture:
        assert picture.format == "PNG"
        assert picture.width == round((0.2 + 6.4 + 0.35 + 5.0 + 0.2) * 150)
        assert 1150 <= picture.height <= 1500
        assert len(picture.convert("RGB").getcolors(2**22)) > 50
    assert not [path.name for path in folder.iterdir() if path.name.startswith(".")]


def wide_samples(folder):
    for name in ("sample-data", "sample-model", "sample"):
        sheet(np.arange(4 * 12, dtype=np.uint8), (2, 2, 3), 4, folder / f"{name}.png")


@pytest.mark.parametrize("samples", [text_samples, image_samples, wide_samples, sound_samples])
def test_a_page_ends_with_its_content(samples, tmp_path):
    folder = run(tmp_path / "run", seed=7)
    samples(folder)
    with Image.open(plot_run([folder])) as picture:
        drawn = np.flatnonzero((np.asarray(picture.convert("L")) < 250).any(1))
        assert picture.height - drawn[-1] < 0.5 * 150


@pytest.mark.parametrize("samples", [text_samples, image_samples, sound_samples])
def test_everything_that_there_is_stands_on_it(samples, tmp_path, words):
    folder = run(tmp_path / "run", seed=7, model={"dropout": 0.25}, optimizer={"learning_rate": 0.0125})
    samples(folder)
    text = words(plot_run([folder], tmp_path / "page.svg"))
    for said in (
        ">run<", ">validation<", ">gradient norm<", ">bytes/s<", ">learning rate<", ">held-out data<",
        "6.1234 bits per byte, at step 20", ">merged(fixed(8, 2))<", ">0.25<", "learning rate 0.0125", ">7<",
        ">what the model thinks most likely", ">made by longstride sample<",
    ):  # fmt: skip
        assert said in text, said
    assert ("held out $^$ \u00b7" in text) == (samples is text_samples)
    assert ("<image" in text) == (samples is image_samples)
    assert (">seconds<" in text) == (samples is sound_samples)


def test_what_is_missing_is_left_out(tmp_path, words):
    folder = run(tmp_path / "run", [{"step": 1, "bits_per_byte": 8.0}])
    text = words(plot_run([folder], tmp_path / "page.svg"))
    assert ">bits per byte<" in text
    for unsaid in ("gradient norm", "bytes/s", "learning rate", "held-out data", "parameters", "validation", "speed"):
        assert f">{unsaid}<" not in text


def test_several_runs_and_in_what_they_differ(tmp_path, words):
    folders = [run(tmp_path / name / "a", seed=seed) for name, seed in (("one", 3), ("two", 4))]
    folders.append(run(tmp_path / "b", ROWS[:1]))
    text = words(plot_run(folders, tmp_path / "runs.svg"))
    assert f">{folders[0]}<" in text  # Two have the same name.
    assert text.count(">seed<") == 2
    assert ">3<" in text
    assert ">4<" in text
    assert ">held-out data<" not in text
    alike = words(plot_run(folders[:2], tmp_path / "alike.svg"))
    assert ">optimizer<" not in alike


def test_a_comparison_says_which_lines_are_training(tmp_path, words):
    folders = [run(tmp_path / name) for name in "ab"]
    text = words(plot_run(folders, tmp_path / "runs.svg"))
    assert text.count(">training<") == text.count(">validation<") + len(folders) == 1 + len(folders)  # Each has results.


def test_the_warm_up_is_the_one_that_was_used(tmp_path):
    assert read_settings(run(tmp_path / "a", steps=500, optimizer={"warmup": 50}))["warm-up"] == "50 steps"
    assert read_settings(run(tmp_path / "c", steps=10, optimizer={"warmup": 1}))["warm-up"] == "1 step"
    found = read_settings(run(tmp_path / "b" / "run", steps=500, optimizer={"warmup": 5000}))["warm-up"]
    assert found == "50 steps, not 5,000: at most a tenth of the run"


def test_the_last_value_stands_behind_the_lines():
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3))
    axes = figure.subplots()
    draw_bits(axes, ROWS)
    (number,) = axes.texts
    FigureCanvasAgg(figure).draw()
    box = number.get_window_extent()
    last = axes.transData.transform((ROWS[-1]["step"], 6.5))
    assert box.x0 > last[0]
    assert box.x1 < axes.get_window_extent().x1


def test_several_runs_go_where_one_is(tmp_path, monkeypatch):
    folders = [run(tmp_path / name) for name in "ab"]
    monkeypatch.chdir(tmp_path)
    assert plot_run(folders).name == "runs.png"
    assert (tmp_path / "runs.png").is_file()
    with pytest.raises(ValueError, match=r"runs\.png is there already; add --force to replace it"):
        plot_run(folders)
    assert plot_run(folders, force=True).name == "runs.png"


def test_results():
    found = summarize([{**row, "bits_per_byte": None if row["step"] == 25 else row["bits_per_byte"]} for row in ROWS])
    assert found == {
        "best validation": "6.1234 bits per byte, at step 20",
        "training": "6.0000 bits per byte, at step 20",
        "time in steps": "1 min 20 s",
        "speed": "2,000 bytes/s",
        "memory": "1.5 GiB",
    }
    assert summarize([{"step": 1}]) == {}


def test_in_words():
    assert [duration_text(seconds) for seconds in (0.25, 59.6, 3600, 7325)] == ["0.2 s", "1 min", "1 h", "2 h 2 min"]


def test_settings_of_data(tmp_path):
    folder = run(tmp_path / "run")
    assert read_settings(folder) == {}
    (folder / "data.json").write_text('{"kind": "text", "splits": {"train": {"bytes": 1234}}}')
    assert read_settings(folder) == {"kind": "text", "bytes": "train 1,234"}


def test_sounds_come_back(tmp_path):
    to_wav(np.array([0, 128, 255], np.uint8), tmp_path / "a.wav", 8000)
    samples, rate = read_wav(tmp_path / "a.wav")
    assert rate == 8000
    assert samples[0] < -0.9
    assert samples[2] > 0.9


def test_letters_that_the_font_lacks_get_a_sign():
    assert printable("a\u00e9\u0416\u4e2d\x00\x7f") == "a\u00e9\u0416\u00b7\u00b7\u00b7"


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("config.json", "{", "config.json is not JSON"),
        ("data.json", "{", "data.json is damaged"),
        ("data.json", "[1]", "data.json is damaged"),
        ("sample-data.png", "no image", "sample-data.png cannot be read"),
        ("sample-data.wav", "no sound", "sample-data.wav cannot be read"),
        ("sample-data.wav", "", "sample-data.wav cannot be read"),
    ],
)
def test_damaged_parts_are_named(name, content, says, tmp_path):
    folder = run(tmp_path / "run")
    (folder / name).write_text(content)
    with pytest.raises(ValueError, match=says):
        plot_run([folder])
    assert not (folder / "page.png").exists()


def test_mistakes(tmp_path, monkeypatch):
    folder = run(tmp_path / "run")
    for runs, path, says in (
        ([], None, "which run comes next"),
        ([tmp_path / str(number) for number in range(7)], None, "7 runs are given, and there are colours for 6"),
        ([folder, folder / "../run"], None, "runs must be different ones"),
        ([folder], "page.gif", r"page.gif must end in .png or .svg"),
        ([tmp_path], None, r"is no run: it has no metrics\.jsonl"),
        ([folder], folder / "metrics.jsonl/page.png", "cannot be written"),
    ):
        with pytest.raises(ValueError, match=says):
            plot_run(runs, path)
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun/metrics.jsonl").touch()
    with pytest.raises(ValueError, match="has no steps to draw yet"):
        plot_run([tmp_path / "begun"])
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match=r"plot run needs .* pip install 'longstride\[plot\]'"):
        plot_run([folder])
    assert [path.name for path in folder.iterdir()] == ["metrics.jsonl"]
