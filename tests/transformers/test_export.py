"""longstride export RUN FOLDER --format transformers"""

import importlib.util

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import longstride.transformers  # noqa: F401  # Registers the classes.
from longstride.commands.main import main
from longstride.model import SparseTransformer
from longstride.training import train
from tests.training.small import config

PROMPT = "In 1945"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("export")
    train(config(folder, model={"dropout": 0.0}, steps=4))
    return folder / "run"


def test_an_exported_run_is_a_model_of_both(run, tmp_path, capsys):
    folder = tmp_path / "mine"
    main(["export", str(run), str(folder), "--format", "transformers"])
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ours = SparseTransformer.from_pretrained(folder)
    assert model.network.config == ours.config
    for name, x in SparseTransformer.from_pretrained(run).state_dict().items():
        assert torch.equal(model.state_dict()[name], x.half().float())
        assert torch.equal(ours.state_dict()[name], x.half().float())
    capsys.readouterr()
    main(["sample", str(folder), "--prompt", PROMPT, "--length", "12", "--top-k", "1", "--out", str(tmp_path / "out.txt")])
    given = tokenizer(PROMPT, return_tensors="pt")
    found = model.generate(**given, max_new_tokens=12, do_sample=False)[0]
    assert bytes(found.tolist()) == (tmp_path / "out.txt").read_bytes()


def test_an_export_is_exported_again_in_either_format(run, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    main(["export", str(run), str(first), "--format", "transformers"])
    main(["export", str(first), str(second)])
    assert not (second / "longstride_code.py").exists()
    main(["export", str(run), str(first), "--force"])
    assert {path.name for path in first.iterdir()} == {path.name for path in second.iterdir()} | {"train.json"}


def test_the_example_of_the_card_runs(run, tmp_path, monkeypatch, capsys):
    """As a reader runs it: the lines of README.md, in the folder."""
    folder = tmp_path / "mine"
    main(["export", str(run), str(folder), "--format", "transformers"])
    page = (folder / "README.md").read_text()
    assert "weights in float16, rounded from the float32 of training" in page
    assert "activations are float32" in page
    monkeypatch.chdir(folder)
    example = page.split("```python\n")[1].split("```")[0].replace(", trust_remote_code=True", "")  # It is registered here.
    assert "trust_remote_code" in page
    capsys.readouterr()
    exec(compile(example, "README.md", "exec"), {})
    assert capsys.readouterr().out.startswith(PROMPT)


def test_it_needs_transformers(run, tmp_path, monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "transformers" else find(name))
    with pytest.raises(SystemExit) as ending:
        main(["export", str(run), str(tmp_path / "mine"), "--format", "transformers"])
    assert ending.value.code == 2
    assert "format = 'transformers' needs transformers: pip install" in capsys.readouterr().err
    assert not (tmp_path / "mine").exists()
