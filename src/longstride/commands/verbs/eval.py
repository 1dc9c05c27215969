"""longstride eval"""

from pathlib import Path
from typing import Annotated

import tyro

from longstride.commands.exits import is_only_process
from longstride.model.config import Precision

ORDER = 80


def main(
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
        folder: A run, of which the best weights are used, one of its checkpoints, a saved model, or the name of a model that
            comes with longstride, such as text; longstride models lists them.
        data: A prepared store, or a source; by default the data that the run was trained on, or the bundled sample that the
            model's card names.
        split: train, valid or test.
        min_context: The least bytes before each scored byte, except in the first window; one row of the table for each. It
            costs n / (n - min context) times as much, for a context of n. For images 0.
        checkpoint: A checkpoint of the run, such as step-1000, instead of its best weights.
        batch: Windows in a batch; by default as many as have 65,536 bytes. It changes only rounding.
        device: cpu, cuda or cuda:1; auto is the GPU if there is one.
        precision: Dtype of the activations; by default the model's own.
        most_bytes: Score only this many bytes, from the first on.
        json: The file for the results, with all they depend on; by default eval-SPLIT.json in the run, if the data is its
            own. Rows of the same evaluation stay in the file.
        force: Replace a file of another evaluation.
    """
    from longstride.common.checks import whole_number
    from longstride.common.files import check_source
    from longstride.model.saved_config import find_settings

    find_settings("eval", folder)
    if data is not None and is_only_process():
        check_source(data)
    for name, value in (("batch", batch), ("most_bytes", most_bytes)):
        if value is not None:
            whole_number("eval", name, value, 1)

    from longstride.commands.evaluate import evaluate as run

    run(folder, data, split, min_context, checkpoint, batch, device, precision, most_bytes, json, force)
