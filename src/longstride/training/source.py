"""Resolves the path of a run, a checkpoint or a saved model to weights and data."""

import shlex
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from longstride.common.files import real_path
from longstride.data import samples
from longstride.data.kind import DataKind
from longstride.data.prepare import ANYTHING, open_data
from longstride.data.store import Store, read_manifest
from longstride.model import ModelConfig
from longstride.model.card import Card, read_card
from longstride.model.saved_config import find_settings, is_run, read_config, read_content
from longstride.model.shipped import find_model
from longstride.training.checkpoint import check_owner
from longstride.training.config import TrainConfig
from longstride.training.manifest import check_manifest, has_manifest
from longstride.training.preflight import check_fits
from longstride.training.run import WEIGHTS, Run, read_id

MOST_LISTED = 8
"""The most checkpoints that a message names."""


@dataclass(frozen=True)
class Source:
    """A run or a saved model, and the weights to use."""

    folder: Path
    weights: Path
    """The folder of the weights: the run, or one of its checkpoints."""
    config: TrainConfig | None
    """The run's config; None for a saved model."""
    card: Card | None = None
    """The card of a saved model, if it has one."""

    @property
    def checkpoint(self) -> str | None:
        """Name of the checkpoint that the weights come from; None for the run's best weights."""
        return self.weights.name if self.weights != self.folder else None

    @property
    def data_kind(self) -> DataKind | None:
        """The kind of a run's data; None if it is not known. A run keeps a copy of its data's manifest: the data itself may
        be gone."""
        path = self.folder / "data.json"
        if self.config is None or not path.is_file():
            return None
        return read_manifest(self.folder, path).data_kind


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= MOST_LISTED else f"{len(names)}, from {names[0]} to {names[-1]}"


def open_source(owner: str, folder: Path, checkpoint: str | None = None) -> Source:
    """Opens a run's best weights, the weights of a checkpoint, whose SHA-256 is checked, or a saved model."""
    path, folder = find_settings(owner, folder), find_model(folder)
    if path != folder / "config.json":
        if checkpoint is not None:
            raise ValueError(f"{owner}: checkpoint = {checkpoint!r}, and {folder} is one; give its run, {path.parent}")
        folder, checkpoint = path.parent, real_path(folder).name
    content = read_content(path)
    if not is_run(content):
        read_config(path)
        if checkpoint is not None:
            raise ValueError(
                f"{owner}: checkpoint = {checkpoint!r} is for runs, and {folder} is a saved model; leave it out"
            )
        return Source(folder, folder, None, read_card(folder))
    config = TrainConfig.from_fields(content, str(path))
    complete = (path for path in (folder / "checkpoints").glob("step-*") if has_manifest(path))
    names = [path.name for path in sorted(complete, key=_step)]
    if checkpoint is not None:
        if checkpoint not in names:
            known = f"it has {_listed(names)}; --keep of train sets how many stay" if names else "it has none yet"
            raise ValueError(f"{owner}: {folder} has no checkpoint {checkpoint!r}; {known}")
        check_manifest(folder / "checkpoints" / checkpoint)
        check_owner(folder / "checkpoints" / checkpoint, read_id(folder))
        return Source(folder, folder / "checkpoints" / checkpoint, config)
    if not (folder / WEIGHTS).is_file():
        hint = f", or give {folder / 'checkpoints' / names[-1]}" if names else ""
        raise ValueError(
            f"{owner}: {folder} has no weights yet: {WEIGHTS} comes with its first validation, "
            f"after step {min(config.validate_every, config.steps)}; wait for it{hint}"
        )
    return Source(folder, folder, config)


@dataclass(frozen=True)
class SourceData:
    """Data for a run or a saved model."""

    path: Path
    """The path that was given, or that of the run's config."""
    store: Store
    is_training_data: bool
    """Whether it has the bytes that the run was trained on."""
    remark: str = ""
    """A line for the user: the data is of another kind than the model's. Empty if it is not, or if that is not known."""


def open_source_data(
    owner: str, source: Source, model: ModelConfig, given: Path | None, open_store: Callable[[Path], Store] = open_data
) -> SourceData:  # fmt: skip
    """Opens the `given` data, or that of the run for None; ValueError if it does not fit the model.

    Without `given`, the data must have the bytes that the run was trained on. A saved model whose card names a bundled
    sample has that, as both train and valid.
    """
    if given is None and source.card is not None and source.card.check is not None:
        path = samples.path(source.card.check.data)
        store = samples.store(source.card.check.data)
    else:
        path = _data_path(owner, source) if given is None else given
        store = open_store(path)
    check_fits(owner, store, model)
    is_its_own = is_training_data(owner, source, store, other_allowed=given is not None)
    return SourceData(path, store, is_its_own, "" if is_its_own else _remark_on_kind(owner, source, store))


def _remark_on_kind(owner: str, source: Source, store: Store) -> str:
    """Bytes may be anything, and anything may be bytes."""
    with suppress(ValueError):  # The data.json of a run is not needed for other data.
        known = source.data_kind
        kind = known.name if known else source.card.kind if source.card else ANYTHING
        if kind != store.kind and ANYTHING not in (kind, store.kind):
            return (
                f"{owner}: {store.shown} has {store.data_kind.describe()}, and the model was trained on {kind}; give other "
                "--data unless you mean this"
            )
    return ""


def _data_path(owner: str, source: Source) -> Path:
    """Returns the path of the data that a run was trained on."""
    if source.config is None:
        raise ValueError(f"{owner}: --data must be given: {source.folder} is a saved model, which does not name its data")
    data = Path(source.config.data).expanduser()
    if not data.exists():
        raise ValueError(f"{owner}: {data}, which {source.folder} was trained on, is not here; give --data")
    return data


def is_training_data(owner: str, source: Source, store: Store, other_allowed: bool) -> bool:
    """Whether the store has the bytes that the run was trained on. Other bytes are an error unless `other_allowed`."""
    if source.config is None:
        return False
    try:
        split = Run(source.folder).changed_split(store)
    except ValueError as error:
        if not other_allowed:
            raise ValueError(f"{owner}: {str(error).removeprefix('train: ')}") from None
        return False
    if split is not None and not other_allowed:
        raise ValueError(
            f"{owner}: {store.shown} has other bytes in {split} than when {source.folder} began; bring them back from a "
            f"copy, or add --data {shlex.quote(str(store.shown))} to use it as it is"
        )
    return split is None


def _step(folder: Path) -> tuple[int, str]:
    step = folder.name.removeprefix("step-")
    return int(step) if step.isdecimal() else -1, step
