"""longstride export"""

from pathlib import Path
from typing import Annotated, Literal

import tyro

from longstride.model.config import Precision

ORDER = 95
Format = Literal["longstride", "transformers"]
Dtype = Literal["float16", "bfloat16", "float32"]


def main(
    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_OR_MODEL")],
    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")],
    dtype: Dtype = "float16",
    precision: Precision | None = None,
    checkpoint: str | None = None,
    results: tuple[Path, ...] = (),
    force: bool = False,
    format: Format = "longstride",
) -> None:
    """Write a run's best weights as a small saved model with a card. Example: longstride export RUN my-model

    The folder stands wherever a run does: longstride sample my-model. It has config.json, model.safetensors, train.json (the
    run's settings, for train --config), and the card: card.json, and README.md to read and to complete.

    Args:
        run: A run, one of its checkpoints, or a saved model.
        folder: The folder to write; it must be new or empty.
        dtype: Dtype of the weights in the file; half precision halves it. A model always computes with float32 weights.
        precision: Dtype of the activations that the model asks for; by default the run's.
        checkpoint: A checkpoint of the run, such as step-1000, instead of its best weights.
        results: Files of longstride eval --json, for the card; by default those in the run.
        force: Replace the files of a saved model in the folder.
        format: transformers adds what AutoModelForCausalLM and AutoTokenizer of Hugging Face need (docs/transformers.md).
    """
    from longstride.model.saved_config import find_settings

    find_settings("export", run)

    from longstride.commands.export import export

    card = export(run, folder, dtype, precision, checkpoint, results, force, format)
    print(f"wrote {folder}: {card.parameters:,} weights in {card.dtype}, {card.size:,} bytes")
