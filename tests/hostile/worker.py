"""One case in a process of its own, with limits on memory, time and disk, and a watch on what it touches.

`run` forks. The process that calls it has one thread and has imported everything, so that a case takes milliseconds.
"""

import faulthandler
import json
import os
import resource
import select
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import longstride

MEMORY = 2 << 30
"""Bytes over what is mapped when a case begins; also the largest file that a case may write."""
SECONDS = 20
"""Of processor time, which does not depend on what else the machine does."""
CLOCK = 4
"""Times as many seconds by the clock, after which a case counts as hung, whatever it waits for."""
LONGEST = 1000
"""Letters of an error's message."""
PACKAGE = str(Path(longstride.__file__).parent)
MARKER, CANARY = "marker", "canary"
"""Names beside the case's folder: what must never appear, and a file and a folder that must stay as they are."""

RUNS = {
    "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system", "pickle.find_class", "pty.spawn",
    "socket.connect", "subprocess.Popen",
}  # fmt: skip
"""Audit events of programs that are started, of names that a pickle imports, and of connections."""
WRITES = {
    "os.chmod": (0, None), "os.chown": (0, None), "os.truncate": (0, None), "os.utime": (0, None), "os.mkdir": (0, 2),
    "os.remove": (0, 1), "os.rmdir": (0, 1), "os.link": (1, 3), "os.symlink": (1, 2), "shutil.rmtree": (0, 1),
}  # fmt: skip
"""Audit events of changes: which argument is the path, and which the folder's descriptor that it is relative to."""
FOLLOWS = {"os.chmod", "os.chown", "os.truncate", "os.utime"}
"""Those that change what a link points to, and not the link."""
OPENED_TO_WRITE = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

Case = Callable[[], Any]
"""Reads what is in the current folder, which is the case's own."""


@dataclass(frozen=True)
class Outcome:
    kind: str
    """'result', 'refused' (a ValueError as it should be) or 'failed'."""
    reason: str = ""
    """Of a failure, without what changes from case to case: failures of one cause have the same."""
    detail: str = ""
    seconds: float = 0.0
    """Of processor time."""
    memory: int = 0
    """Bytes that it took at most, over what it began with."""


def run(make: Callable[[Path], Case], seconds: int = SECONDS) -> Outcome:
    """`make` writes a case into an empty folder and returns what reads it, for which the limits hold."""
    with tempfile.TemporaryDirectory(prefix="hostile-", ignore_cleanup_errors=True) as name:
        around = Path(name).resolve()
        folder = around / "case"
        folder.mkdir()
        before = _plant(around)
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            _read_case(make, folder, seconds, writer)
        os.close(writer)
        outcome = _wait(child, reader, seconds)
        os.close(reader)
        changed = _changes(before, _snapshot(around))
        if changed and outcome.reason != "the fuzzer itself":
            return Outcome("failed", "changes files outside of its folder", changed, outcome.seconds, outcome.memory)
        return outcome


def _wait(child: int, reader: int, seconds: int) -> Outcome:
    handle = os.pidfd_open(child)
    ended = bool(select.select([handle], [], [], CLOCK * seconds)[0])
    os.close(handle)
    with suppress(ProcessLookupError):  # Also what it may have started; it leads a group of its own.
        os.killpg(child, signal.SIGKILL)
    with suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    _, status, usage = os.wait4(child, 0)
    report = json.loads(os.read(reader, 1 << 16) or "{}") if select.select([reader], [], [], 0)[0] else {}
    used = {"seconds": usage.ru_utime + usage.ru_stime, "memory": max(0, usage.ru_maxrss * 1024 - report.pop("began", 0))}
    if not ended:
        return Outcome("failed", "hangs", f"still there after {CLOCK * seconds} s by the clock", **used)
    if os.WIFSIGNALED(status):
        name = signal.Signals(os.WTERMSIG(status)).name
        reason = {"SIGXCPU": "takes too long", "SIGXFSZ": "writes too much"}.get(name, name)
        return Outcome("failed", reason, f"killed by {name} after {used['seconds']:.1f} s", **used)
    if "kind" not in report:
        return Outcome("failed", "no report", f"it ended with status {status} and said nothing", **used)
    if report["kind"] != "failed" and used["memory"] > MEMORY:
        return Outcome("failed", "takes too much memory", f"{used['memory'] >> 20} MiB", **used)
    return Outcome(**report, **used)


def _read_case(make: Callable[[Path], Case], folder: Path, seconds: int, writer: int) -> NoReturn:
    """The forked process. It leaves by _exit: nothing of the one that it was forked from is run again."""
    report: dict[str, Any] = {}
    try:
        os.setsid()
        _redirect()
        os.environ.update(HOME=str(folder), TMPDIR=str(folder), LONGSTRIDE_CACHE=str(folder / "cache"))
        tempfile.tempdir = str(folder)
        os.fsync = lambda handle: None  # Nothing here has to survive a power cut.
        os.chdir(folder)
        try:
            read = make(folder)
        except BaseException:
            report = {"kind": "failed", "reason": "the fuzzer itself", "detail": traceback.format_exc()[-2000:]}
        else:
            seen = _watch(folder)
            began = _status("VmRSS")
            _limit(seconds)
            report = {"began": began, **_outcome(read)}
            if seen:
                event = seen[0].partition(" ")[0]
                report |= {"kind": "failed", "reason": f"{event} outside of its folder", "detail": seen[0][:500]}
    finally:
        try:
            resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            os.write(writer, json.dumps(report).encode()[: 1 << 15])
        finally:
            os._exit(0)


def _outcome(read: Case) -> dict[str, str]:
    try:
        read()
    except ValueError as error:
        text, place = str(error), traceback.extract_tb(error.__traceback__)[-1]
        if not place.filename.startswith(PACKAGE) or "raise" not in (place.line or ""):
            return _failed(f"{type(error).__name__} of a library", error)
        if "\n" in text.strip("\n") or "\r" in text:
            return _failed("a message of several lines", error)
        if len(text) > LONGEST:
            return _failed("a message without end", error)
        return {"kind": "refused", "detail": text}
    except BaseException as error:
        return _failed(type(error).__name__, error)
    return {"kind": "result"}


def _failed(reason: str, error: BaseException) -> dict[str, str]:
    """The reason names the innermost line of the package's that it went through."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if frame.filename.startswith(PACKAGE)]
    where = f", {Path(ours[-1].filename).relative_to(PACKAGE)}:{ours[-1].lineno}" if ours else ""
    return {"kind": "failed", "reason": f"{reason}{where}", "detail": f"{type(error).__name__}: {str(error)[:600]}"}


def _limit(seconds: int) -> None:
    for kind, most in (
        (resource.RLIMIT_DATA, _status("VmData") + MEMORY),
        (resource.RLIMIT_FSIZE, MEMORY),
        (resource.RLIMIT_CPU, int(sum(os.times()[:2])) + seconds),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (most, resource.RLIM_INFINITY))
    # Python ignores it, and a file that is too large would be an error like any other.
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)


def _status(name: str) -> int:
    """A figure of /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def _redirect() -> None:
    """What a case prints goes nowhere."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nowhere, number)
    faulthandler.disable()


def _watch(folder: Path) -> list[str]:
    """What the process starts, and what it changes outside of `folder`, as it goes on. Libraries in C are not seen."""
    seen: list[str] = []

    def note(event: str, given: tuple[Any, ...]) -> None:
        if event in RUNS:
            seen.append(f"{event} {given!r}")
        elif event == "open" and isinstance(given[2], int) and given[2] & OPENED_TO_WRITE:
            check(event, given[0], None, follow=not given[2] & os.O_NOFOLLOW)
        elif event == "os.rename":
            check(event, given[0], given[2])
            check(event, given[1], given[3])
        elif event in WRITES:
            path, base = WRITES[event]
            check(event, given[path], given[base] if base is not None and base < len(given) else None, event in FOLLOWS)

    def check(event: str, path: Any, base: int | None, follow: bool = False) -> None:
        if isinstance(path, int) or path is None:
            return
        whole = os.fsdecode(path)
        if base is not None and base >= 0:
            whole = os.path.join(os.readlink(f"/proc/self/fd/{base}"), whole)
        head, tail = os.path.split(os.path.abspath(whole))
        whole = os.path.realpath(whole) if follow else os.path.join(os.path.realpath(head), tail)
        if whole != os.devnull and Path(whole) != folder and folder not in Path(whole).parents:
            seen.append(f"{event} {whole}")

    sys.addaudithook(note)
    return seen


def _plant(around: Path) -> dict[str, Any]:
    """The canaries: a file, and a folder as a run has it."""
    (around / CANARY).mkdir()
    (around / CANARY / "step-1").mkdir()
    for path in (around / f"{CANARY}.txt", around / CANARY / "file", around / CANARY / "step-1/manifest.json"):
        path.write_text("as it was\n")
    return _snapshot(around)


def _snapshot(around: Path) -> dict[str, Any]:
    """Everything beside the case's folder."""
    tops = [path for path in around.iterdir() if path.name != "case"]
    paths = tops + [path for top in tops if top.is_dir() for path in top.rglob("*")]
    found = {}
    for path in paths:
        status, content = path.lstat(), path.read_bytes() if path.is_file() else None
        found[str(path.relative_to(around))] = (status.st_mode, status.st_ino, content)
    return found


def _changes(before: dict[str, Any], after: dict[str, Any]) -> str:
    return ", ".join(sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name)))
