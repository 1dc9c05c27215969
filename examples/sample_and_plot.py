"""Sample from a run and draw its loss and its patterns, as in a notebook: each `# %%` is a cell.

python examples/sample_and_plot.py run
"""

# %%
import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt

from longstride import SparseTransformer, generate

run = Path(sys.argv[1])
model = SparseTransformer.from_pretrained(run)
print(f"{model.config.layers} layers, {model.config.parameters:,} parameters, pattern {model.config.pattern}")

# %% Sample: each iteration yields the new bytes of every prompt.
texts = [b"The history of ", b"In 1945"]
for new in generate(model, texts, length=100, temperature=0.8, seed=1):
    texts = [text + some for text, some in zip(texts, new)]
for text in texts:
    print(text.decode("utf-8", "replace"))

# %% Plot the training loss, and what the first head of the first block sees.
lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
losses = [(line["step"], line["bits_per_byte"]) for line in lines if "bits_per_byte" in line]
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4))
left.plot(*zip(*losses), marker=".")
left.set(xlabel="step", ylabel="bits per byte")
right.imshow(model.config.patterns(0)[0].mask(128).numpy(), cmap="Blues")
right.set(xlabel="key", ylabel="query")
figure.savefig("sample_and_plot.png")
