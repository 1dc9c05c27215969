"""Searches launch settings of the kernels for this GPU, and saves those that are faster than the shipped ones.

longstride bench tune
longstride bench tune --kernels forward dq dkv --widths 64 --dtypes bfloat16 float16 --out settings.json
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice, product
from pathlib import Path
from typing import Any, Protocol

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from longstride.attention.kernels import saved
from longstride.attention.kernels.launches import (
    ALLOWED,
    DTYPES,
    KERNELS,
    Key,
    LaneKey,
    LaneSetting,
    Setting,
    TileKey,
    TileSetting,
)
from longstride.attention.kernels.settings import Gpu, reload, shipped_lanes
from longstride.commands.bench.settings import TuneBenchmark
from longstride.commands.bench.workbench import Problem, Workbench
from longstride.common.atomic import atomic_path, check_output, check_writable
from longstride.common.device import describe_machine

NOISE = 1.03
"""A setting is kept if it is faster than the shipped one by more than this factor."""
ROOMY = Gpu("a GPU on which whole lanes fit", (9, 0), 2**20)


class Bench(Protocol):
    """What a search needs of a workbench; `Workbench` implements it on a GPU."""

    def shipped(self, key: Key) -> Setting | None: ...

    def launched(self, key: Key) -> bool: ...

    def problem(self, key: Key, setting: Setting | None, thorough: bool) -> Problem | None: ...

    def seconds(self, key: Key, settings: Sequence[Setting | None]) -> list[float]: ...


@dataclass
class Finding:
    """The result of a search. None as a setting: whole lanes are computed as windows."""

    key: Key
    shipped: Setting | None
    found: Setting | None = None
    """The setting to save; None if the shipped one stays."""
    shipped_ms: float | None = None
    """None if it does not run here."""
    found_ms: float | None = None
    tried: int = 0
    wrong: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    note: str = ""

    @property
    def ratio(self) -> float | None:
        return self.shipped_ms / self.found_ms if self.shipped_ms and self.found_ms else None


def run(settings: TuneBenchmark, console: Console | None = None) -> list[Finding]:
    """Searches settings for the given kernels, prints a table, and saves the faster ones."""
    _check(settings)
    if not torch.cuda.is_available():
        raise ValueError("bench tune: it times kernels on a CUDA GPU, and torch sees none here")
    path = _place(settings)
    before = saved.read(path) if path.exists() else {}
    device = torch.device("cuda", torch.cuda.current_device())
    console = console or Console()
    try:
        bench = Workbench(device, settings.repeats)
        findings = search_all(_keys(settings), bench, console)
    except ModuleNotFoundError as error:
        raise ValueError(f"bench tune: it needs {error.name}, which is not installed: pip install {error.name}") from None
    except torch.OutOfMemoryError:
        raise ValueError(
            "bench tune: the GPU has too little free memory; nothing is saved; end what else runs on it, or leave out the "
            "larger ones of --widths"
        ) from None
    about = describe_machine(device)
    console.print(", ".join(f"{name} {value}" for name, value in about.items()), highlight=False)
    show(findings, console)
    keep(path, bench.gpu.name, before, findings, console)
    if settings.json is not None:
        with atomic_path(settings.json) as temporary:
            plain = {"machine": about, "settings": asdict(settings), "findings": [_plain(finding) for finding in findings]}
            temporary.write_text(json.dumps(plain, indent=2, default=str) + "\n")
    return findings


def _check(settings: TuneBenchmark) -> None:
    if settings.repeats < 1:
        raise ValueError(f"bench tune: repeats must be at least 1, got {settings.repeats}")
    for name in ("kernels", "widths", "dtypes"):
        given = getattr(settings, name)
        if not given or len(set(given)) < len(given):
            raise ValueError(f"bench tune: {name} must be one or more different ones, got {list(given)}")
    widths = ALLOWED[TileKey]["width"]
    for width in settings.widths:
        if width not in widths:
            raise ValueError(f"bench tune: widths must be of {', '.join(map(str, widths))}, got {width}")
    if not _keys(settings):
        raise ValueError("bench tune: whole lanes are for float16 and bfloat16 and widths up to 128; there is nothing to do")


def _place(settings: TuneBenchmark) -> Path:
    """The file to save to, checked before the work."""
    path = settings.out or saved.place()
    if path is None:
        raise ValueError(f"bench tune: {saved.VARIABLE} is empty, which means no file; say with --out where to save")
    if settings.out is None:
        check_writable("bench tune", "out", path)  # Makes the folder of the user's own settings.
    else:
        check_output("bench tune", "out", path, may_replace=True)  # Settings for other kernels and GPUs stay in the file.
    if settings.json is not None:
        check_output("bench tune", "json", settings.json, may_replace=settings.force)
    return path


def _keys(settings: TuneBenchmark) -> list[Key]:
    keys: list[Key] = []
    for name, width, kernel in product(settings.dtypes, settings.widths, settings.kernels):
        dtype = DTYPES[name]
        if KERNELS[kernel][0] is TileKey:
            keys += [TileKey(kernel, summary, width, dtype) for summary in (False, True)]
        else:
            lanes = [LaneKey(kernel, lane, later, width, dtype) for lane in (32, 64, 128) for later in (False, True)]
            keys += [key for key in lanes if shipped_lanes(key, width, ROOMY) is not None]
    return keys


def search_all(keys: Sequence[Key], bench: Bench, console: Console) -> list[Finding]:
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("tuning", total=len(keys))
        findings = []
        for key in keys:
            findings.append(search(key, bench, lambda text: progress.update(task, description=text)))
            progress.advance(task)
    return findings


def search(key: Key, bench: Bench, tell: Callable[[str], object] = lambda text: None) -> Finding:
    """Times candidates in two rounds, the second around the best of the first; then the best against the shipped one."""
    shipped = bench.shipped(key)
    finding = Finding(key, shipped)
    tell(f"{_name(key)}: shipped")
    if not bench.launched(key):
        finding.note = "this GPU has another kernel for it"
        return finding

    def usable(setting: Setting | None, thorough: bool) -> bool:
        tell(f"{_name(key)}: {_text(setting)}")
        problem = bench.problem(key, setting, thorough)
        if problem is not None:
            (finding.wrong if problem.wrong else finding.skipped).append(f"{_text(setting)}: {problem.reason}")
        return problem is None

    shipped_runs = usable(shipped, thorough=False)
    standard: list[Setting | None] = [shipped] if shipped_runs else []
    best = standard  # One setting, or none as long as nothing runs.
    seen = {shipped}
    for variations in (_first_round, _second_round):
        base = next((setting for setting in best if setting is not None), None) or shipped or _start(key)
        fresh = [setting for setting in variations(key, base) if setting not in seen]
        seen.update(fresh)
        # Times of different rounds are not comparable, so the shipped and the best setting take part in each.
        running = [setting for setting in fresh if usable(setting, thorough=False)]
        contenders = list(dict.fromkeys([*standard, *best, *running]))
        times = dict(zip(contenders, bench.seconds(key, contenders)))
        ranked = sorted(times, key=lambda setting: times[setting])
        good = (setting for setting in ranked if setting in standard or setting in best or usable(setting, thorough=True))
        best = list(islice(good, 1))
        if shipped_runs:
            finding.shipped_ms = times[shipped] * 1e3
    finding.tried = len(seen)
    if best and best != standard:
        # The fastest of many is partly luck: it is kept only if it is faster again, by more than noise.
        seconds = bench.seconds(key, [*best, *standard])
        if shipped_runs:
            finding.shipped_ms = seconds[1] * 1e3
        if not shipped_runs or seconds[1] > NOISE * seconds[0]:
            finding.found, finding.found_ms = best[0], seconds[0] * 1e3
    return finding


def _start(key: Key) -> Setting:
    """The start of a search if this GPU has no shipped setting for whole lanes: that of others, without prefetching."""
    assert isinstance(key, LaneKey)
    setting = shipped_lanes(key, key.width, ROOMY)
    assert setting is not None
    return setting._replace(stages=1)


def _first_round(key: Key, best: Setting) -> list[Setting]:
    if isinstance(best, LaneSetting):
        return [best._replace(warps=warps, stages=stages) for warps in (4, 8) for stages in (1, 2, 3, 4)]
    # In float32, and in wide heads, larger tiles do not fit into registers.
    sides = (16, 32, 64) if key.dtype == torch.float32 else (32, 64, 128)
    area = (32 * 64 if key.dtype == torch.float32 else 128 * 128) * 64 // max(64, key.width)
    return [
        best._replace(rows=rows, columns=columns, warps=warps)
        for rows in sides
        for columns in sides
        for warps in (4, 8)
        if rows * columns <= area
    ]


def _second_round(key: Key, best: Setting) -> list[Setting]:
    if isinstance(best, LaneSetting):
        return [best._replace(per_processor=count) for count in (1, 2, 3, 4, 6)]
    return [best._replace(stages=stages) for stages in (1, 2, 3, 4)]


def show(findings: Sequence[Finding], console: Console) -> None:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in ("kernel", "shipped", "found"):
        table.add_column(heading, no_wrap=True)
    for heading in ("shipped\nms", "found\nms", "shipped\n/ found"):
        table.add_column(heading, justify="right", no_wrap=True)
    for finding in findings:
        table.add_row(
            _name(finding.key),
            _text(finding.shipped),
            "-" if finding.found is None else _text(finding.found),
            *("-" if value is None else f"{value:.3f}" for value in (finding.shipped_ms, finding.found_ms, finding.ratio)),
        )
    console.print(table)
    notes = [f"{_name(finding.key)}: {finding.note}" for finding in findings if finding.note]
    for finding in findings:
        notes += [f"{_name(finding.key)}: WRONG and left out: {text}" for text in finding.wrong]
        if finding.skipped:
            skipped = f"{len(finding.skipped)} of {finding.tried} do not run here, as {finding.skipped[0]}"
            notes.append(f"{_name(finding.key)}: {skipped}")
    for note in notes:
        console.print(note, highlight=False, markup=False, soft_wrap=True)


def keep(path: Path, name: str, before: saved.ByGpu, findings: Iterable[Finding], console: Console) -> None:
    """Replaces the file's settings for these kernels on this GPU. All other settings in it stay."""
    findings = list(findings)
    old = before.get(name, {})
    searched = {finding.key for finding in findings if not finding.note}
    new = {key: setting for key, setting in old.items() if key not in searched}
    new.update({finding.key: finding.found for finding in findings if finding.found is not None})
    if new == old:
        text = f"no faster settings were found; {path} stays as it was" if old else "the shipped settings are best here"
        console.print(text, highlight=False, markup=False, soft_wrap=True)
        return
    saved.write(path, {**{other: rows for other, rows in before.items() if other != name}, **({name: new} if new else {})})
    reload()
    text = f"wrote {path}: {len(new)} settings for {name}"
    if saved.place() != path:
        text += f"; to use it: export {saved.VARIABLE}={path}"
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def _name(key: Key) -> str:
    about = ["cells" if key.summary else "window"] if isinstance(key, TileKey) else [str(key.lane), *["later"] * key.later]
    return " ".join([key.kernel, *about, f"d {key.width}", str(key.dtype).removeprefix("torch.")])


def _text(setting: Setting | None) -> str:
    """Short enough for a table: rows x columns, warps, stages, programs of a multiprocessor."""
    if setting is None:
        return "as windows"
    tile = f"{setting.rows}x{setting.columns} " if isinstance(setting, TileSetting) else ""
    each = f" {setting.per_processor}p" if isinstance(setting, LaneSetting) else ""
    return f"{tile}{setting.warps}w {setting.stages}s{each}"


def _plain(finding: Finding) -> dict[str, Any]:
    """For JSON."""
    settings = {"shipped": finding.shipped, "found": finding.found}
    plain = {name: setting and setting._asdict() for name, setting in settings.items()}
    key = {**finding.key._asdict(), "dtype": str(finding.key.dtype).removeprefix("torch.")}
    return {**vars(finding), "key": key, **plain, "ratio": finding.ratio}
