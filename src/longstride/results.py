"""The file of an evaluation. Rows join those that the same evaluation has there; no other file is replaced unasked."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from longstride.atomic import atomic_path, writable

Content = dict[str, Any]


class Results:
    def __init__(self, path: Path, about: Mapping[str, Any], own: bool, force: bool) -> None:
        """Before the work: whether the file can be written, and may be.

        own: It has the name that the run gives it, and may take the place of an evaluation of other weights.
        """
        self.path = path
        self.about: Content = json.loads(json.dumps(about))  # As it is read again: lists, no tuples.
        self.rows: list[Content] = []
        if not path.parent.is_dir():
            raise ValueError(
                f"eval: json = {str(path)!r} cannot be written: there is no folder {path.parent}; make it first"
            )
        writable("eval", "json", path)
        if not path.exists() or force:
            return
        there = _read(path)
        if there is None:
            raise ValueError(
                f"eval: json = {str(path)!r} is there already, and no evaluation; add --force to replace it, "
                "or give another --json"
            )
        if _same(there, self.about):
            self.rows = there["rows"]
        elif not own:
            raise ValueError(
                f"eval: json = {str(path)!r} has an evaluation of other weights, data or settings; "
                "add --force to replace it, or give another --json"
            )

    def add(self, row: Mapping[str, Any]) -> None:
        """Writes it beside the others: the next may take hours."""
        others = [one for one in self.rows if one["min_context"] != row["min_context"]]
        self.rows = sorted([*others, dict(row)], key=lambda one: one["min_context"])
        with atomic_path(self.path) as temporary:
            temporary.write_text(json.dumps({**self.about, "rows": self.rows}, indent=2) + "\n")


def _read(path: Path) -> Content | None:
    """What an evaluation has written, or None."""
    try:
        found = json.loads(path.read_text())
        if _key(found) and all(isinstance(row["min_context"], int) for row in found["rows"]):
            return dict(found)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        pass
    return None


def _same(one: Content, other: Content) -> bool:
    return _key(one) == _key(other)


def _key(content: Content) -> list[Any]:
    """What a result depends on. Files may have been moved."""
    data = content["data"]
    return [content["weights_sha256"], content["model"], data["split"], data["sha256"], content["bytes"]]
