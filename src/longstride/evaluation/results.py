"""The file of an evaluation. Rows join those that the same evaluation has there; no other file is replaced unasked."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from longstride.common.atomic import atomic_path, check_output
from longstride.common.files import read_json

Content = dict[str, Any]


class Results:
    def __init__(self, path: Path, about: Mapping[str, Any], own: bool, force: bool) -> None:
        """Before the work: whether the file can be written, and may be.

        own: It has the name that the run gives it, and may take the place of an evaluation of other weights.
        """
        self.path = path
        self.about: Content = json.loads(json.dumps(about))  # As it is read again: lists, no tuples.
        check_output("eval", "json", path, may_replace=True)  # What may be replaced depends on its content.
        if not path.exists() or force:
            return
        there = _read(path)
        if there is None:
            self._refuse("is there already, and no evaluation")
        elif _key(there) != _key(self.about) and not (own and there["weights_sha256"] != self.about["weights_sha256"]):
            self._refuse("has an evaluation of other weights, data or settings")

    def _refuse(self, why: str) -> NoReturn:
        raise ValueError(f"eval: json = {str(self.path)!r} {why}; add --force to replace it, or give another --json")

    def add(self, row: Mapping[str, Any]) -> None:
        """Writes it beside the others, of this process and of any other: the next may take hours."""
        there = _read(self.path)
        stay = there["rows"] if there is not None and _key(there) == _key(self.about) else []
        rows = {one["min_context"]: one for one in stay}
        rows[row["min_context"]] = dict(row)
        content = {**self.about, "rows": [rows[least] for least in sorted(rows)]}
        with atomic_path(self.path) as temporary:
            temporary.write_text(json.dumps(content, indent=2) + "\n")


def _read(path: Path) -> Content | None:
    """What an evaluation has written, or None."""
    if not path.is_file():
        return None
    try:
        found = read_json(path)
        if _key(found) and all(type(row["min_context"]) is int for row in list(found["rows"])):
            # Earlier versions said once how all rows were made.
            how = {name: found[name] for name in ("batch", "processes", "machine") if name in found}
            return {**found, "rows": [{**how, **row} for row in found["rows"]]}
    except (ValueError, LookupError, TypeError, AttributeError):
        pass
    return None


def _key(content: Content) -> list[Any]:
    """What a result depends on. Files may have been moved."""
    data = content["data"]
    return [content["weights_sha256"], content["model"], data["split"], data["sha256"], content["bytes"]]
