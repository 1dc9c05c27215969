"""SampleFormat: what a model's bytes are, so that samples can be written as text, images or sound."""

from dataclasses import dataclass

from longstride.data.audio import RATE
from longstride.data.images import MODES, shape_text
from longstride.data.store import read_manifest
from longstride.model import ModelConfig
from longstride.sampling.request import OWNER
from longstride.training.source import Source


@dataclass(frozen=True)
class SampleFormat:
    kind: str
    """text, images, audio or bytes."""
    item: tuple[int, ...] = ()
    """Height, width and channels of an image."""
    rate: int = RATE
    """Sample rate of audio."""


def find_format(source: Source, config: ModelConfig, kind: str | None) -> SampleFormat:
    """Returns the format of a model's bytes: `kind` if given, otherwise that of the run's data or of the embedding."""
    known = _format_of_run(source) or _format_of_embedding(config)
    kind = kind or (known.kind if known else None)
    if kind is None:
        raise ValueError(f"{OWNER}: {source.folder} does not say what its bytes are; give --kind text, audio or bytes")
    if kind != "images":
        return SampleFormat(kind, rate=known.rate if known else RATE)
    shape = (known.item if known else ()) or config.positions.sizes
    if len(shape) != 3:
        raise ValueError(
            f"{OWNER}: kind = 'images', and neither the run's data nor the embedding {config.embedding!r} says how large "
            "they are; give another --kind"
        )
    if shape[2] not in MODES:
        raise ValueError(f"{OWNER}: a PNG cannot have {shape[2]} channels ({shape_text(shape)}); give --kind bytes")
    return SampleFormat("images", shape)


def _format_of_run(source: Source) -> SampleFormat | None:
    """Reads the run's copy of the data's manifest; the data itself may be gone."""
    path = source.folder / "data.json"
    if source.config is None or not path.is_file():
        return None
    store = read_manifest(source.folder, path)
    return SampleFormat(store.kind, store.item, store.rate or RATE)


def _format_of_embedding(config: ModelConfig) -> SampleFormat | None:
    sizes = config.positions.sizes
    return SampleFormat("images", sizes) if len(sizes) == 3 else None
