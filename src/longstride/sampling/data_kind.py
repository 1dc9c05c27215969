"""Finds the kind of data that a model generates, with the shape or the rate of its samples."""

from longstride.data.kind import DataKind
from longstride.data.kinds import KINDS, all_kinds, kind_class
from longstride.model import ModelConfig
from longstride.sampling.request import OWNER
from longstride.training.source import Source


def find_data_kind(source: Source, config: ModelConfig, name: str | None) -> DataKind:
    """Returns the kind of that name; without a name, that of the run's data, of the model's card, or the one the embedding
    is for."""
    sizes = config.positions.sizes
    known = source.data_kind or next(
        (kind(item) for kind in all_kinds() if (item := kind.item_of_model(sizes))), None
    )  # fmt: skip
    name = name or (known.name if known else None) or (source.card.kind if source.card else None)
    if name is None:
        streams = [kind.name for kind in all_kinds() if not kind.has_items]
        raise ValueError(
            f"{OWNER}: {source.folder} does not say what its bytes are; give --kind "
            f"{', '.join(streams[:-1])} or {streams[-1]}"
        )
    if name not in KINDS:
        raise ValueError(f"{OWNER}: kind must be one of {', '.join(KINDS)}, got {name!r}")
    return kind_class(name).of_model(OWNER, known, sizes, config.embedding)
