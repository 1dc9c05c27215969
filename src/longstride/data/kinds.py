"""The list of data kinds. A new kind is one file with a subclass of `DataKind`, and one line here.

Imported without numpy: the classes are imported at their first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from longstride.data.kind import DataKind

KINDS = {
    "text": "longstride.data.text:Text",
    "images": "longstride.data.images:Images",
    "audio": "longstride.data.audio:Audio",
    "bytes": "longstride.data.raw_bytes:RawBytes",
}
"""Module and class of each kind. Files without a known suffix are tried in this order: `bytes` takes any, so it is last."""

if TYPE_CHECKING:
    KindName = str
else:
    KindName = Literal[tuple(KINDS)]


def kind_class(name: str) -> "type[DataKind]":
    """Returns the class of a kind."""
    module, _, attribute = KINDS[name].partition(":")
    kind: type[DataKind] = getattr(import_module(module), attribute)
    return kind


def all_kinds() -> "list[type[DataKind]]":
    return [kind_class(name) for name in KINDS]
