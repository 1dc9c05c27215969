"""Which pattern each residual block and head has, as text: all of section 5.1.

    interleave(strided(128))                  block r has the pattern r mod p
    3*local(96) + column(96)                  interleaved at a ratio
    merged(fixed(128, 32))                    one head sees what both factorized heads see; so in every block
    heads(local(128), column(128))            one pattern for each head, again from the first if there are more heads
    distinct(merged(fixed(128, 32)))          each head has summary cells of its own: the next sub-block, of l / c
    dense()                                   full attention, the comparison

Patterns are written as `longstride.notation` has them. A sum is a cycle of blocks, a product repeats a part of it.
"""

import ast
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate

from longstride import notation
from longstride.checks import suggest
from longstride.patterns import Pattern, Summary, union

Heads = tuple[Pattern, ...]
"""One pattern for each head of a block."""
LONGEST_CYCLE = 4096
WORDS = ("interleave", "heads", "distinct")
HINT = "say how blocks and heads take them: interleave(...), merged(...) or heads(...)"


@lru_cache(maxsize=256)
def place(text: str, heads: int) -> tuple[Heads, ...]:
    """The cycle of blocks that `text` names: block r has entry r modulo its length."""
    try:
        node = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError(f"pattern {text!r} does not read as one; write it like '3*local(96) + column(96)'") from None
    try:
        return tuple(_cycle(node, heads))
    except ValueError as error:
        raise ValueError(f"pattern {text!r}: {error}") from None


def _cycle(node: ast.expr, heads: int) -> list[Heads]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _joined([_cycle(node.left, heads), _cycle(node.right, heads)])
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        times, repeated = _repeated(node)
        return _joined([_cycle(repeated, heads)] * times)
    match _called(node):
        case "interleave":
            return _joined([_one_block_each(argument, heads) for argument in _arguments(node)])
        case "heads":
            return [_across([one for argument in _arguments(node) for one in _patterns(argument)], heads)]
        case "distinct":
            arguments = _arguments(node)
            if len(arguments) != 1:
                raise ValueError(f"distinct takes one pattern, got {len(arguments)}")
            return _with_own_cells(_cycle(arguments[0], heads))
    patterns = _patterns(node)
    if len(patterns) > 1:
        raise ValueError(f"{ast.unparse(node)!r} is {len(patterns)} patterns; {HINT}")
    return [patterns * heads]


def _joined(parts: list[list[Heads]]) -> list[Heads]:
    if sum(map(len, parts)) > LONGEST_CYCLE:
        raise ValueError(f"a cycle has at most {LONGEST_CYCLE:,} blocks")
    return [block for part in parts for block in part]


def _repeated(node: ast.BinOp) -> tuple[int, ast.expr]:
    times, repeated = node.left, node.right
    if not isinstance(times, ast.Constant):
        times, repeated = repeated, times
    if not isinstance(times, ast.Constant) or type(times.value) is not int or not 1 <= times.value <= LONGEST_CYCLE:
        raise ValueError(f"{ast.unparse(node)!r} must repeat by a whole number from 1 on, as in 3*local(96)")
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
    found = []
    for block in cycle:
        numbers = accumulate(map(_has_cells, block), initial=0)
        found.append(tuple(_with_part(pattern, number) for pattern, number in zip(block, numbers)))
    return found


def _has_cells(pattern: Pattern) -> bool:
    return any(isinstance(leaf, Summary) for leaf in pattern.leaves)


def _with_part(pattern: Pattern, number: int) -> Pattern:
    leaves = [replace(one, part=number % (one.l // one.c)) if isinstance(one, Summary) else one for one in pattern.leaves]
    return union(*leaves)


def _patterns(node: ast.expr) -> Heads:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and _called(node) not in notation.NAMES:
        raise ValueError(f"there is no {node.func.id!r}; {suggest(node.func.id.lower(), [*WORDS, *notation.NAMES])}")
    return notation.parse(ast.unparse(node))


def _called(node: ast.expr) -> str | None:
    return node.func.id.lower() if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else None


def _arguments(node: ast.expr) -> list[ast.expr]:
    assert isinstance(node, ast.Call)
    if not node.args or node.keywords:
        raise ValueError(f"{_called(node)} takes one or more patterns, without names")
    return node.args
