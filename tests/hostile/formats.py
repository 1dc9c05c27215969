"""Every format that the package reads: how valid files of it are made, how they are damaged, and what reads them.

A seed is a small folder of valid files, by path. A case is one of these with a change in it, in the current folder, which
one of the format's readers is given.
"""

import bz2
import gzip
import io
import json
import lzma
import os
import tempfile
import wave
import zipfile
from collections.abc import Callable
from contextlib import chdir
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import soundfile
import soxr  # noqa: F401  What a reader imports when it needs it, so that no case has to.
import torch
import torch._dynamo
from matplotlib import font_manager  # noqa: F401
from PIL import Image, JpegImagePlugin, PngImagePlugin  # noqa: F401
from rich.console import Console

from longstride import plots, samples  # noqa: F401
from longstride.attention import attend
from longstride.attention.kernels import saved
from longstride.attention.kernels.launches import KERNELS, TileKey
from longstride.data import audio
from longstride.data.images import open_images
from longstride.data.prepare import open_data, prepare
from longstride.data.store import open_store, verify, write_store
from longstride.doctor import find_config, sampling_report
from longstride.looking.page import plot_run
from longstride.looking.settings import results, settings
from longstride.making.subject import find_subject
from longstride.model import ModelConfig, SparseTransformer
from longstride.model.placement import place
from longstride.notation import parse
from longstride.results import Results
from longstride.source import is_the_runs, open_source
from longstride.training import OptimizerConfig, TrainConfig, train
from longstride.training.curve import plot_curve, read_rows
from longstride.training.run import Run, read_metrics
from longstride.training.sealed import seal
from tests.data.small import batches, binary_batch, planes, python_2_batch, python_3_batch, some_images, write_tar
from tests.hostile import containers as layers
from tests.hostile.mutators import ODD, Mutator, mutate_bytes, mutate_json, mutate_lines, mutate_pattern, pattern_text
from tests.hostile.worker import Case

Files = dict[str, bytes]
"""The files of a folder by path."""
Damage = Callable[[Random, list[Files], Files], Files]
"""Of a generator, all seeds and one of them: the files of a case."""

MODEL = ModelConfig(
    layers=2, width=16, heads=2, context=32, pattern="merged(fixed(8, 2))", embedding="matrix(8)", ff_ratio=2.0
)
PLAN = TrainConfig(
    model=MODEL, data="data", out="run", steps=4, batch=2, log_every=1, validate_every=1, validate_bytes=64, save_every=1,
    keep=1, device="cpu", ema=0.5, optimizer=OptimizerConfig(warmup=1),
)  # fmt: skip
CHECKPOINT = "run/checkpoints/step-2"
QUIET = Console(file=io.StringIO())
TEXT = samples.text()[:3000].tobytes()


@dataclass(frozen=True)
class Format:
    seeds: Callable[[], list[Files]]
    """Made in an empty current folder."""
    damage: Damage
    readers: tuple[Case, ...]
    finish: Callable[[], Any] = lambda: None
    """What is done when the files are written, and before they are read."""
    share: int = 1
    """How many of all cases it gets, in comparison with the others."""


def case(rng: Random, form: Format, seeds: list[Files], number: int, folder: Path) -> Case:
    """Writes the case into the folder, and returns what reads it. The first ones are the seeds as they are, which the
    first reader can read."""
    whole = number < len(seeds)
    files = dict(seeds[number] if whole else form.damage(rng, seeds, dict(rng.choice(seeds))))
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    form.finish()
    links = files.get("links")
    if links is not None:
        _replace(rng, folder)
    return form.readers[0] if whole else rng.choice(form.readers)


def in_file(mutator: Mutator, *names: str) -> Damage:
    """Changes one of these files; of a seed's first one if none is named."""

    def damage(rng: Random, seeds: list[Files], files: Files) -> Files:
        name = rng.choice(names or tuple(files)[:1])
        others = [content for seed in seeds for other, content in seed.items() if Path(other).suffix == Path(name).suffix]
        return files | {name: mutator(rng, files[name], rng.choice(others))}

    return damage


# Runs and models.


def run_folder() -> list[Files]:
    """A run that was paused after two of four steps, with its data and all that training leaves."""
    _text_store()
    train(PLAN, until=2, console=QUIET)
    # Cases are the same every time, so no path and no time is left in them.
    path, rows = Path("run/config.json"), read_metrics("run")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"data": "data"}, indent=2) + "\n")
    lines = [{name: value if name in ("step", "loss") else 1.5 for name, value in row.items()} for row in rows]
    Path("run/metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return [_files()]


def page_folders() -> list[Files]:
    """Runs with samples of each kind."""
    (run,) = run_folder()
    run = {name: content for name, content in run.items() if name.count("/") == 1 and name.startswith("run/")}
    sound, picture = io.BytesIO(), _picture("PNG", 3)
    with wave.open(sound, "wb") as file:
        file.setparams((1, 2, 12_000, 0, "NONE", ""))
        file.writeframes(_tone().tobytes())
    ends = {".txt": TEXT[:500], ".png": picture, ".wav": sound.getvalue()}
    return [{**run, f"run/sample-data{end}": content} for end, content in ends.items()]


def model_folder() -> list[Files]:
    torch.manual_seed(0)
    for name, pattern in (("a", "merged(fixed(8, 2))"), ("b", "heads(local(8), column(8))")):
        config = ModelConfig(**{**MODEL.__dict__, "pattern": pattern, "dropout": 0.25})
        SparseTransformer(config).save_pretrained(f"{name}/model")
    found = _files()
    return [{name[2:]: content for name, content in found.items() if name.startswith(one)} for one in ("a/", "b/")]


def results_file() -> list[Files]:
    Results(Path("eval.json"), ABOUT, True, False).add({"min_context": 0, "bits_per_byte": 2.5})
    Results(Path("eval.json"), ABOUT, True, False).add({"min_context": 8, "bits_per_byte": 2.25})
    return [_files()]


def settings_file() -> list[Files]:
    rows = {}
    for kernel, (key, setting) in KERNELS.items():
        if key is TileKey:
            rows[key(kernel, False, 64, torch.bfloat16)] = setting(64, 64, 4, 2)
        else:
            rows[key(kernel, 64, False, 64, torch.float16)] = setting(4, 2, 1)
    saved.write(Path("kernels.json"), {"NVIDIA H200": rows})
    return [_files()]


def patterns() -> list[Files]:
    texts = ("interleave(strided(128))", "3*local(96) + column(96)", "heads(local(8), column(8) | block(4))", "dense()")
    return [{"pattern.txt": text.encode()} for text in texts]


ABOUT = {
    "evaluated": "run", "weights_sha256": "0" * 64, "model": dict(MODEL.__dict__), "bytes": 300,
    "data": {"path": "data", "kind": "text", "split": "valid", "sha256": "1" * 64},
}  # fmt: skip


def read_model() -> None:
    source = open_source("sample", Path("model"))
    model = SparseTransformer.from_pretrained(source.weights)
    tokens = torch.arange(min(24, model.config.context))[None]
    with torch.no_grad():
        model.loss(tokens)


def examine_model() -> None:
    config = find_config("model" if Path("model").is_dir() else "run")
    list(sampling_report("model", config))


def open_run() -> None:
    source = open_source("eval", Path("run"))
    find_subject(source, source.config.model, None)
    is_the_runs("eval", source, open_store("data"), asked_for=False)
    SparseTransformer.from_pretrained(source.weights)


def open_checkpoint() -> None:
    source = open_source("eval", Path("run"), Path(CHECKPOINT).name)
    SparseTransformer.from_pretrained(source.weights)


def resume() -> None:
    train(PLAN, resume=True, until=3, console=QUIET)


def begin() -> None:
    """With what is there in the way."""
    train(PLAN, until=1, console=QUIET)


def run_settings() -> None:
    settings(Path("run"))
    results(read_rows(Path("run")))


def metrics() -> None:
    results(read_rows(Path("run")))
    Run(Path("run")).forget_after(1)
    read_metrics("run")


def draw_page() -> None:
    plot_run([Path("run")])


def draw_curve() -> None:
    plot_curve(Path("run"))


def add_results() -> None:
    for force in (False, True):
        Results(Path("eval.json"), ABOUT, True, force).add({"min_context": 4, "bits_per_byte": 2.4})


def read_settings() -> None:
    saved.read(Path("kernels.json"))


def read_pattern() -> None:
    text = Path("pattern.txt").read_bytes().decode("utf-8", "replace")
    heads = parse(text)
    for pattern in heads[:4]:
        assert parse(pattern.text) == (pattern,)
        pattern.pairs(10**6)
        attend(*torch.ones(3, 1, 1, 24, 8), pattern, impl="blocked")


def place_pattern() -> None:
    text = Path("pattern.txt").read_bytes().decode("utf-8", "replace")
    ModelConfig(**{**MODEL.__dict__, "pattern": text})
    place(text, 2)


def mutate_config(rng: Random, data: bytes, other: bytes) -> bytes:
    """With patterns among the odd values."""
    texts = [json.dumps(pattern_text(rng)) for _ in range(12)]
    texts += [
        json.dumps(f"{name}({size})") for name in ("matrix", "image", "grid") for size in ("1", "10**9", "{[]}", "2**99")
    ]
    return mutate_json(rng, data, other, [*ODD, *texts, *texts])


def page_damage(rng: Random, seeds: list[Files], files: Files) -> Files:
    """Metrics, or a sample that training has left."""
    name = rng.choice([name for name in files if "/sample-" in name] + ["run/metrics.jsonl"])
    how = {".jsonl": mutate_lines, ".png": layers.mutate_png, ".wav": layers.mutate_wav, ".txt": mutate_bytes}[
        Path(name).suffix
    ]
    return files | {name: how(rng, files[name], files[name])}


def seal_checkpoint() -> None:
    seal(Path(CHECKPOINT))


# What a run's folder may hold in place of its files.

ENTRIES = (
    "run", "run/config.json", "run/data.json", "run/metrics.jsonl", "run/model.safetensors", "run/launch.txt", "run/.lock",
    "run/checkpoints", CHECKPOINT, f"{CHECKPOINT}/state.json", f"{CHECKPOINT}/manifest.json", f"{CHECKPOINT}/state",
    f"{CHECKPOINT}/model.safetensors", "data", "data/manifest.json", "data/train.bin", "run/curve.png", "run/page.png",
    "run/.config.1.json", "run/checkpoints/step-3", "run/checkpoints/step-1",
)  # fmt: skip


def linked(rng: Random, seeds: list[Files], files: Files) -> Files:
    return {"links": b"", **files}


def _replace(rng: Random, folder: Path) -> None:
    """One entry by a link, a folder, a pipe, a file without end, or nothing."""
    path = folder / rng.choice(ENTRIES)
    aside = folder / "aside"
    if path.exists():
        path.rename(aside)
    path.parent.mkdir(parents=True, exist_ok=True)
    match rng.choice(("file", "folder", "dangling", "itself", "moved", "directory", "pipe", "large", "gone")):
        case "file":
            path.symlink_to(folder.parent / "canary.txt")
        case "folder":
            path.symlink_to(folder.parent / "canary")
        case "dangling":
            path.symlink_to(folder.parent / "nothing")
        case "itself":
            path.symlink_to(path.name)
        case "moved" if aside.exists():
            path.symlink_to(aside)
        case "directory":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
        case "large":
            path.touch()
            os.truncate(path, 3 << 30)


# Data.


def _text_store() -> None:
    data = np.frombuffer(TEXT, np.uint8)
    write_store("data", "text", {"train": data[:2400], "valid": data[2400:2700], "test": data[2700:]})


def stores() -> list[Files]:
    _text_store()
    text = _files()
    pictures = some_images(6, (4, 4, 3))
    write_store("data-images", "images", {"train": pictures[:4], "valid": pictures[4:]}, (4, 4, 3))
    sound = np.arange(200, dtype=np.uint8)
    write_store("data-audio", "audio", {"train": sound, "valid": sound}, (), 12_000)
    found = [text]
    for name in ("data-images", "data-audio"):
        found.append({path.replace(name, "data"): content for path, content in _files().items() if path.startswith(name)})
    return found


def arrays() -> list[Files]:
    pictures = some_images(6, (4, 4, 3))
    plain = _npy(pictures)
    return [{"in.npy": plain}, {"in.npy": _npy(pictures[..., 0])}, {"in.npy.gz": gzip.compress(plain, mtime=0)}]


def archives_of_arrays() -> list[Files]:
    pictures = some_images(8, (4, 4, 3))
    one, two = io.BytesIO(), io.BytesIO()
    np.savez(one, pictures)
    np.savez_compressed(two, train=pictures[:4], valid=pictures[4:6], test=pictures[6:])
    return [{"in.npz": one.getvalue()}, {"in.npz": two.getvalue()}]


def pictures(form: str, ending: str) -> list[Files]:
    """Folders of them, of which the first is damaged."""
    found = []
    for channels in (3, 1):
        several = {f"in/{number}{ending}": _picture(form, channels, number) for number in range(4)}
        found.append(several)
    return found


def sounds(*forms: tuple[str, str, str]) -> list[Files]:
    found = []
    for ending, form, subtype in forms:
        file = io.BytesIO()
        soundfile.write(file, _tone(), 24_000 if form == "MP3" else 16_000, format=form, subtype=subtype)
        found.append({f"in{ending}": layers.timeless(file.getvalue())})
    return found


WAVS = (
    (".wav", "WAV", "PCM_16"), (".wav", "WAV", "FLOAT"), (".wav", "WAV", "ULAW"), (".wav", "WAV", "IMA_ADPCM"),
    (".wav", "WAV", "MS_ADPCM"), (".wav", "AU", "PCM_16"), (".wav", "W64", "PCM_24"), (".wav", "CAF", "ALAC_16"),
    (".wav", "AIFF", "PCM_16"), (".wav", "RF64", "PCM_16"), (".wav", "VOC", "PCM_16"), (".wav", "IRCAM", "PCM_16"),
)  # fmt: skip


def packed(ending: str, compress: Callable[[bytes], bytes]) -> list[Files]:
    codes = bytes(range(256)) * 4
    return [
        {f"in.txt{ending}": compress(TEXT)}, {f"in.u8{ending}": compress(codes)},
        {f"in.npy{ending}": compress(_npy(some_images(6, (4, 4, 3))))},
    ]  # fmt: skip


def zips() -> list[Files]:
    found = []
    for name, content, method in (("in.txt", TEXT, zipfile.ZIP_DEFLATED), ("a/b.txt", TEXT[:500], zipfile.ZIP_STORED)):
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w", method) as archive:
            archive.writestr(zipfile.ZipInfo(name, layers.DATE), content, method)
        found.append({"in.zip": file.getvalue()})
    return found


def tars() -> list[Files]:
    train_images, test = some_images(5, seed=1), some_images(1, seed=2)
    found = []
    for write, ending in ((python_2_batch, ""), (python_3_batch, ""), (binary_batch, ".bin")):
        archive = write_tar(Path("in.tar.gz"), batches(train_images, test, write, ending)).read_bytes()
        archive = gzip.compress(gzip.decompress(archive), mtime=0)
        found += [{"in.tar.gz": archive}, {"in.tar": gzip.decompress(archive)}]
    return found


def cifar_folders() -> list[Files]:
    train_images, test = some_images(5, seed=1), some_images(1, seed=2)
    assert planes(test).shape == (1, 3072)
    return [
        {f"in/{name}": content for name, content in batches(train_images, test, write).items()}
        for write in (python_2_batch, python_3_batch)
    ]


def _source() -> Path:
    return next(path for path in sorted(Path(".").iterdir()) if path.name.startswith("in"))


def prepare_source() -> None:
    store = prepare(_source(), "out", progress=False)
    verify(store)


def prepare_known(kind: str) -> None:
    verify(prepare(_source(), "out", kind, progress=False))


def open_source_data() -> None:
    open_data(_source(), progress=False)
    open_data(_source(), progress=False)


def complete_images() -> None:
    """As a prompt."""
    found = open_images(_source())
    found.read(np.arange(min(2, found.count)))


def complete_sound() -> None:
    audio.about(_source())
    for _ in audio.read(_source()):
        pass


def read_store() -> None:
    store = open_store("data")
    verify(store)
    for name in store.splits:
        assert store.split(name)[:1].size
    assert store.to_json()


def _npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def _picture(form: str, channels: int, seed: int = 0) -> bytes:
    pixels = some_images(1, (8, 8, channels), seed)[0]
    file = io.BytesIO()
    Image.fromarray(pixels[:, :, 0] if channels == 1 else pixels).save(file, form)
    return file.getvalue()


def _tone() -> Any:
    return (8000 * np.sin(np.arange(4000) / 9)).astype(np.int16)


def _files() -> Files:
    paths = sorted(path for path in Path(".").rglob("*") if path.is_file() and path.name != ".lock")
    return {path.as_posix(): path.read_bytes() for path in paths}


def made(form: Format) -> list[Files]:
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        return form.seeds()


MODEL_READERS = (read_model, read_model, examine_model)
FILE_READERS = (prepare_source, prepare_source, open_source_data)
IMAGE_READERS = (*FILE_READERS, complete_images)
SOUND_READERS = (*FILE_READERS, complete_sound)
PACKED_READERS = (
    *FILE_READERS,
    partial(prepare_known, "text"),
    partial(prepare_known, "images"),
    partial(prepare_known, "bytes"),
)
RUN_READERS = (open_run, open_checkpoint, resume, run_settings, begin)

FORMATS = {
    "config": Format(model_folder, in_file(mutate_config, "model/config.json"), MODEL_READERS, share=3),
    "run-config": Format(
        run_folder, in_file(mutate_config, "run/config.json"), (open_run, open_run, resume, run_settings, examine_model), share=2
    ),
    "pattern": Format(patterns, in_file(mutate_pattern), (place_pattern, read_pattern, read_pattern), share=2),
    "manifest": Format(stores, in_file(mutate_json, "data/manifest.json"), (read_store, lambda: open_data("data")), share=2),
    "checkpoint-manifest": Format(run_folder, in_file(mutate_json, f"{CHECKPOINT}/manifest.json"), (open_checkpoint, resume)),
    "metrics": Format(run_folder, in_file(mutate_lines, "run/metrics.jsonl"), (metrics, metrics, metrics, resume), share=2),
    "page": Format(page_folders, page_damage, (draw_page, draw_page, draw_curve)),
    "state": Format(
        run_folder, in_file(mutate_json, f"{CHECKPOINT}/state.json"), (resume,), seal_checkpoint, share=2
    ),
    "data-json": Format(run_folder, in_file(mutate_json, "run/data.json"), (open_run, resume, run_settings)),
    "npy": Format(arrays, in_file(layers.mutate_npy), IMAGE_READERS, share=2),
    "npz": Format(archives_of_arrays, in_file(partial(layers.mutate_zip, content=layers.mutate_npy)), IMAGE_READERS, share=3),
    "png": Format(partial(pictures, "PNG", ".png"), in_file(layers.mutate_png), IMAGE_READERS, share=2),
    "jpg": Format(partial(pictures, "JPEG", ".jpg"), in_file(layers.mutate_jpeg), IMAGE_READERS),
    "wav": Format(partial(sounds, *WAVS), in_file(layers.mutate_wav), SOUND_READERS, share=3),
    "flac": Format(partial(sounds, (".flac", "FLAC", "PCM_16"), (".flac", "FLAC", "PCM_24")), in_file(mutate_bytes), SOUND_READERS),
    "ogg": Format(partial(sounds, (".ogg", "OGG", "VORBIS"), (".ogg", "OGG", "OPUS")), in_file(layers.mutate_ogg), SOUND_READERS),
    "mp3": Format(partial(sounds, (".mp3", "MP3", "MPEG_LAYER_III")), in_file(mutate_bytes), SOUND_READERS, share=2),
    "zip": Format(zips, in_file(layers.mutate_zip), PACKED_READERS, share=2),
    "gz": Format(partial(packed, ".gz", partial(gzip.compress, mtime=0)), in_file(layers.mutate_gzip), PACKED_READERS),
    "xz": Format(partial(packed, ".xz", lzma.compress), in_file(layers.mutate_xz), PACKED_READERS),
    "bz2": Format(partial(packed, ".bz2", bz2.compress), in_file(layers.mutate_bzip2), PACKED_READERS),
    "tar": Format(tars, in_file(layers.mutate_tar), IMAGE_READERS, share=3),
    "cifar": Format(cifar_folders, in_file(layers.mutate_pickle), IMAGE_READERS, share=2),
    "safetensors": Format(model_folder, in_file(layers.mutate_tensors, "model/model.safetensors"), (read_model,), share=2),
    "checkpoint": Format(
        run_folder,
        in_file(layers.mutate_tensors, f"{CHECKPOINT}/model.safetensors", f"{CHECKPOINT}/state/part-1.safetensors"),
        (resume, resume, open_checkpoint), seal_checkpoint,
    ),
    "results": Format(results_file, in_file(mutate_json), (add_results,)),
    "settings": Format(settings_file, in_file(mutate_json), (read_settings,)),
    "entries": Format(run_folder, linked, RUN_READERS, share=2),
}  # fmt: skip
