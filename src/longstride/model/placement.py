"""Text notation for the patterns of all residual blocks and heads: section 5.1.

    interleave(strided(128))                  block r has the pattern r mod p
    3*local(96) + column(96)                  interleaved at a ratio
    merged(fixed(128, 32))                    every head of every block sees the keys of both factorized heads
    heads(local(128), column(128))            one pattern per head; the list repeats if there are more heads
    distinct(merged(fixed(128, 32)))          each head has its own summary cells: the next of l / c sub-blocks
    dense()                                   full attention, the baseline

`longstride.patterns.notation` defines the notation of patterns. A sum is a cycle of blocks, a product repeats a block.
"""

import ast
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate

from longstride.common.checks import short_repr, suggest
from longstride.common.limits import check_limit
from longstride.patterns import Pattern, Summary, notation, union

Heads = tuple[Pattern, ...]
"""One pattern for each head of a block."""
LONGEST_CYCLE = 4096
WORDS = ("interleave", "heads", "distinct")
HINT = "say how blocks and heads take them: interleave(...), merged(...) or heads(...)"


@lru_cache(maxsize=32)  # At the limits an entry takes several megabytes.
def place(text: str, heads: int) -> tuple[Heads, ...]:
    """Parses `text` into a cycle of blocks: block r has entry r modulo its length."""
    check_limit("pattern", "the length of the text", len(text), "text")
    try:
        node = notation.read_syntax(text.strip())
    except SyntaxError:
        raise ValueError(
            f"pattern {short_repr(text)} does not read as one; write it like '3*local(96) + column(96)'"
        ) from None
    try:
        return tuple(_cycle(node, heads))
    except ValueError as error:
        raise ValueError(f"pattern {short_repr(text)}: {error}") from None
    except RecursionError:
        raise ValueError(f"pattern {short_repr(text)} has too many brackets inside brackets") from None


def _cycle(node: ast.expr, heads: int) -> list[Heads]:
    if len(added := notation.operands(node, ast.Add)) > 1:
        return _concatenate((_cycle(term, heads) for term in added), heads)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        times, repeated = _split_product(node)
        return _concatenate([_cycle(repeated, heads)] * times, heads)
    match _call_name(node):
        case "interleave":
            return _concatenate((_interleave(argument, heads) for argument in _arguments(node)), heads)
        case "heads":
            return [_cycle_heads([pattern for argument in _arguments(node) for pattern in _patterns(argument)], heads)]
        case "distinct":
            arguments = _arguments(node)
            if len(arguments) != 1:
                raise ValueError(f"distinct takes one pattern, got {len(arguments)}")
            return _make_distinct(_cycle(arguments[0], heads))
    patterns = _patterns(node)
    if len(patterns) > 1:
        raise ValueError(f"{notation.node_text(node)} is {len(patterns)} patterns; {HINT}")
    return [patterns * heads]


def _concatenate(parts: Iterable[list[Heads]], heads: int) -> list[Heads]:
    cycle: list[Heads] = []
    for part in parts:
        if len(cycle) + len(part) > LONGEST_CYCLE:
            raise ValueError(f"a cycle has at most {LONGEST_CYCLE:,} blocks")
        check_limit("cycle", "blocks times heads", (len(cycle) + len(part)) * heads, "placed")
        cycle += part
    return cycle


def _split_product(node: ast.BinOp) -> tuple[int, ast.expr]:
    times, repeated = node.left, node.right
    if not isinstance(times, ast.Constant):
        times, repeated = repeated, times
    if not isinstance(times, ast.Constant) or type(times.value) is not int or not 1 <= times.value <= LONGEST_CYCLE:
        raise ValueError(f"{notation.node_text(node)} must repeat by a whole number from 1 on, as in 3*local(96)")
    return times.value, repeated


def _interleave(node: ast.expr, heads: int) -> list[Heads]:
    """Gives each pattern of strided(l) and the like a block of its own."""
    if _call_name(node) in WORDS or (isinstance(node, ast.BinOp) and not isinstance(node.op, ast.BitOr)):
        return _cycle(node, heads)
    return [(pattern,) * heads for pattern in _patterns(node)]


def _cycle_heads(patterns: list[Pattern], heads: int) -> Heads:
    if heads % len(patterns):
        raise ValueError(f"heads(...) has {len(patterns)} patterns for {heads} heads; give a number that divides it")
    return tuple(patterns) * (heads // len(patterns))


def _make_distinct(cycle: list[Heads]) -> list[Heads]:
    """Gives each head of a block that has summary cells the next sub-block."""
    if not any(_has_cells(pattern) for block in cycle for pattern in block):
        raise ValueError("distinct is for summary cells, and there are none; leave it out")
    return [_distinct_block(block) for block in cycle]


@lru_cache(maxsize=1)  # Repeated blocks are equal.
def _distinct_block(block: Heads) -> Heads:
    parts = accumulate(map(_has_cells, block), initial=0)
    return tuple(_with_part(pattern, part) for pattern, part in zip(block, parts))


def _has_cells(pattern: Pattern) -> bool:
    return any(isinstance(leaf, Summary) for leaf in pattern.leaves)


def _with_part(pattern: Pattern, index: int) -> Pattern:
    return union(
        *(replace(leaf, part=index % (leaf.l // leaf.c)) if isinstance(leaf, Summary) else leaf for leaf in pattern.leaves)
    )


def _patterns(node: ast.expr) -> Heads:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and _call_name(node) not in notation.NAMES:
        raise ValueError(
            f"there is no {short_repr(node.func.id)}; {suggest(node.func.id.lower(), [*WORDS, *notation.NAMES])}"
        )
    return notation.read_heads(node)


def _call_name(node: ast.expr) -> str | None:
    return node.func.id.lower() if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else None


def _arguments(node: ast.expr) -> list[ast.expr]:
    assert isinstance(node, ast.Call)
    if not node.args or node.keywords:
        raise ValueError(f"{_call_name(node)} takes one or more patterns, without names")
    return node.args
