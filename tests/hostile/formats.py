"""Every format that the package reads: its valid files, how they are damaged, and what reads them."""

import bz2
import gzip
import json
import lzma
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from longstride.training.manifest import write_manifest
from tests.hostile import containers, readers, seeds
from tests.hostile.mutators import ODD, Mutator, mutate_bytes, mutate_json, mutate_lines, mutate_pattern, pattern_text
from tests.hostile.seeds import CHECKPOINT, WAVS, Files
from tests.hostile.worker import Case

Damage = Callable[[Random, list[Files], Files], Files]
"""Of a generator, all seeds and one of them: the files of a case."""
ENTRIES = (
    "run", "run/config.json", "run/data.json", "run/metrics.jsonl", "run/model.safetensors", "run/launch.txt", "run/.lock",
    "run/run.json", "run/checkpoints", CHECKPOINT, f"{CHECKPOINT}/state.json", f"{CHECKPOINT}/manifest.json",
    f"{CHECKPOINT}/state", f"{CHECKPOINT}/model.safetensors", "data", "data/manifest.json", "data/train.bin",
    "run/curve.png", "run/page.png", "run/.config.1.json", "run/checkpoints/step-3", "run/checkpoints/step-1",
)  # fmt: skip
"""What a run's folder has or may have."""


@dataclass(frozen=True)
class Format:
    seeds: Callable[[], list[Files]]
    """Small folders of valid files."""
    damage: Damage
    readers: tuple[Case, ...]
    """Of which each case is given one; the first can read every seed."""
    finish: Callable[[Random], Any] = lambda rng: None
    """Is called when the files are written, before they are read."""
    share: int = 1
    """How many of all cases it has, in comparison with the others."""


def write_case(form: Format, given: list[Files], rng: Random, number: int, folder: Path) -> Case:
    """Writes a case into the folder, which is the current one, and returns what reads it. The first cases are the seeds as
    they are."""
    whole = number < len(given)
    files = given[number] if whole else form.damage(rng, given, dict(rng.choice(given)))
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    if whole:
        return form.readers[0]
    form.finish(rng)
    return rng.choice(form.readers)


def in_file(mutator: Mutator, *names: str) -> Damage:
    """Changes one of these files, or a seed's first one if none is named."""

    def damage(rng: Random, given: list[Files], files: Files) -> Files:
        name = rng.choice(names or tuple(files)[:1])
        others = [content for seed in given for other, content in seed.items() if Path(other).suffix == Path(name).suffix]
        return files | {name: mutator(rng, files[name], rng.choice(others))}

    return damage


def nowhere(rng: Random, given: list[Files], files: Files) -> Files:
    return files


def in_page(rng: Random, given: list[Files], files: Files) -> Files:
    """Changes the metrics, or a sample that training has left."""
    name = rng.choice([name for name in files if "/sample-" in name] + ["run/metrics.jsonl"])
    how = {
        ".jsonl": mutate_lines, ".png": containers.mutate_png, ".wav": containers.mutate_wav, ".txt": mutate_bytes,
    }  # fmt: skip
    return files | {name: how[Path(name).suffix](rng, files[name], files[name])}


def mutate_config(rng: Random, data: bytes, other: bytes) -> bytes:
    """With patterns and embeddings among the odd values."""
    calls = [f"{name}({size})" for name in ("matrix", "image", "grid") for size in ("1", "10**9", "{[]}", "2**99")]
    texts = [json.dumps(text) for text in (*calls, *(pattern_text(rng) for _ in range(12)))]
    return mutate_json(rng, data, other, [*ODD, *texts, *texts])


def seal_checkpoint(rng: Random) -> None:
    """As its writer would, who may mean harm."""
    write_manifest(Path(CHECKPOINT))


def replace_entry(rng: Random) -> None:
    """A file or folder of the run by a link, a folder, a pipe, a file of 3 GB, or nothing."""
    path, aside = Path(rng.choice(ENTRIES)).absolute(), Path("aside").absolute()
    if path.exists():
        path.rename(aside)
    path.parent.mkdir(parents=True, exist_ok=True)
    match rng.choice(("file", "folder", "dangling", "itself", "moved", "directory", "pipe", "large", "gone")):
        case "file":
            path.symlink_to(Path("../canary.txt").resolve())
        case "folder":
            path.symlink_to(Path("../canary").resolve())
        case "dangling":
            path.symlink_to(Path("../nothing").resolve())
        case "itself":
            path.symlink_to(path.name)
        case "moved":
            path.symlink_to(aside)
        case "directory":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
        case "large":
            path.touch()
            os.truncate(path, 3 << 30)


MODELS = (readers.load_model, readers.load_model, readers.examine_model)
RUNS = (
    readers.open_run, readers.open_checkpoint, readers.resume, readers.resume_or_begin, readers.describe_run, readers.begin,
)  # fmt: skip
FILES = (readers.prepare_source, readers.prepare_source, readers.open_unprepared)
IMAGES, SOUNDS = (*FILES, readers.complete_images), (*FILES, readers.complete_sound)
PACKED = (*FILES, *(partial(readers.prepare_as, kind) for kind in ("text", "images", "bytes")))

FORMATS = {
    "config": Format(seeds.model_folders, in_file(mutate_config, "model/config.json"), MODELS, share=3),
    "run-config": Format(
        seeds.run_folder, in_file(mutate_config, "run/config.json"), (*RUNS, readers.open_run, readers.examine_model),
        share=2,
    ),
    "pattern": Format(
        seeds.patterns, in_file(mutate_pattern), (readers.place_pattern, readers.parse_pattern, readers.parse_pattern),
        share=2,
    ),
    "manifest": Format(
        seeds.stores, in_file(mutate_json, "data/manifest.json"), (readers.check_store, readers.open_prepared), share=2
    ),
    "checkpoint-manifest": Format(
        seeds.run_folder, in_file(mutate_json, f"{CHECKPOINT}/manifest.json"), (readers.open_checkpoint, readers.resume)
    ),
    "run-id": Format(
        seeds.run_folder, in_file(mutate_json, "run/run.json"),
        (readers.resume, readers.open_checkpoint, readers.resume_or_begin),
    ),
    "data-json": Format(
        seeds.run_folder, in_file(mutate_json, "run/data.json"), (readers.open_run, readers.resume, readers.describe_run)
    ),
    "metrics": Format(
        seeds.run_folder, in_file(mutate_lines, "run/metrics.jsonl"),
        (readers.load_metrics, readers.load_metrics, readers.load_metrics, readers.resume), share=2,
    ),
    "page": Format(seeds.page_folders, in_page, (readers.draw_page, readers.draw_page, readers.draw_curve)),
    "state": Format(
        seeds.run_folder, in_file(mutate_json, f"{CHECKPOINT}/state.json"), (readers.resume,), seal_checkpoint, share=2
    ),
    "results": Format(seeds.results_file, in_file(mutate_json), (readers.add_results,)),
    "settings": Format(seeds.settings_file, in_file(mutate_json), (readers.load_settings,)),
    "entries": Format(seeds.run_folder, nowhere, RUNS, replace_entry, share=2),
    "safetensors": Format(
        seeds.model_folders, in_file(containers.mutate_tensors, "model/model.safetensors"), (readers.load_model,), share=2
    ),
    "checkpoint": Format(
        seeds.run_folder,
        in_file(
            containers.mutate_tensors, f"{CHECKPOINT}/model.safetensors", f"{CHECKPOINT}/state/part-1.safetensors",
            "run/model.safetensors",
        ),
        (readers.resume, readers.resume, readers.open_checkpoint, readers.open_run), seal_checkpoint, share=2,
    ),
    "npy": Format(seeds.arrays, in_file(containers.mutate_npy), IMAGES, share=2),
    "npz": Format(
        seeds.archives_of_arrays, in_file(partial(containers.mutate_zip, content=containers.mutate_npy)), IMAGES, share=3
    ),
    "png": Format(partial(seeds.pictures, "PNG", ".png"), in_file(containers.mutate_png), IMAGES, share=2),
    "jpg": Format(partial(seeds.pictures, "JPEG", ".jpg"), in_file(containers.mutate_jpeg), IMAGES),
    "wav": Format(partial(seeds.sounds, ".wav", *WAVS), in_file(containers.mutate_wav), SOUNDS, share=3),
    "flac": Format(
        partial(seeds.sounds, ".flac", ("FLAC", "PCM_16"), ("FLAC", "PCM_24")), in_file(mutate_bytes), SOUNDS
    ),
    "ogg": Format(
        partial(seeds.sounds, ".ogg", ("OGG", "VORBIS"), ("OGG", "OPUS")), in_file(containers.mutate_ogg), SOUNDS
    ),
    "mp3": Format(partial(seeds.sounds, ".mp3", ("MP3", "MPEG_LAYER_III")), in_file(mutate_bytes), SOUNDS, share=2),
    "zip": Format(seeds.zips, in_file(containers.mutate_zip), PACKED, share=2),
    "gz": Format(partial(seeds.packed, ".gz", partial(gzip.compress, mtime=0)), in_file(containers.mutate_gzip), PACKED),
    "xz": Format(partial(seeds.packed, ".xz", lzma.compress), in_file(containers.mutate_xz), PACKED),
    "bz2": Format(partial(seeds.packed, ".bz2", bz2.compress), in_file(containers.mutate_bzip2), PACKED),
    "tar": Format(seeds.tars, in_file(containers.mutate_tar), IMAGES, share=3),
    "cifar": Format(seeds.cifar_folders, in_file(containers.mutate_pickle), IMAGES, share=2),
}  # fmt: skip
