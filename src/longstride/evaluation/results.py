"""Results file of an evaluation. New rows are added to those of the same evaluation; other files are not overwritten."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from longstride.common.atomic import atomic_path, check_output
from longstride.common.files import read_json

Content = dict[str, Any]


class Results:
    """The results file of one evaluation: one row per min_context."""

    def __init__(self, path: Path, about: Mapping[str, Any], own: bool, force: bool) -> None:
        """Checks, before the work, that the file can be written and may be replaced; ValueError otherwise.

        own: the file has the run's default name, and may replace an evaluation of other weights.
        """
        self.path = path
        self.about: Content = json.loads(json.dumps(about))  # As read_json would return it: lists, no tuples.
        check_output("eval", "json", path, may_replace=True)  # What may be replaced depends on its content.
        if not path.exists() or force:
            return
        existing = _read(path)
        if existing is None:
            self._refuse("exists and is no evaluation")
        elif _key(existing) != _key(self.about) and not (own and existing["weights_sha256"] != self.about["weights_sha256"]):
            self._refuse("has an evaluation of other weights, data or settings")

    def _refuse(self, why: str) -> NoReturn:
        raise ValueError(f"eval: json = {str(self.path)!r} {why}; add --force to replace it, or give another --json")

    def add(self, row: Mapping[str, Any]) -> None:
        """Adds a row to the file, at once: the next row may take hours."""
        existing = _read(self.path)
        kept_rows = existing["rows"] if existing is not None and _key(existing) == _key(self.about) else []
        rows = {old_row["min_context"]: old_row for old_row in kept_rows}
        rows[row["min_context"]] = dict(row)
        content = {**self.about, "rows": [rows[least] for least in sorted(rows)]}
        with atomic_path(self.path) as temporary:
            temporary.write_text(json.dumps(content, indent=2) + "\n")


def _read(path: Path) -> Content | None:
    """Returns the content of a results file, or None if it is none."""
    if not path.is_file():
        return None
    try:
        content = read_json(path)
        if _key(content) and all(type(row["min_context"]) is int for row in list(content["rows"])):
            # Earlier versions stored these once for all rows.
            shared_fields = {name: content[name] for name in ("batch", "processes", "machine") if name in content}
            return {**content, "rows": [{**shared_fields, **row} for row in content["rows"]]}
    except (ValueError, LookupError, TypeError, AttributeError):
        pass
    return None


def _key(content: Content) -> list[Any]:
    """Returns what a result depends on. Paths are left out, since files may be moved."""
    data = content["data"]
    return [content["weights_sha256"], content["model"], data["split"], data["sha256"], content["bytes"]]
