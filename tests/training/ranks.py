"""Processes that train together, as torchrun would start them, with a limit on their time.

They are forked from one that has imported everything, so that a start takes a moment and not seconds.
"""

import faulthandler
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import connection, get_context
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

import pytest
import torch
from torch.distributed import TCPStore

PROCESSES = get_context("forkserver")
PROCESSES.set_forkserver_preload(["__main__", "tests.training.worker", "torch._dynamo", "longstride.pictures.patterns"])
KILLED = -9
GRACE = 10
"""Seconds over the limit in which a process that hangs may say where."""


class Done(NamedTuple):
    code: int
    found: Any
    """What `work` returned, if it did."""
    out: str
    err: str


def start(
    work: Callable[..., Any], *given: Any, ranks: int = 2, limit: float = 90, may_die: bool = False, code: int = 0
) -> list[Done]:  # fmt: skip
    """work(*given) in so many processes, by rank; alone it has no group. What it returns must be JSON.

    All must end with `code`. When one does not, the others are killed, as by torchrun, and the test fails, unless one may
    die and was killed: how the others end that miss it is not looked at.
    """
    with tempfile.TemporaryDirectory() as folder:
        store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        paths = [Path(folder) / str(rank) for rank in range(ranks)]
        started = []
        for rank, path in enumerate(paths):
            path.mkdir()
            group = _group(rank, ranks, store.port) if ranks > 1 else {}
            started.append(PROCESSES.Process(target=_work, args=(work, given, group, path, limit)))
            started[-1].start()
        codes = _wait(started, limit + GRACE, code)
        found = [_read(path, one.exitcode) for path, one in zip(paths, started)]
    if codes != [code] * ranks and not (may_die and KILLED in codes):
        pytest.fail("\n".join(f"rank {rank}, code {one.code}:\n{one.out}{one.err}" for rank, one in enumerate(found)))
    return found


def torchrun(*words: str, ranks: int = 2, limit: float = 120) -> None:
    """A module and its arguments, by torchrun itself, which starts all processes anew up to two times."""
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    with tempfile.TemporaryFile("w+") as output:
        started = subprocess.Popen(
            [*run, "--max-restarts", "2", "-m", *words], stdout=output, stderr=output, start_new_session=True
        )  # fmt: skip
        try:
            code = started.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(started.pid, signal.SIGKILL)
            started.wait()
        if code != 0:
            output.seek(0)
            pytest.fail(f"torchrun, code {code}:\n{output.read()}")


def _wait(started: list[Any], limit: float, code: int) -> list[int]:
    """The codes of those that end by themselves: all, or up to one that is not as wanted. None is left, whatever happens."""
    end, codes = monotonic() + limit, []
    running = {one.sentinel: one for one in started}
    try:
        while running:
            ended = [running.pop(sentinel) for sentinel in connection.wait(running, max(0, end - monotonic()))]
            for one in ended:
                one.join()
            codes += [one.exitcode for one in ended]
            if not ended or set(codes) != {code}:
                break
    finally:
        for one in started:
            one.kill()
            one.join()
    return codes


def _read(path: Path, code: int) -> Done:
    found = path / "found.json"
    texts = ((path / name).read_text() if (path / name).exists() else "" for name in ("out", "err"))
    return Done(code, json.loads(found.read_text()) if found.exists() else None, *texts)


def _group(rank: int, ranks: int, port: int) -> dict[str, str]:
    """What torchrun sets. The store is the test's, as it would be torchrun's: no two tests meet on a port."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def _work(work: Callable[..., Any], given: tuple[Any, ...], group: dict[str, str], path: Path, limit: float) -> None:
    for name, stream in (("out", sys.stdout), ("err", sys.stderr)):
        os.dup2(os.open(path / name, os.O_CREAT | os.O_WRONLY | os.O_APPEND), stream.fileno())
    faulthandler.dump_traceback_later(limit, exit=True)
    os.environ.update(group)
    torch.set_num_threads(1)
    found = work(*given)
    (path / "found.json").write_text(json.dumps(found))
    faulthandler.cancel_dump_traceback_later()
