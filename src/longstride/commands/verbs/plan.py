"""longstride plan"""

from typing import Annotated, Any, Literal

import tyro

ORDER = 35


def main(
    preset: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PRESET")],
    gpu_memory: str = "",
    host_memory: str = "",
    context: int | None = None,
    batch: int | None = None,
    pattern: str | None = None,
    embedding: str | None = None,
    recompute: str = "auto",
    optimizer: Literal["adamw", "muon", "adafactor"] | None = None,
    compile: bool = False,
) -> None:
    """What fits into a GPU, and what a training step takes. Example: longstride plan enwik8 --gpu-memory 16GB

    Prints what to recompute in each block, for all ways to divide the batch, with predicted memory and time. The row
    marked as chosen is what longstride train does with the same --gpu-memory. If only a shorter context fits, its row; if
    none does, an error.

    Args:
        preset: The preset to train; its other settings are those of longstride train.
        gpu_memory: Memory of the GPU, such as 16GB or 80GiB; by default that of the GPU of this machine.
        host_memory: Memory of the host for inputs of blocks; by default what this machine has free.
        context: The longest sequence, in bytes.
        batch: Sequences per step.
        pattern: The pattern of each block and head, such as 'interleave(strided(1024))'.
        embedding: Position embedding, such as 'matrix(1024)'.
        recompute: off, selective, on, parts, host, or a sum such as '10*off + 20*on', to see what it takes; auto chooses.
        optimizer: The optimizer; by default the preset's.
        compile: Estimate times of compiled blocks.
    """
    from longstride.common.checks import size_in_bytes
    from longstride.training.presets import train_preset

    model = {"context": context, "pattern": pattern, "embedding": embedding, "recompute": recompute}
    changes: dict[str, Any] = {
        "compile": compile,
        "model": {name: value for name, value in model.items() if value is not None},
    }
    if batch is not None:
        changes |= {"batch": batch, "accumulate": 1}
    if optimizer is not None:
        changes["optimizer"] = {"name": optimizer}
    try:
        config = train_preset(preset, **changes)
    except ValueError as error:
        raise ValueError(f"plan: {str(error).removeprefix('config: ').removeprefix('train: ')}") from None
    host = size_in_bytes("plan", "host_memory", host_memory) if host_memory else None
    memory = size_in_bytes("plan", "gpu_memory", gpu_memory) if gpu_memory else None

    from longstride.commands.plan import show

    show(preset, config, memory, host, given=gpu_memory)
