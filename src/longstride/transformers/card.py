"""The model card of a folder for transformers: README.md with the header that the Hub reads, and how to load the model."""

import json
import re
from pathlib import Path

from longstride.common.atomic import atomic_path
from longstride.model.card import PAGE, Card, card_page
from longstride.model.config import ModelConfig

LICENCES = {
    "apache-2.0", "cc-by-2.0", "cc-by-3.0", "cc-by-4.0", "cc-by-nc-4.0", "cc-by-nc-sa-3.0", "cc-by-nc-sa-4.0",
    "cc-by-sa-3.0", "cc-by-sa-4.0", "cc0-1.0", "gpl-3.0", "mit",
}  # fmt: skip
"""Names of licences that the Hub knows, and which we recognise."""
OTHER_NAMES = {"cc0": "cc0-1.0", "apache": "apache-2.0"}
PROMPT = "In 1945"
MOST_NEW = 100
TEXT_EXAMPLE = """from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "."  # This folder, or its name on the Hub.
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
given = tokenizer("{prompt}", return_tensors="pt")
print(tokenizer.decode(model.generate(**given, max_new_tokens={count}, do_sample=True)[0]))"""
BYTES_EXAMPLE = """import torch
from transformers import AutoModelForCausalLM

folder = "."  # This folder, or its name on the Hub.
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
first = torch.tensor([[128]])  # The first byte of the data, which the others follow.
data = bytes(model.generate(first, max_new_tokens={count}, do_sample=True)[0].tolist())"""


def write_page(folder: Path, card: Card, config: ModelConfig) -> None:
    """Writes README.md."""
    with atomic_path(folder / PAGE) as path:
        path.write_text(header(card) + card_page(card, config, _use(card, config)), encoding="utf-8", errors="replace")


def header(card: Card) -> str:
    """Returns the YAML between lines of ---."""
    fields: dict[str, object] = {"library_name": "transformers", "license": _licence(card.licence)}
    if fields["license"] == "other":
        fields["license_name"] = re.sub(r"[^a-z0-9.]+", "-", card.licence.lower()).strip("-") or "own"
    if card.kind == "text":
        fields["pipeline_tag"] = "text-generation"
    fields["tags"] = ["longstride", "sparse-transformer", "byte-level", *filter(None, [card.kind])]
    # Values in JSON are values in YAML.
    return "\n".join(["---", *(f"{name}: {json.dumps(value)}" for name, value in fields.items()), "---", "", ""])


def _licence(given: str) -> str:
    """Returns the Hub's name of a licence: "unknown" if the card has none, "other" if the Hub has no name for it."""
    name = re.sub(r"[\s_]+", "-", given.strip().lower())
    name = OTHER_NAMES.get(name, name)
    return name if name in LICENCES else "other" if name else "unknown"


def _use(card: Card, config: ModelConfig) -> str:
    prompt = PROMPT[: config.context - 2] if card.kind == "text" else "x"
    count = min(MOST_NEW, config.context - 1 - len(prompt))
    example = (TEXT_EXAMPLE if card.kind == "text" else BYTES_EXAMPLE).format(prompt=prompt, count=count)
    rounded = (
        f"The file has the weights in {card.dtype}, rounded from the float32 of training; "
        "`longstride export --dtype float32` does not round. "
        if card.dtype != "float32"
        else ""
    )
    return (
        f"```python\n{example}\n```\n\n"
        "The code in this folder imports longstride: `pip install 'longstride[transformers]'`. `longstride sample` reads "
        f"the folder, too. {rounded}In memory all weights are float32; activations are {config.precision}, or what `dtype` "
        "in `from_pretrained` says."
    )
