import platform
import subprocess
import sys

import pytest


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs the GNU C library")
def test_freed_memory_is_kept():
    """In a process of its own: the setting cannot be taken back."""
    program = """if True:
        import resource
        import torch
        from longstride.common.device import keep_freed_memory

        def faults():
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            for _ in range(8):
                torch.ones(2**22)
            return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

        before = faults()
        assert keep_freed_memory()
        faults()
        assert 4 * faults() < before
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
