"""Makes the folder of a model that comes with longstride from a finished run: weights in float16, settings and card.

longstride eval RUN --data enwik8 --split valid --min-context 0 2048 --json text-valid.json
python benchmarks/ship.py RUN text --results 'enwik8, validation=text-valid.json' --samples 'Sentences are mostly English.'

It scores a bundled sample on the CPU for the card, so that a test can repeat the figure. TEXTS has what a run does not know:
data, licence and limits.
"""

from argparse import ArgumentParser
from dataclasses import replace
from pathlib import Path

import numpy as np

from longstride.commands.export import export, read_figures
from longstride.data import samples
from longstride.evaluation import bits_per_byte
from longstride.model import SparseTransformer
from longstride.model.card import Figure, write_card
from longstride.model.shipped import NAMES, model_folder

LARGEST = 10_500_000
"""The most bytes of model.safetensors."""
TEXTS: dict[str, dict[str, str]] = {
    "text": {
        "title": "Writes English Wikipedia as enwik8 has it: articles with their markup, byte by byte.",
        "data": "enwik8, its first 90,000,000 bytes. They are the start of the dump of the English Wikipedia of 3 March "
        "2006, by the contributors of its articles (Matt Mahoney, http://mattmahoney.net/dc/textdata.html).",
        "licence": "CC BY-SA 3.0",
        "terms": "The text it learned from is under CC BY-SA 3.0 and the GFDL. The weights are given under CC BY-SA 3.0: "
        "name Wikipedia's contributors and longstride, and pass changed weights on under the same licence.",
        "limits": "It has seen Wikipedia of 2006 alone. What it writes is not true, and may offend. It reads and writes "
        "bytes with the markup of the dump; other text costs it more bits. It follows no instructions.",
    },
    "images32": {
        "title": "Draws images of 32 x 32 pixels as CIFAR-10 has them.",
        "data": "CIFAR-10, 48,000 of its training images. The other 2,000 are for validation. By Alex Krizhevsky, Vinod "
        "Nair and Geoffrey Hinton (2009): a labelled part of the Tiny Images, which were collected from the web.",
        "licence": "research use",
        "terms": "The images were collected from the web for research, without a licence of their own. So the weights are "
        "for research alone, and are not in the package.",
        "limits": "Images of 32 x 32 pixels alone, as rows of RGB bytes. It knows no classes.",
    },
    "piano": {
        "title": "Plays piano: mono sound, 12,000 samples per second, 8-bit mu-law.",
        "data": "Performances of ASAP on a sampled grand piano, 50 minutes. ASAP is by Francesco Foscarin, Andrew McLeod, "
        "Philippe Rigaux, Florent Jacquemard and Masahiko Sakai (https://github.com/fosfrancesco/asap-dataset); the "
        "instrument is the Salamander Grand Piano by Alexander Holm.",
        "licence": "CC BY-NC-SA 4.0",
        "terms": "The performances are under CC BY-NC-SA 4.0, and so are the weights: not for commercial use. They are not "
        "in the package. The samples of the instrument are under CC BY 3.0.",
        "limits": "Synthesised piano alone. Its context is little more than a second: it knows no melody and no form.",
    },
}
CHECKS = {"text": ("unseen-text", 4096), "images32": ("patches", 2 * 3072), "piano": ("piano", 4096)}
"""The bundled sample of each card, and how many of its bytes are scored: two seconds on a core."""


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("--results", nargs="*", default=[], metavar="LABEL=FILE", help="files of longstride eval --json")
    parser.add_argument("--samples", required=True, help="how good samples are")
    parser.add_argument("--command", help="the command that trained it; by default with train.json")
    parser.add_argument("--checkpoint", help="such as step-1000, instead of the best weights")
    parser.add_argument("--precision", default="float32", help="of activations")
    parser.add_argument("--out", type=Path, help="the folder; by default the model's own")
    words = parser.parse_args()
    folder = words.out or model_folder(words.name)
    results = [(label, Path(path)) for label, _, path in (word.rpartition("=") for word in words.results)]
    figures = tuple(replace(figure, data=label) for label, path in results for figure in read_figures(path))
    card = export(words.run, folder, "float16", words.precision, words.checkpoint, force=True)
    if card.size > LARGEST:
        raise SystemExit(f"{folder} has {card.size:,} bytes of weights; at most {LARGEST:,} are shipped")
    model = SparseTransformer.from_pretrained(folder)
    card = replace(
        card,
        name=words.name,
        samples=words.samples,
        command=words.command or card.command,
        figures=figures or card.figures,
        check=score(words.name, model),
        **TEXTS[words.name],
    )
    write_card(folder, card, model.config)
    print(f"wrote {folder}: {card.size:,} bytes of weights")


def score(name: str, model: SparseTransformer) -> Figure:
    """The figure that a test repeats: bits per byte of the first bytes of a bundled sample."""
    sample, count = CHECKS[name]
    data = np.asarray(samples.store(sample).split("valid")[:count])
    return Figure(sample, count, 0, bits_per_byte(model, data).bits_per_byte)


if __name__ == "__main__":
    main()
