"""The package's ways in, each of which reads what is in the current folder.

What they import when they need it is imported here, so that no case has to.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import soxr  # noqa: F401
import torch
import torch._dynamo
from matplotlib import font_manager  # noqa: F401
from PIL import JpegImagePlugin, PngImagePlugin  # noqa: F401

from longstride.attention import attend
from longstride.attention.kernels import saved
from longstride.commands.doctor import sampling_report
from longstride.data import audio
from longstride.data.image_files import open_images
from longstride.data.prepare import open_data, prepare
from longstride.data.store import open_store, verify
from longstride.evaluation.results import Results
from longstride.model import SparseTransformer
from longstride.model.saved_config import find_config
from longstride.patterns.notation import parse
from longstride.pictures import benchmarks, patterns  # noqa: F401
from longstride.pictures.run import plot_run
from longstride.pictures.run_table import read_settings, summarize
from longstride.sampling.data_kind import find_data_kind
from longstride.training import train
from longstride.training.curve import plot_curve, read_rows
from longstride.training.metrics import read_metrics
from longstride.training.source import is_training_data, open_source
from tests.hostile.seeds import ABOUT, CHECKPOINT, MODEL, PLAN, QUIET


def load_model() -> None:
    """As `longstride sample`."""
    source = open_source("sample", Path("model"))
    model = SparseTransformer.from_pretrained(source.weights)
    with torch.no_grad():
        model.loss(torch.arange(min(24, model.config.context))[None])


def examine_model() -> None:
    """As `longstride doctor`."""
    list(sampling_report("model", find_config("doctor", "model" if Path("model").is_dir() else "run")))


def open_run() -> None:
    """As `longstride eval` and `sample`."""
    source = open_source("eval", Path("run"))
    if source.config is not None:
        find_data_kind(source, source.config.model, None)
    is_training_data("eval", source, open_store("data"), other_allowed=False)
    SparseTransformer.from_pretrained(source.weights)


def open_checkpoint() -> None:
    source = open_source("eval", Path("run"), Path(CHECKPOINT).name)
    SparseTransformer.from_pretrained(source.weights)


def resume() -> None:
    train(PLAN, resume=True, until=3, console=QUIET)


def resume_or_begin() -> None:
    train(PLAN, resume="auto", until=3, console=QUIET)


def begin() -> None:
    """With what is there in the way."""
    train(PLAN, until=1, console=QUIET)


def describe_run() -> None:
    """As `longstride plot run`, but for the drawing."""
    read_settings(Path("run"))
    summarize(read_rows(Path("run")))


def load_metrics() -> None:
    read_metrics("run")
    summarize(read_rows(Path("run")))


def draw_page() -> None:
    plot_run([Path("run")])


def draw_curve() -> None:
    plot_curve(Path("run"))


def add_results() -> None:
    for force in (False, True):
        Results(Path("eval.json"), ABOUT, True, force).add({"min_context": 4, "bits_per_byte": 2.4})


def load_settings() -> None:
    saved.read(Path("kernels.json"))


def parse_pattern() -> None:
    """And use what it names."""
    for pattern in parse(_pattern())[:4]:
        assert parse(pattern.text) == (pattern,)
        pattern.pairs(10**6)
        attend(*torch.ones(3, 1, 1, 24, 8), pattern, impl="blocked")


def place_pattern() -> None:
    replace(MODEL, pattern=_pattern())


def check_store() -> None:
    store = open_store("data")
    verify(store)
    assert all(store.split(name)[:1].size for name in store.splits)
    assert store.to_json()


def open_prepared() -> None:
    open_data("data")


def prepare_source() -> None:
    verify(prepare(_source(), "out", progress=False))


def prepare_as(kind: str) -> None:
    verify(prepare(_source(), "out", kind, progress=False))


def open_unprepared() -> None:
    """The second time it is in the cache."""
    open_data(_source(), progress=False)
    open_data(_source(), progress=False)


def complete_images() -> None:
    """As a prompt."""
    found = open_images(_source())
    found.read(np.arange(min(2, found.count)))


def complete_sound() -> None:
    """As a prompt."""
    audio.expected_bytes(_source())
    for _ in audio.read(_source()):
        pass


def _source() -> Path:
    return next(path for path in sorted(Path(".").iterdir()) if path.name.startswith("in"))


def _pattern() -> str:
    return Path("pattern.txt").read_bytes().decode("utf-8", "replace")
