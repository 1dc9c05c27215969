"""A saved folder in a process that has not imported longstride.transformers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from longstride.transformers import ByteTokenizer, LongstrideConfig, LongstrideForCausalLM
from longstride.transformers.config import AUTO_MAP
from tests.transformers.small import wrapped

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
assert "longstride" not in sys.modules
folder = sys.argv[1]
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
given = tokenizer(bytes(range(65, 76)).decode(), return_tensors="pt")
torch.save((type(model).__module__, model.generate(**given, max_new_tokens=20, do_sample=False)), sys.argv[2])
"""


def run_python(*words, tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "HF_HOME": str(tmp_path / "hub"), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", *map(str, words)], check=True, env=environment, cwd=tmp_path)


@pytest.mark.slow
def test_others_load_it_with_trust_remote_code(tmp_path):
    folder, out, model = tmp_path / "model", tmp_path / "out.pt", wrapped()
    LongstrideForCausalLM.register_for_auto_class()
    model.save_pretrained(folder)
    ByteTokenizer().save_pretrained(folder)
    run_python(SCRIPT, folder, out, tmp_path=tmp_path)
    module, found = torch.load(out)
    assert module == "longstride.transformers.model"
    given = torch.arange(65, 76)[None]
    assert torch.equal(
        found, model.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=20, do_sample=False)
    )


MINE = """
from longstride.transformers import LongstrideConfig, LongstrideForCausalLM
class MyConfig(LongstrideConfig):
    model_type = "mine"
class Mine(LongstrideForCausalLM):
    config_class = MyConfig
"""
SAVE = """
import sys
from mine import Mine, MyConfig
from longstride.transformers import LongstrideForCausalLM
model = LongstrideForCausalLM.from_pretrained(sys.argv[1])
made = Mine(MyConfig(model=model.config.model))
made.load_state_dict(model.state_dict())
MyConfig.register_for_auto_class()
Mine.register_for_auto_class()
made.save_pretrained(sys.argv[2])
"""
LOAD = """
import sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True).eval()
torch.save((type(model).__name__, type(model.config).__name__, model(torch.arange(65, 76)[None]).logits), sys.argv[2])
"""


@pytest.mark.slow
def test_a_subclass_with_its_own_model_type_loads(tmp_path):
    model, folder = wrapped(), tmp_path / "model"
    model.save_pretrained(folder)
    (tmp_path / "mine.py").write_text(MINE)
    run_python(SAVE, folder, tmp_path / "saved", tmp_path=tmp_path)
    (tmp_path / "mine.py").unlink()
    run_python(LOAD, tmp_path / "saved", tmp_path / "out.pt", tmp_path=tmp_path)
    kind, config, logits = torch.load(tmp_path / "out.pt")
    assert (kind, config) == ("Mine", "MyConfig")
    assert torch.equal(logits, model(torch.arange(65, 76)[None]).logits)


def test_a_subclass_that_would_load_as_ours_is_refused(tmp_path):
    class Mine(LongstrideForCausalLM):
        pass

    with pytest.raises(ValueError, match=r"Mine: folders with model_type = 'longstride' load as.* set Mine.config_class to"):
        Mine.register_for_auto_class()


def test_our_own_classes_copy_no_code(tmp_path):
    model = wrapped()
    for kind in (LongstrideConfig, LongstrideForCausalLM, ByteTokenizer):
        kind.register_for_auto_class()
    model.save_pretrained(tmp_path)
    ByteTokenizer().save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.glob("*.py")] == ["longstride_code.py"]
    assert json.loads((tmp_path / "config.json").read_text())["auto_map"] == AUTO_MAP


@pytest.mark.slow
def test_importing_longstride_imports_no_transformers(tmp_path):
    script = "import sys, longstride; from longstride import attend, SparseTransformer, generate; "
    run_python(script + "sys.exit('transformers' in sys.modules)", tmp_path=tmp_path)
