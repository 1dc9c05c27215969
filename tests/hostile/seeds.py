"""Small valid files of every format, made on the spot: the same bytes every time."""

import gzip
import io
import json
import tempfile
import wave
import zipfile
from collections.abc import Callable
from contextlib import chdir
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch
from uuid import UUID

import numpy as np
import soundfile
import torch
from PIL import Image
from rich.console import Console

from longstride.attention.kernels import saved
from longstride.data import samples
from longstride.data.store import write_store
from longstride.evaluation.results import Results
from longstride.model import ModelConfig, SparseTransformer
from longstride.training import OptimizerConfig, TrainConfig, run, train
from longstride.training.metrics import read_metrics
from tests.data.small import batches, binary_batch, python_2_batch, python_3_batch, some_images, write_tar
from tests.hostile import containers

Files = dict[str, bytes]
"""The files of a folder by path."""

MODEL = ModelConfig(
    layers=2, width=16, heads=2, context=32, pattern="merged(fixed(8, 2))", embedding="matrix(8)", ff_ratio=2.0
)
PLAN = TrainConfig(
    model=MODEL, data="data", out="run", steps=4, batch=2, log_every=1, validate_every=1, validate_bytes=64, save_every=1,
    keep=1, device="cpu", ema=0.5, optimizer=OptimizerConfig(warmup=1),
)  # fmt: skip
CHECKPOINT = "run/checkpoints/step-2"
ABOUT = {
    "evaluated": "run", "weights_sha256": "0" * 64, "model": asdict(MODEL), "bytes": 300,
    "data": {"path": "data", "kind": "text", "split": "valid", "sha256": "1" * 64},
}  # fmt: skip
QUIET = Console(file=io.StringIO())
TEXT = samples.text()[:3000].tobytes()
WAVS = (
    ("WAV", "PCM_16"), ("WAV", "FLOAT"), ("WAV", "ULAW"), ("WAV", "IMA_ADPCM"), ("WAV", "MS_ADPCM"), ("AU", "PCM_16"),
    ("W64", "PCM_24"), ("CAF", "ALAC_16"), ("AIFF", "PCM_16"), ("RF64", "PCM_16"), ("VOC", "PCM_16"), ("IRCAM", "PCM_16"),
)  # fmt: skip
"""A file named .wav may hold any of these: the library looks at the content."""


def make(seeds: Callable[[], list[Files]]) -> list[Files]:
    """Calls one of the functions below, which write to the current folder."""
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        return seeds()


def run_folder() -> list[Files]:
    """A run that was paused after two of four steps, with its data and all that training leaves."""
    _text_store()
    with patch.object(run, "uuid4", lambda: UUID(int=1)):
        train(PLAN, until=2, console=QUIET)
    # No path and no time is left in it.
    path, rows = Path("run/config.json"), read_metrics("run")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"data": "data"}, indent=2) + "\n")
    lines = [{name: value if name in ("step", "loss") else 1.5 for name, value in row.items()} for row in rows]
    Path("run/metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return [_files()]


def page_folders() -> list[Files]:
    """Runs with samples of each kind."""
    (found,) = run_folder()
    found = {name: content for name, content in found.items() if name.count("/") == 1 and name.startswith("run/")}
    sound = io.BytesIO()
    with wave.open(sound, "wb") as file:
        file.setparams((1, 2, 12_000, 0, "NONE", ""))
        file.writeframes(_tone().tobytes())
    ends = {".txt": TEXT[:500], ".png": _picture("PNG", 3), ".wav": sound.getvalue()}
    return [{**found, f"run/sample-data{end}": content} for end, content in ends.items()]


def model_folders() -> list[Files]:
    torch.manual_seed(0)
    for name, pattern in (("a", "merged(fixed(8, 2))"), ("b", "heads(local(8), column(8))")):
        SparseTransformer(replace(MODEL, pattern=pattern, dropout=0.25)).save_pretrained(f"{name}/model")
    found = _files()
    return [{name[2:]: content for name, content in found.items() if name.startswith(one)} for one in ("a/", "b/")]


def results_file() -> list[Files]:
    for least, bits in ((0, 2.5), (8, 2.25)):
        Results(Path("eval.json"), ABOUT, True, False).add({"min_context": least, "bits_per_byte": bits})
    return [_files()]


def settings_file() -> list[Files]:
    rows = {}
    for key in saved.KEYS.values():
        if key.width == 64 and key.dtype == torch.float16:
            rows[key] = saved.Setting(key.lane or 64, key.lane or 64, 4, 2, 1 if key.lane else 0)
    saved.write(Path("kernels.json"), {"NVIDIA H200": rows})
    return [_files()]


def patterns() -> list[Files]:
    texts = ("interleave(strided(128))", "3*local(96) + column(96)", "heads(local(8), column(8) | block(4))", "dense()")
    return [{"pattern.txt": text.encode()} for text in texts]


def stores() -> list[Files]:
    """Of text, images and sound."""
    _text_store()
    found, images, sound = [_files()], some_images(6, (4, 4, 3)), np.arange(200, dtype=np.uint8)
    write_store("images", "images", {"train": images[:4], "valid": images[4:]}, (4, 4, 3))
    write_store("sound", "audio", {"train": sound, "valid": sound}, (), 12_000)
    for name in ("images", "sound"):
        some = {path: content for path, content in _files().items() if path.startswith(name)}
        found.append({path.replace(name, "data", 1): content for path, content in some.items()})
    return found


def arrays() -> list[Files]:
    images = some_images(6, (4, 4, 3))
    return [{"in.npy": _npy(images)}, {"in.npy": _npy(images[..., 0])}, {"in.npy.gz": gzip.compress(_npy(images), mtime=0)}]


def archives_of_arrays() -> list[Files]:
    images = some_images(8, (4, 4, 3))
    one, several = io.BytesIO(), io.BytesIO()
    np.savez(one, images)
    np.savez_compressed(several, train=images[:4], valid=images[4:6], test=images[6:])
    return [{"in.npz": one.getvalue()}, {"in.npz": several.getvalue()}]


def pictures(form: str, ending: str) -> list[Files]:
    """Folders of coloured and of grey ones."""
    return [{f"in/{number}{ending}": _picture(form, channels, number) for number in range(4)} for channels in (3, 1)]


def sounds(ending: str, *forms: tuple[str, str]) -> list[Files]:
    found = []
    for form, subtype in forms:
        file = io.BytesIO()
        soundfile.write(file, _tone(), 24_000 if form == "MP3" else 16_000, format=form, subtype=subtype)
        found.append({f"in{ending}": containers.timeless(file.getvalue())})
    return found


def packed(ending: str, compress: Callable[[bytes], bytes]) -> list[Files]:
    """Text, sound and an array, compressed."""
    inside = {"in.txt": TEXT, "in.u8": bytes(range(256)) * 4, "in.npy": _npy(some_images(6, (4, 4, 3)))}
    return [{name + ending: compress(content)} for name, content in inside.items()]


def zips() -> list[Files]:
    found = []
    for name, content, method in (("in.txt", TEXT, zipfile.ZIP_DEFLATED), ("a/b.txt", TEXT[:500], zipfile.ZIP_STORED)):
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w", method) as archive:
            archive.writestr(zipfile.ZipInfo(name, containers.DATE), content, method)
        found.append({"in.zip": file.getvalue()})
    return found


def tars() -> list[Files]:
    """CIFAR-10 in its three forms, with few images, compressed and not."""
    found = []
    for write, ending in ((python_2_batch, ""), (python_3_batch, ""), (binary_batch, ".bin")):
        path = write_tar(Path("in.tar.gz"), batches(some_images(5, seed=1), some_images(1, seed=2), write, ending))
        plain = gzip.decompress(path.read_bytes())
        found += [{"in.tar.gz": gzip.compress(plain, mtime=0)}, {"in.tar": plain}]
    return found


def cifar_folders() -> list[Files]:
    found = [batches(some_images(5, seed=1), some_images(1, seed=2), write) for write in (python_2_batch, python_3_batch)]
    return [{f"in/{name}": content for name, content in files.items()} for files in found]


def _text_store() -> None:
    data = np.frombuffer(TEXT, np.uint8)
    write_store("data", "text", {"train": data[:2400], "valid": data[2400:2700], "test": data[2700:]})


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
