"""Reads the JSON files of the benchmarks: objects become dataclasses, and anything else is a ValueError in one line."""

from dataclasses import is_dataclass
from types import NoneType
from typing import Any, TypeVar, get_args, get_type_hints

Record = TypeVar("Record")


def read_record(kind: type[Record], given: Any) -> Record:
    """Returns a dataclass from a JSON object. Missing fields keep their defaults, and unknown ones are left out."""
    if not isinstance(given, dict):
        raise ValueError(f"a {kind.__name__} must be an object, got {given!r:.80}")
    hints = get_type_hints(kind)
    return kind(**{name: _value(kind, name, hints[name], given[name]) for name in hints if name in given})


def _value(kind: type, name: str, hint: Any, value: Any) -> Any:
    choices = get_args(hint) or (hint,)
    nested = next((choice for choice in choices if is_dataclass(choice)), None)
    if isinstance(value, dict) and isinstance(nested, type):
        return read_record(nested, value)
    if isinstance(value, list) and hint == list[float]:
        return [_value(kind, name, float, number) for number in value]
    if type(value) is int and float in choices and abs(value) < 2**63:
        value = float(value)
    types = tuple(choice for choice in choices if choice in (str, int, float, NoneType))
    if not isinstance(value, types) or isinstance(value, bool) or (isinstance(value, int) and not 0 <= value < 2**63):
        raise ValueError(f"{name} of a {kind.__name__} is {value!r:.80}")
    return value


def read_list(given: Any) -> list[Any]:
    if not isinstance(given, list):
        raise ValueError(f"rows and the like must be lists, got {given!r:.80}")
    return given


def read_machine(given: Any) -> dict[str, str | int]:
    if not isinstance(given, dict) or not all(isinstance(value, str | int) for value in given.values()):
        raise ValueError(f"machine must be an object of texts and numbers, got {given!r:.80}")
    return given
