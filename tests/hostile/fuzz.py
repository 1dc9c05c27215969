"""A seeded fuzzer over every format that the package reads.

    python -m tests.hostile.fuzz                                 1,000 cases of all formats
    python -m tests.hostile.fuzz --cases 30000 --format npy      those of one format that are among 30,000 of all
    python -m tests.hostile.fuzz --format npy --case 1234        one case again, with its traceback
    python -m tests.hostile.fuzz --format npy --case 1234 --keep FOLDER     its files, to look at

A case must end with a result or with a ValueError of the package's own, in one line, within 2 GB and 20 s of processor
time. It must not start anything, nor change a file outside of its folder.
"""

import argparse
import gc
import json
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import chdir
from dataclasses import asdict
from functools import cache
from pathlib import Path
from random import Random
from time import perf_counter

ROOT = Path(__file__).resolve().parents[2]
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""Set before anything is imported: a process with threads cannot be forked safely."""
if __name__ == "__main__":
    os.environ |= ONE_THREAD | {"LONGSTRIDE_SETTINGS": "", "CUDA_VISIBLE_DEVICES": ""}

import torch  # noqa: E402

from tests.hostile.formats import FORMATS, write_case  # noqa: E402
from tests.hostile.misdeeds import MISDEEDS  # noqa: E402
from tests.hostile.seeds import Files, make  # noqa: E402
from tests.hostile.worker import SECONDS, Case, Outcome, run  # noqa: E402

QUICK, ALL = 1_000, 30_000


def shares(total: int) -> dict[str, int]:
    """How many of so many cases each format has; of a larger total, the same ones and more."""
    parts = sum(form.share for form in FORMATS.values())
    return {name: -(-total * form.share // parts) for name, form in FORMATS.items()}


def seeds(name: str) -> list[Files]:
    return _made(FORMATS[name].seeds)


@cache
def _made(how: Callable[[], list[Files]]) -> list[Files]:
    """In a process of its own, which may start threads."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            with os.fdopen(writer, "wb") as file:
                pickle.dump(make(how), file)
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        content = file.read()
    os.waitpid(child, 0)
    return pickle.loads(content)


def write(name: str, number: int, folder: Path) -> Case:
    """The files of a case, into the current folder; it returns what reads them."""
    return write_case(FORMATS[name], seeds(name), Random(f"{name}-{number}"), number, folder)


def outcome(name: str, number: int, seconds: int = SECONDS) -> Outcome:
    """Of case `number` of that format."""
    if name == "misdeeds":
        read, _ = list(MISDEEDS.values())[number]
        return run(lambda folder: read, seconds=1)
    seeds(name)  # Before the process is forked, so that they are made once.
    found = run(lambda folder: write(name, number, folder), seconds)
    if number < len(seeds(name)) and found.kind == "refused":
        return Outcome("failed", "a valid file is refused", found.detail, found.seconds, found.memory)
    return found


def replay(name: str, number: int) -> str:
    return f"python -m tests.hostile.fuzz --format {name} --case {number}"


class Server:
    """A process that has imported everything, for one that has threads itself, as a test has."""

    def __enter__(self) -> "Server":
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.hostile.fuzz", "--serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT,
            text=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )  # fmt: skip
        return self

    def __exit__(self, *_: object) -> None:
        self.process.communicate()

    def outcomes(self, name: str, numbers: range) -> Iterator[tuple[int, Outcome]]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        for number in numbers:
            self.process.stdin.write(f"{name} {number}\n")
            self.process.stdin.flush()
            yield number, Outcome(**json.loads(self.process.stdout.readline()))


def serve(requests: Iterable[str]) -> None:
    for request in requests:
        name, number = request.split()
        print(json.dumps(asdict(outcome(name, int(number)))), flush=True)


def show(name: str, number: int, keep: Path | None) -> int:
    """One case, with its files if they are to be kept; then it is read here, without limits, unless it does not end so."""
    found = outcome(name, number)
    print(f"{name} {number}: {found.kind} {found.reason}\n{found.detail}")
    print(f"{found.seconds:.2f} s, {found.memory >> 20} MiB")
    if keep is not None:
        shutil.rmtree(keep, ignore_errors=True)
        keep.mkdir(parents=True)
        with chdir(keep):
            write(name, number, keep.absolute())
    return int(found.kind == "failed")


def sweep(names: Iterable[str], total: int, seconds: int, report: Path | None) -> int:
    """All cases of these formats among so many of all; a table of what came of them."""
    groups: dict[tuple[str, str], list[tuple[int, Outcome]]] = defaultdict(list)
    begun, count, most = perf_counter(), 0, 0
    lines = ["| format | cases | results | refused | failed | s | longest s | most MiB |", "| --- |" + " --- |" * 7]
    for name in names:
        kinds: Counter[str] = Counter()
        since, longest, memory = perf_counter(), 0.0, 0
        for number in range(shares(total)[name]):
            found = outcome(name, number, seconds)
            kinds[found.kind] += 1
            longest, memory = max(longest, found.seconds), max(memory, found.memory)
            if found.kind == "failed":
                print(f"{replay(name, number)}: {found.reason}", file=sys.stderr)
                groups[name, found.reason].append((number, found))
        took = perf_counter() - since
        figures = (kinds.total(), kinds["result"], kinds["refused"], kinds["failed"], f"{took:.1f}", f"{longest:.1f}")
        lines.append(f"| {name} | {' | '.join(map(str, figures))} | {memory >> 20} |")
        print(lines[-1], flush=True)
        count, most = count + kinds.total(), max(most, memory)
    lines += ["", f"{count} cases in {perf_counter() - begun:.0f} s, at most {most >> 20} MiB.", ""]
    lines += ["| format | failure | cases | numbers | first |", "| --- | --- | --- | --- | --- |"]
    for (name, reason), some in groups.items():
        numbers = ", ".join(str(number) for number, _ in some[:6])
        detail = " ".join(some[0][1].detail.split())[:160].replace("|", "\\|")
        lines.append(f"| {name} | {reason} | {len(some)} | {numbers} | {detail} |")
    print("\n".join(lines[-len(groups) - 4 :]))
    if report is not None:
        report.write_text("\n".join(lines) + "\n")
    return int(bool(groups))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--format", choices=FORMATS, action="append")
    parser.add_argument("--case", type=int)
    parser.add_argument("--cases", type=int, default=QUICK)
    parser.add_argument("--seconds", type=int, default=SECONDS)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--report", type=Path)
    parser.add_argument("--serve", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    tempfile.gettempdir()  # Found once, before a case changes where that is.
    gc.freeze()  # To look at these objects in every case would copy the pages that they are in.
    if given.serve:
        serve(sys.stdin)
        return 0
    if given.case is not None:
        (name,) = given.format
        return show(name, given.case, given.keep)
    return sweep(given.format or FORMATS, given.cases, given.seconds, given.report)


if __name__ == "__main__":
    sys.exit(main())
