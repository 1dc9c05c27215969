"""What is done to a valid file: to its bytes, to the tree of its JSON, to the lines of JSON, to text.

All of it is a pure function of the generator that is given.
"""

import json
import struct
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

DEEP = 100_000
LARGEST = 1 << 20
"""Bytes that a mutation by copying may reach."""
ENDS = (0, 1, 2, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFF_FFFF, 0x8000_0000, 0xFFFF_FFFF, 2**40, 2**62, 2**63 - 1,
        2**63, 2**64 - 1)  # fmt: skip
"""Numbers at which something ends."""
ODD = (
    "null", "true", "false", "0", "-1", "1", "2", "1.5", "-0.0", "1e-320", "1e308", "1e400", "-1e400", "NaN", "Infinity",
    "-Infinity", *(str(number) for number in ENDS), "1" + 400 * "0", "-1" + 400 * "0", 5000 * "9",
    '""', '" "', '"\\u0000"', '"\\ud800"', '"a\\nb"', '"\\u001b[31m"', '"nan"', '"1"', '"../canary.txt"', '"/canary"',
    '"' + 200_000 * "a" + '"', "[]", "{}", "[[]]", '{"": null}', "[" + ",".join(["0"] * 20_000) + "]",
    "[" * DEEP + "]" * DEEP, "[" * DEEP, '{"a":' * DEEP + "1" + "}" * DEEP,
)  # fmt: skip
"""Values for a place in JSON, as they are written."""
RAW = "\ufdd0"
"""Stands in a tree for text that JSON cannot write."""

Mutator = Callable[[Random, bytes, bytes], bytes]
"""Of a generator, a file and another valid one of the same format."""


def flip_bits(rng: Random, data: bytes, other: bytes) -> bytes:
    found = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 8, 64))):
        if found:
            found[rng.randrange(len(found))] ^= 1 << rng.randrange(8)
    return bytes(found)


def overwrite(rng: Random, data: bytes, other: bytes) -> bytes:
    """Bytes in a row, of the first ones more often: these are headers."""
    found, at = bytearray(data), _place(rng, len(data))
    some = rng.choice((b"\x00", b"\xff", b"\x7f", b"\x80", b"\n", b"%n", b"\x00" * 16, b"\xff" * 16, rng.randbytes(8)))
    found[at : at + len(some)] = some
    return bytes(found)


def set_number(rng: Random, data: bytes, other: bytes) -> bytes:
    """A length, perhaps, becomes one at which something ends."""
    width = rng.choice("HIQ")
    number = rng.choice((*ENDS, len(data), len(data) - 1, len(data) + 1)) % 2 ** (8 * struct.calcsize(width))
    at = _place(rng, max(1, len(data) - struct.calcsize(width)))
    packed = struct.pack(rng.choice("<>") + width, number)
    return data[:at] + packed + data[at + len(packed) :]


def truncate(rng: Random, data: bytes, other: bytes) -> bytes:
    return data[: _place(rng, len(data))] if rng.random() < 0.5 else data[: -rng.choice((1, 2, 8, 64)) or None]


def extend(rng: Random, data: bytes, other: bytes) -> bytes:
    return data + rng.choice((b"\x00", b"\n", b"\x00" * 4096, rng.randbytes(rng.randrange(1, 600)), data, other))


def splice(rng: Random, data: bytes, other: bytes) -> bytes:
    return data[: rng.randrange(len(data) + 1)] + other[rng.randrange(len(other) + 1) :]


def repeat_block(rng: Random, data: bytes, other: bytes) -> bytes:
    first, last = sorted((rng.randrange(len(data) + 1), rng.randrange(len(data) + 1)))
    times = rng.choice((2, 3, 16, 1000))
    times = min(times, 1 + LARGEST // max(1, last - first))
    return data[:first] + data[first:last] * times + data[last:]


def remove_block(rng: Random, data: bytes, other: bytes) -> bytes:
    first = _place(rng, len(data))
    return data[:first] + data[first + rng.choice((1, 2, 4, 16, 256)) :]


def shuffle_block(rng: Random, data: bytes, other: bytes) -> bytes:
    first = _place(rng, len(data))
    block = bytearray(data[first : first + 32])
    rng.shuffle(block)
    return data[:first] + bytes(block) + data[first + 32 :]


BYTES: tuple[Mutator, ...] = (
    flip_bits, flip_bits, overwrite, set_number, set_number, truncate, extend, splice, repeat_block, remove_block,
    shuffle_block,
)  # fmt: skip


def mutate_bytes(rng: Random, data: bytes, other: bytes) -> bytes:
    """One change, or a few."""
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        data = rng.choice(BYTES)(rng, data, other)
    return data


def _place(rng: Random, size: int) -> int:
    return rng.randrange(min(size, 64) if rng.random() < 0.5 else size) if size else 0


def mutate_json(rng: Random, data: bytes, other: bytes, odd: Sequence[str] = ODD) -> bytes:
    """Mostly its tree: then it is JSON still, and reaches what reads the values."""
    if rng.random() < 0.15:
        return mutate_bytes(rng, data, other)
    return mutate_tree(rng, json.loads(data), odd).encode("utf-8", "surrogatepass")


def mutate_tree(rng: Random, tree: Any, odd: Sequence[str] = ODD) -> str:
    """The text of a tree in which some values are others, or names are missing, twice there or unknown."""
    raw: list[str] = []
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        places = list(_places(tree))
        if not places:
            return rng.choice(odd)
        owner, key = rng.choice(places)
        match rng.choice(("value", "value", "value", "value", "number", "swap", "delete", "twice", "unknown", "root")):
            case "value":
                owner[key] = _raw(raw, rng.choice(odd))
            case "number" if type(owner[key]) in (int, float):
                factor = rng.choice((-1, 0, 2, 10, 1000, 10**9, 10**18))
                owner[key] = rng.choice((owner[key] * factor, owner[key] + 1, owner[key] - 1, owner[key] + 0.5))
            case "swap":
                place, name = rng.choice(places)
                owner[key], place[name] = place[name], owner[key]
            case "delete":
                del owner[key]
            case "twice" if isinstance(owner, dict):
                owner[f"{RAW}twice{key}"] = _raw(raw, rng.choice(odd))
            case "unknown" if isinstance(owner, dict):
                owner[rng.choice(("", "unknown", "__class__", "a" * 5000, "../canary", f"{key} "))] = owner[key]
            case "root":
                tree = rng.choice(([tree], {"model": tree}, tree if rng.random() < 0.9 else None))
    try:
        text = json.dumps(tree, indent=rng.choice((None, 2)))
    except (ValueError, RecursionError):  # A swap may have put a value into itself.
        return rng.choice(odd)
    text = text.replace(json.dumps(f"{RAW}twice")[:-1], '"')
    for number, written in enumerate(raw):
        text = text.replace(json.dumps(f"{RAW}{number};"), written)
    return text


def mutate_lines(rng: Random, data: bytes, other: bytes) -> bytes:
    """Lines of JSON: one of them, or their order and number."""
    if rng.random() < 0.1:
        return mutate_bytes(rng, data, other)
    lines = data.decode().splitlines()
    at = rng.randrange(len(lines))
    match rng.choice(("line", "line", "line", "line", "odd", "shuffle", "twice", "many", "delete", "cut", "empty")):
        case "line":
            lines[at] = mutate_tree(rng, json.loads(lines[at]))
        case "odd":
            lines[at] = rng.choice(ODD)
        case "shuffle":
            rng.shuffle(lines)
        case "twice":
            lines.insert(at, lines[at])
        case "many":
            lines *= 1000
        case "delete":
            del lines[at]
        case "cut":
            lines[at] = lines[at][: rng.randrange(len(lines[at]))]
        case "empty":
            lines.insert(at, "")
    text = "\n".join(lines) + ("\n" if rng.random() < 0.9 else "")
    return text.encode("utf-8", "surrogatepass")


def _places(tree: Any) -> list[tuple[Any, Any]]:
    """Every value of a tree, as the dict or list that has it and its name or number there."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    found = []
    for key, value in items:
        found += [(tree, key), *_places(value)]
    return found


def _raw(raw: list[str], text: str) -> str:
    raw.append(text)
    return f"{RAW}{len(raw) - 1};"


NAMES = ("dense", "local", "column", "dilated", "block", "summary", "strided", "fixed", "grid", "merged", "interleave",
         "heads", "distinct", "unknown", "__import__")  # fmt: skip
NUMBERS = ("0", "1", "2", "3", "7", "8", "16", "64", "-1", "1.5", "None", "True", "10**9", "1000000", "1000000000",
           "999999999999", str(2**31), str(2**62), str(2**63), str(2**64), 400 * "9", 5000 * "9", "1e400", "'a'", "[]", "{}",
           "{[]}", "...", "x", "c=2", "reach=8", "part=1", "*[1]", "**{}", "lambda: 1", "(1, 2)")  # fmt: skip


LONGEST = 100_000
"""Letters of a pattern's text."""


def pattern_text(rng: Random, depth: int = 3) -> str:
    """The text of a pattern, some of which are patterns."""
    kind = rng.random()
    if depth == 0 or kind < 0.5:
        arguments = [
            rng.choice(NUMBERS[:8] if rng.random() < 0.6 else NUMBERS) for _ in range(rng.choice((0, 1, 1, 2, 2, 3)))
        ]
        return f"{rng.choice(NAMES[:9] if rng.random() < 0.9 else NAMES)}({', '.join(arguments)})"
    some = [pattern_text(rng, depth - 1) for _ in range(rng.choice((1, 2, 2, 3)))]
    if kind < 0.7:
        return f"{rng.choice(NAMES[9:])}({', '.join(some)})"
    if kind < 0.85:
        return rng.choice((" | ", " + ", ", ", " * ", " - ")).join(some)
    if kind < 0.93:
        return f"{rng.choice(NUMBERS)}*({some[0]})"
    if depth < 3:
        return some[0]
    times = min(rng.choice((20, 100, 900, 5000)), LONGEST // sum(map(len, some)))
    return rng.choice((
        " | ".join(some * times), " + ".join(some * times), "(" * times + some[0] + ")" * times,
        "merged(" * times + some[0] + ")" * times, " | ".join(f"{NAMES[1 + k % 5]}({k + 2})" for k in range(times)),
    ))  # fmt: skip


def mutate_pattern(rng: Random, data: bytes, other: bytes) -> bytes:
    return mutate_bytes(rng, data, other) if rng.random() < 0.3 else pattern_text(rng).encode()
