"""longstride reproduce"""

from typing import Annotated

import tyro

from longstride.commands.reproduce.settings import ExperimentName, Reproduction

ORDER = 128


def main(
    experiment: Annotated[ExperimentName, tyro.conf.Positional, tyro.conf.arg(metavar="EXPERIMENT")],
    settings: Annotated[Reproduction, tyro.conf.arg(name="")],
) -> None:
    """Run the paper's experiments again. Example: longstride reproduce table2 --data enwik8 cifar10 --out table2

    table2: dense, fixed and strided attention on text and images, at equal bytes and at equal seconds.
    table3: bits per byte of a text network by least context.
    table4: 152 million parameters at contexts up to 1,048,576 in 16 GB.
    contest: enwik8 in seven minutes, at a context of 8,192, beside a dense network at 1,024.
    contest-25: enwik8 in 25 minutes, with dropout.
    ablations: initial weights, ratio of interleaving, merged heads, sub-blocks, c, stride, and 128 and 256 layers.

    To see it work on a CPU: longstride reproduce table2 --scale tiny --out tiny

    Args:
        experiment: table2, table3, table4, contest, contest-25 or ablations.
    """
    from longstride.commands.reproduce.checks import check_settings

    check_settings(experiment, settings)

    from longstride.commands.reproduce.show import run

    run(experiment, settings)
