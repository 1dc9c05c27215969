"""longstride eval"""

from pathlib import Path
from typing import Annotated, Literal

import tyro

Precision = Literal["float32", "bfloat16", "float16", "float64"]


def evaluate(
    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_OR_MODEL")],
    data: Path | None = None,
    split: str = "valid",
    min_context: tuple[int, ...] = (0,),
    checkpoint: str | None = None,
    batch: int | None = None,
    device: str = "auto",
    precision: Precision | None = None,
    most_bytes: int | None = None,
    json: Path | None = None,
    force: bool = False,
) -> None:
    """Bits per byte of a split, every byte scored once. Example: longstride eval RUN --split test --min-context 0 256

    Args:
        folder: A run, whose best weights are taken, one of its checkpoints, or a saved model.
        data: A prepared store, or a source; left out, what the run was trained on.
        split: train, valid or test.
        min_context: Bytes that each scored byte has before it at least, those of the first window aside; a row of the
            table for each. More cost n / (n - min context) times as much, for a context of n. For images 0.
        checkpoint: One of the run's, such as step-1000, instead of its best weights.
        batch: Windows at a time; left out, as many as have 65,536 bytes. It changes nothing but rounding.
        device: Auto is the GPU if there is one.
        precision: Of activations; left out, what the model has.
        most_bytes: Score the first so many bytes only.
        json: The file for the results, with all they depend on. Left out: eval-SPLIT.json in the run, if the data is its
            own. Rows of the same evaluation that are there already stay.
        force: A file that has something else may be replaced.
    """
    from longstride.commands.evaluate import evaluate as run

    run(folder, data, split, min_context, checkpoint, batch, device, precision, most_bytes, json, force)
