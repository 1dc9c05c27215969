from dataclasses import replace

import pytest
import torch
from huggingface_hub import ModelCard

from longstride.model.card import Card
from longstride.transformers import ByteTokenizer
from longstride.transformers.card import write_page
from tests.model import small
from tests.transformers.small import wrapped

CARD = Card("mine", "text", licence="CC BY-NC-SA 4.0", dtype="float16")


def read(folder, card):
    write_page(folder, card, small.config())
    return ModelCard.load(folder / "README.md")


def test_the_hub_reads_the_header(tmp_path):
    data = read(tmp_path, CARD).data.to_dict()
    assert data == {
        "library_name": "transformers", "license": "cc-by-nc-sa-4.0", "pipeline_tag": "text-generation",
        "tags": ["longstride", "sparse-transformer", "byte-level", "text"],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("", {"license": "unknown"}),
        ("MIT", {"license": "mit"}),
        ("CC0", {"license": "cc0-1.0"}),
        ("research use", {"license": "other", "license_name": "research-use"}),
        ("mine\n---\nlicense: mit", {"license": "other", "license_name": "mine-license-mit"}),
        ("§", {"license": "other", "license_name": "own"}),
    ],
)
def test_licences_have_the_names_of_the_hub(tmp_path, given, expected):
    data = read(tmp_path, replace(CARD, licence=given)).data.to_dict()
    assert {name: value for name, value in data.items() if name.startswith("license")} == expected


def test_only_text_generates_text(tmp_path):
    card = read(tmp_path, replace(CARD, kind="image: x\n---"))
    assert card.data.pipeline_tag is None
    assert card.data.tags[-1] == "image: x\n---"


@pytest.mark.parametrize("kind", ["text", "images"])
def test_the_example_runs(tmp_path, monkeypatch, kind):
    model = wrapped()
    model.save_pretrained(tmp_path)
    ByteTokenizer().save_pretrained(tmp_path)
    write_page(tmp_path, replace(CARD, kind=kind), model.network.config)
    page = (tmp_path / "README.md").read_text()
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names = {}
    exec(
        compile(page.split("```python\n")[1].split("```")[0].replace(", trust_remote_code=True", ""), "page", "exec"), names
    )
    assert names["folder"] == "."
    if kind == "images":
        assert len(names["data"]) == 39  # The most that the context allows.


def test_float16_is_explained(tmp_path):
    assert "weights in float16, rounded from the float32 of training" in read(tmp_path, CARD).text
    assert "rounded" not in read(tmp_path, replace(CARD, dtype="float32")).text


def test_data_whose_name_is_no_text(tmp_path):
    assert "a?.txt: bytes in order" in read(tmp_path, replace(CARD, data="a\udcff.txt: bytes in order")).text
