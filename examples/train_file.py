"""Train a small model on a file from Python, and score it.

python examples/train_file.py book.txt --out run --steps 500
"""

import argparse

from longstride import SparseTransformer, bits_per_byte
from longstride.data.prepare import open_data
from longstride.training import train, train_preset


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", help="text, images, sound or a prepared store")
    parser.add_argument("--out", default="run", help="folder of the run")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--layers", type=int, default=4)
    options = parser.parse_args()

    model_changes = {"layers": options.layers}
    config = train_preset("text-small", data=options.data, out=options.out, steps=options.steps, model=model_changes)
    summary = train(config)
    print(f"{summary.step} steps, best validation {summary.best_bits_per_byte:.3f} bits per byte")

    model = SparseTransformer.from_pretrained(options.out)  # the weights of the best validation
    test = open_data(options.data).split("test")
    score = bits_per_byte(model, test, min_context=0)
    print(f"test: {score.bits_per_byte:.3f} bits per byte over {score.bytes:,} bytes")


if __name__ == "__main__":
    main()
