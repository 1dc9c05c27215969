"""Which pattern each residual block and head has, as text: all of section 5.1.

    interleave(strided(128))                  block r has the pattern r mod p
    3*local(96) + column(96)                  interleaved at a ratio
    merged(fixed(128, 32))                    one head sees what both factorized heads see; so in every block
    heads(local(128), column(128))            one pattern for each head, again from the first if there are more heads
    distinct(merged(fixed(128, 32)))          each head has summary cells of its own: the next sub-block, of l / c
    dense()                                   full attention, the comparison

Patterns are written as `longstride.patterns.notation` has them. A sum is a cycle of blocks, a product repeats a part of it.
"""

import ast
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate

from longstride.common.checks import shown, suggest
from longstride.common.limits import check_limit
from longstride.patterns import Pattern, Summary, notation, union

Heads = tuple[Pattern, ...]
"""One pattern for each head of a block."""
LONGEST_CYCLE = 4096
WORDS = ("interleave", "heads", "distinct")
HINT = "say how blocks and heads take them: interleave(...), merged(...) or heads(...)"


@lru_cache(maxsize=32)  # At the limits an entry has some megabytes.
def place(text: str, heads: int) -> tuple[Heads, ...]:
    """The cycle of blocks that `text` names: block r has entry r modulo its length."""
    check_limit("pattern", "the length of the text", len(text), "text")
    try:
        node = notation.read_syntax(text.strip())
    except SyntaxError:
        raise ValueError(f"pattern {shown(text)} does not read as one; write it like '3*local(96) + column(96)'") from None
    try:
        return tuple(_cycle(node, heads))
    except ValueError as error:
        raise ValueError(f"pattern {shown(text)}: {error}") from None
    except RecursionError:
        raise ValueError(f"pattern {shown(text)} has too many brackets inside brackets") from None


def _cycle(node: ast.expr, heads: int) -> list[Heads]:
    if len(added := notation.operands(node, ast.Add)) > 1:
        return _joined((_cycle(one, heads) for one in added), heads)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        times, repeated = _repeated(node)
        return _joined([_cycle(repeated, heads)] * times, heads)
    match _called(node):
        case "interleave":
            return _joined((_one_block_each(argument, heads) for argument in _arguments(node)), heads)
        case "heads":
            return [_across([one for argument in _arguments(node) for one in _patterns(argument)], heads)]
        case "distinct":
            arguments = _arguments(node)
            if len(arguments) != 1:
                raise ValueError(f"distinct takes one pattern, got {len(arguments)}")
            return _with_own_cells(_cycle(arguments[0], heads))
    patterns = _patterns(node)
    if len(patterns) > 1:
        raise ValueError(f"{notation.node_text(node)} is {len(patterns)} patterns; {HINT}")
    return [patterns * heads]


def _joined(parts: Iterable[list[Heads]], heads: int) -> list[Heads]:
    found: list[Heads] = []
    for part in parts:
        if len(found) + len(part) > LONGEST_CYCLE:
            raise ValueError(f"a cycle has at most {LONGEST_CYCLE:,} blocks")
        check_limit("cycle", "blocks times heads", (len(found) + len(part)) * heads, "placed")
        found += part
    return found


def _repeated(node: ast.BinOp) -> tuple[int, ast.expr]:
    times, repeated = node.left, node.right
    if not isinstance(times, ast.Constant):
        times, repeated = repeated, times
    if not isinstance(times, ast.Constant) or type(times.value) is not int or not 1 <= times.value <= LONGEST_CYCLE:
        raise ValueError(f"{notation.node_text(node)} must repeat by a whole number from 1 on, as in 3*local(96)")
    return times.value, repeated


def _one_block_each(node: ast.expr, heads: int) -> list[Heads]:
    """strided(l) and the like stand for a block after the other here."""
    if _called(node) in WORDS or (isinstance(node, ast.BinOp) and not isinstance(node.op, ast.BitOr)):
        return _cycle(node, heads)
    return [(pattern,) * heads for pattern in _patterns(node)]


def _across(patterns: list[Pattern], heads: int) -> Heads:
    if heads % len(patterns):
        raise ValueError(f"heads(...) has {len(patterns)} patterns for {heads} heads; give a number that divides it")
    return tuple(patterns) * (heads // len(patterns))


def _with_own_cells(cycle: list[Heads]) -> list[Heads]:
    """Of the heads of a block that have summary cells, each takes the next sub-block."""
    if not any(_has_cells(pattern) for block in cycle for pattern in block):
        raise ValueError("distinct is for summary cells, and there are none; leave it out")
    return [_own_cells(block) for block in cycle]


@lru_cache(maxsize=1)  # A block that is repeated is the same each time.
def _own_cells(block: Heads) -> Heads:
    numbers = accumulate(map(_has_cells, block), initial=0)
    return tuple(_with_part(pattern, number) for pattern, number in zip(block, numbers))


def _has_cells(pattern: Pattern) -> bool:
    return any(isinstance(leaf, Summary) for leaf in pattern.leaves)


def _with_part(pattern: Pattern, number: int) -> Pattern:
    leaves = [replace(one, part=number % (one.l // one.c)) if isinstance(one, Summary) else one for one in pattern.leaves]
    return union(*leaves)


def _patterns(node: ast.expr) -> Heads:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and _called(node) not in notation.NAMES:
        raise ValueError(f"there is no {shown(node.func.id)}; {suggest(node.func.id.lower(), [*WORDS, *notation.NAMES])}")
    return notation.read_heads(node)


def _called(node: ast.expr) -> str | None:
    return node.func.id.lower() if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else None


def _arguments(node: ast.expr) -> list[ast.expr]:
    assert isinstance(node, ast.Call)
    if not node.args or node.keywords:
        raise ValueError(f"{_called(node)} takes one or more patterns, without names")
    return node.args
