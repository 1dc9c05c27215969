"""The kind of data that a model's bytes are: text, images of some shape, sound at some rate."""

from dataclasses import dataclass

from longstride.data.audio import RATE
from longstride.data.images import MODES, shape_text
from longstride.data.store import read_manifest
from longstride.model import ModelConfig
from longstride.sampling.request import OWNER
from longstride.training.source import Source


@dataclass(frozen=True)
class Subject:
    kind: str
    item: tuple[int, ...] = ()
    """Height, width and channels of an image."""
    rate: int = RATE
    """Samples a second, of audio."""


def find_subject(source: Source, config: ModelConfig, kind: str | None) -> Subject:
    """As the run's data was, or as the embedding has it; `kind`, if given, counts more than either."""
    known = _of_run(source) or _of_embedding(config)
    found = kind or (known.kind if known else None)
    if found is None:
        raise ValueError(f"{OWNER}: {source.folder} does not say what its bytes are; give --kind text, audio or bytes")
    if found != "images":
        return Subject(found, rate=known.rate if known else RATE)
    shape = (known.item if known else ()) or config.positions.sizes
    if len(shape) != 3:
        raise ValueError(
            f"{OWNER}: kind = 'images', and neither the run's data nor the embedding {config.embedding!r} says how large "
            "they are; give another --kind"
        )
    if shape[2] not in MODES:
        raise ValueError(f"{OWNER}: a PNG cannot have {shape[2]} channels ({shape_text(shape)}); give --kind bytes")
    return Subject("images", shape)


def _of_run(source: Source) -> Subject | None:
    """The run keeps a manifest of its data, which may be gone itself."""
    path = source.folder / "data.json"
    if source.config is None or not path.is_file():
        return None
    store = read_manifest(source.folder, path)
    return Subject(store.kind, store.item, store.rate or RATE)


def _of_embedding(config: ModelConfig) -> Subject | None:
    sizes = config.positions.sizes
    return Subject("images", sizes) if len(sizes) == 3 else None
