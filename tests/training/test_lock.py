import errno
import os
import resource
import subprocess
import sys

import pytest

from longstride.training import lock, train
from longstride.training.lock import Lock
from tests.training.saved import names
from tests.training.small import config

HOLDER = "import pathlib, runpy, sys; held = runpy.run_path(sys.argv[1])['Lock'](pathlib.Path(sys.argv[2]))"
"""By the file alone, which takes a moment; what is around it imports PyTorch."""


def test_one_at_a_time(tmp_path):
    first = Lock(tmp_path / "a/run")
    for _ in range(2):
        with pytest.raises(ValueError, match=rf"a/run is in use by process {os.getpid()} on .+; wait for it"):
            Lock(tmp_path / "a/run")
    Lock(tmp_path / "b/run").release()
    first.release()
    Lock(tmp_path / "a/run").release()


def test_it_goes_when_its_process_is_killed(tmp_path):
    code = f"{HOLDER}; print('held', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code, lock.__file__, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:  # fmt: skip
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(ValueError, match=rf"is in use by process {holder.pid} on "):
            Lock(tmp_path)
        holder.kill()
    Lock(tmp_path).release()


def test_it_goes_when_it_is_forgotten(tmp_path):
    Lock(tmp_path)
    Lock(tmp_path).release()


def test_the_name_is_that_of_the_last_holder(tmp_path):
    """Of a longer name that was there before, nothing is left."""
    (tmp_path / ".lock").write_text("process 123456789123456789 on a machine with a long name\n")
    held = Lock(tmp_path)
    assert (tmp_path / ".lock").read_text().split(" on ")[0] == f"process {os.getpid()}"
    assert (tmp_path / ".lock").read_text().count("\n") == 1
    held.release()


def test_a_file_system_without_locks_is_not_called_in_use(tmp_path, monkeypatch):
    def none(*arguments):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(lock.fcntl, "flock", none)
    with pytest.raises(OSError, match="cannot be locked: Function not implemented"):
        Lock(tmp_path)


def test_a_full_disk_is_named(tmp_path):
    """By a limit on the size of files, as in test_full_disk.py."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        with pytest.raises(OSError, match="File too large") as error:
            Lock(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert error.value.filename == str(tmp_path / ".lock")


def test_a_second_run_is_kept_out(tmp_path):
    made = config(tmp_path, steps=4, validate_every=4)
    held = Lock(tmp_path / "run")
    with pytest.raises(ValueError, match="is in use by"):
        train(made)
    assert names(tmp_path / "run") == [".lock"]
    held.release()
    assert train(made, until=2).step == 2
    held = Lock(tmp_path / "run")
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match=rf"run is in use by process {os.getpid()}"):
        train(made, resume=True)
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before
    held.release()
    assert train(made, resume=True).step == 4
    Lock(tmp_path / "run").release()  # A run that has ended keeps nobody out.
