"""No kernel reads or writes where it must not, and no two threads do so at once: compute-sanitizer says."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import longstride
from tests.attention.kernels.sanitized import CASES

TOOL = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"


@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available() or not Path(TOOL).exists(), reason="needs a GPU and compute-sanitizer")
@pytest.mark.parametrize("check", ["memcheck", "racecheck"])
def test_no_errors(check):
    ours = [word for name in ("ward", "hopper_d") for word in ("--kernel-name", f"kernel_substring={name}")]
    done = subprocess.run(
        [TOOL, "--tool", check, "--error-exitcode", "9", *ours, sys.executable, Path(__file__).with_name("sanitized.py")],
        env={**os.environ, "TRITON_INTERPRET": "0"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout.count(" done\n") == len(CASES), done.stdout[-3000:] + done.stderr[-3000:]
    assert "SUMMARY" in done.stdout
    if check == "memcheck":
        assert done.returncode == 0, done.stdout[-3000:]
    else:
        places = re.findall(r"access at (\w+)\+\w+ in \S+:(\d+)", done.stdout)
        assert len(places) >= done.stdout.count("Race reported")
        assert [place for place in places if not starts_groups(*place)] == []


def starts_groups(kernel, line):
    """Whether this is where Triton hands work to groups of warps, through a word in shared memory.

    A barrier of the whole program comes between writing and reading it. Racecheck does not see that in kernels whose groups
    also have barriers of their own; a kernel with groups that have none it does not report.
    """
    files = [path.read_text() for path in Path(longstride.__file__).parent.rglob("*.py")]
    (source,) = (text for text in files if f"\ndef {kernel}(\n" in text)
    text = source.splitlines()[int(line) - 1]
    return text.startswith("def ") or "gl.warp_specialize(" in text
