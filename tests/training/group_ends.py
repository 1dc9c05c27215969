"""How two processes end that have averaged gradients in float16 with gloo: exit codes of many short runs.

    python -m tests.training.group_ends --runs 200

Each run is `longstride train`, as torchrun would start it: two processes, two steps, a checkpoint, and the end of the
interpreter with all its finalizers. The processes are forked from one that has imported everything; a run takes a second.
"""

import argparse
import faulthandler
import os
import shlex
import shutil
import signal
import sys
import tempfile
from collections import Counter
from functools import partial
from pathlib import Path
from select import select
from time import monotonic, perf_counter

if __name__ == "__main__":
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}  # Before torch: threads cannot be forked safely.

import matplotlib.pyplot  # noqa: F401
import torch
import torch._dynamo
from torch.distributed import TCPStore

from longstride.commands.main import main as command
from longstride.commands.verbs import train as _  # noqa: F401
from longstride.training import trainer  # noqa: F401
from tests.training.ranks import _group
from tests.training.small import store

PLAN = shlex.split(
    "--steps 2 --batch 2 --log-every 1 --validate-bytes 64 --averaging float16 --device cpu --model.precision float16 "
    "--model.layers 1 --model.width 16 --model.heads 2 --model.context 32 --model.embedding 'matrix(8)' "
    "--model.pattern 'merged(fixed(8, 2))'"
)
WORLD_SIZE = 2
HUNG = "hung"


def fork(work, log):
    """Starts work() in a process that ends as a program does; what it prints goes to the file `log`."""
    child = os.fork()
    if child:
        return child
    for stream in (1, 2):
        os.dup2(os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND), stream)
    faulthandler.enable()
    work()
    sys.exit(0)  # Through the caller, which starts nothing else in a forked process.


def serve(writer):
    """The store of a group, as torchrun has it, until it is killed."""
    server = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    os.write(writer, str(server.port).encode())
    signal.pause()


def train(rank, port, words):
    os.environ.update(_group(rank, WORLD_SIZE, port))
    command(words)


def wait(children, limit):
    """The exit codes, or minus the number of a signal; of processes that do not end in time, HUNG."""
    end, codes = monotonic() + limit, dict.fromkeys(children, HUNG)
    handles = {child: os.pidfd_open(child) for child in children}
    for child, handle in handles.items():
        if select([handle], [], [], max(0, end - monotonic()))[0]:
            codes[child] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        else:
            os.kill(child, signal.SIGABRT)  # faulthandler writes where it is.
            os.waitpid(child, 0)
        os.close(handle)
    return tuple(codes.values())


def once(data, folder, limit):
    """The exit codes of one run."""
    reader, writer = os.pipe()
    server = fork(lambda: serve(writer), folder / "server")
    port = int(os.read(reader, 20))
    os.close(reader)
    os.close(writer)
    words = ["train", "text-small", "--data", data, "--out", str(folder / "run"), *PLAN]
    children = [fork(partial(train, rank, port, words), folder / f"rank-{rank}") for rank in range(WORLD_SIZE)]
    codes = wait(children, limit)
    os.kill(server, signal.SIGKILL)
    os.waitpid(server, 0)
    return codes


def main():
    """No `finally` here: what is forked ends through these frames."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--limit", type=float, default=60, help="seconds, after which a run counts as hung")
    given = parser.parse_args()
    torch.set_num_threads(1)
    around, found, begun = Path(tempfile.mkdtemp(prefix="group-")), Counter(), perf_counter()
    data = store(around / "data")
    for number in range(given.runs):
        folder = around / str(number)
        folder.mkdir()
        codes = once(data, folder, given.limit)
        found[codes] += 1
        if codes == (0,) * WORLD_SIZE and (folder / "run/checkpoints/step-2/manifest.json").exists():
            shutil.rmtree(folder)
        else:
            print(f"run {number}: {codes}; see {folder}", flush=True)
    text = ", ".join(f"{codes}: {count}" for codes, count in found.items())
    print(f"{given.runs} runs of {WORLD_SIZE} processes in {perf_counter() - begun:.0f} s; exit codes {text}")
    if set(found) == {(0,) * WORLD_SIZE}:
        shutil.rmtree(around)
        return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())
