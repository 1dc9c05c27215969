"""A saved folder in a process that has not imported longstride.transformers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from longstride.transformers import ByteTokenizer, LongstrideForCausalLM
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


@pytest.mark.slow
def test_importing_longstride_imports_no_transformers(tmp_path):
    script = "import sys, longstride; from longstride import attend, SparseTransformer, generate; "
    run_python(script + "sys.exit('transformers' in sys.modules)", tmp_path=tmp_path)
