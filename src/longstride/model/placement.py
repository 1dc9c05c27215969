"""Which pattern each residual block and head has, as text: all of section 5.1.

    interleave(strided(128))                  block r has the pattern r mod p
    3*local(96) + column(96)                  interleaved at a ratio
    merged(fixed(128, 32))                    one head sees what both factorized heads see; so in every block
    heads(local(128), column(128))            one pattern for each head, again from the first if there are more heads
    distinct(merged(fixed(128, 32)))          each head has summary cells of its own: sub-block h mod (l / c) for head h
    dense()                                   full attention, the comparison

Patterns are written as `longstride.notation` has them. A sum is a cycle of blocks, a product repeats a part of it.
"""

import ast
from dataclasses import replace
from functools import lru_cache

from longstride import notation
from longstride.patterns import Pattern, Summary, union

Heads = tuple[Pattern, ...]
"""One pattern for each head of a block."""
LONGEST_CYCLE = 4096
HINT = "say how blocks and heads take them: interleave(...), merged(...) or heads(...)"


@lru_cache(maxsize=256)
def place(text: str, heads: int) -> tuple[Heads, ...]:
    """The cycle of blocks that `text` names: block r has entry r modulo its length."""
    try:
        node = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError(f"pattern {text!r} does not read as one; write it like '3*local(96) + column(96)'") from None
    return tuple(_cycle(node, heads, text))


def _cycle(node: ast.expr, heads: int, text: str) -> list[Heads]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        found = _cycle(node.left, heads, text) + _cycle(node.right, heads, text)
        if len(found) > LONGEST_CYCLE:
            raise ValueError(f"pattern {text!r}: a cycle has at most {LONGEST_CYCLE:,} blocks")
        return found
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        return _repeated(node, heads, text)
    match _called(node):
        case "interleave":
            return [block for argument in _arguments(node, text) for block in _one_block_each(argument, heads, text)]
        case "heads":
            return [_across([one for argument in _arguments(node, text) for one in _patterns(argument)], heads, text)]
        case "distinct":
            arguments = _arguments(node, text)
            if len(arguments) != 1:
                raise ValueError(f"pattern {text!r}: distinct takes one pattern, got {len(arguments)}")
            return [_with_own_cells(block, text) for block in _cycle(arguments[0], heads, text)]
    patterns = _patterns(node)
    if len(patterns) > 1:
        raise ValueError(f"pattern {text!r}: {ast.unparse(node)!r} is {len(patterns)} patterns; {HINT}")
    return [patterns * heads]


def _repeated(node: ast.BinOp, heads: int, text: str) -> list[Heads]:
    times, repeated = node.left, node.right
    if not isinstance(times, ast.Constant):
        times, repeated = repeated, times
    if not isinstance(times, ast.Constant) or type(times.value) is not int or not 1 <= times.value <= LONGEST_CYCLE:
        raise ValueError(
            f"pattern {text!r}: {ast.unparse(node)!r} must repeat by a whole number from 1 on, as in 3*local(96)"
        )
    return _cycle(repeated, heads, text) * times.value


def _one_block_each(node: ast.expr, heads: int, text: str) -> list[Heads]:
    """strided(l) and the like stand for a block after the other here."""
    if _called(node) in ("interleave", "heads", "distinct") or not _is_pattern(node):
        return _cycle(node, heads, text)
    return [(pattern,) * heads for pattern in _patterns(node)]


def _across(patterns: list[Pattern], heads: int, text: str) -> Heads:
    if heads % len(patterns):
        raise ValueError(
            f"pattern {text!r}: heads(...) has {len(patterns)} patterns for {heads} heads; give a number that divides it"
        )
    return tuple(patterns) * (heads // len(patterns))


def _with_own_cells(block: Heads, text: str) -> Heads:
    if not any(isinstance(leaf, Summary) for pattern in block for leaf in pattern.leaves):
        raise ValueError(f"pattern {text!r}: distinct is for summary cells, and there are none; leave it out")
    return tuple(
        union(*(replace(leaf, part=head % (leaf.l // leaf.c)) if isinstance(leaf, Summary) else leaf for leaf in one.leaves))
        for head, one in enumerate(block)
    )


def _patterns(node: ast.expr) -> Heads:
    return notation.parse(ast.unparse(node))


def _is_pattern(node: ast.expr) -> bool:
    return not isinstance(node, ast.BinOp) or isinstance(node.op, ast.BitOr)


def _called(node: ast.expr) -> str | None:
    return node.func.id.lower() if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else None


def _arguments(node: ast.expr, text: str) -> list[ast.expr]:
    assert isinstance(node, ast.Call)
    if not node.args or node.keywords:
        raise ValueError(f"pattern {text!r}: {_called(node)} takes one or more patterns, without names")
    return node.args
