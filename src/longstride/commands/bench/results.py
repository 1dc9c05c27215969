"""Output files of the benchmarks: checked before the work, and JSON written after every row."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from longstride.commands.bench.settings import AttentionBenchmark, SamplingBenchmark
from longstride.common.atomic import atomic_path, check_output
from longstride.common.figures import picture_path


def check_outputs(owner: str, settings: AttentionBenchmark | SamplingBenchmark) -> None:
    """Refuses files that exist, unless `force` is set, and folders that do not."""
    if settings.picture is not None:
        picture_path(owner, settings.picture)
    for name, path in (("json", settings.json), ("picture", settings.picture)):
        if path is not None:
            check_output(owner, name, path, may_replace=settings.force)


def save(result: Any, path: Path | None) -> None:
    """Writes a dataclass as JSON, if there is a path."""
    if path is not None:
        with atomic_path(path) as temporary:
            temporary.write_text(json.dumps(plain(result), indent=2) + "\n")


def plain(value: Any) -> Any:
    """A dataclass as JSON has it: dicts, lists, numbers, and text for paths."""
    return json.loads(json.dumps(asdict(value), default=str))
