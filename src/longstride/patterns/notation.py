"""Patterns as text that a person can read and type.

    >>> parse("local(128) | column(128)")
    (Local(128) | Column(128),)
    >>> parse("fixed(128, 32), dense()")
    (Block(128), Summary(128, 32), Dense())

One pattern for each head, between commas. The names are those of `longstride.patterns` in any case; `strided`, `fixed`
and `grid` stand for several heads at once, and `merged(...)` joins what is inside into one head. What `repr` prints of a
pattern reads back as the same pattern. The text is never executed: it may hold these calls and whole numbers, no more.
"""

import ast
import inspect
from collections.abc import Callable, Sequence
from functools import lru_cache

from longstride.common.checks import shown, suggest
from longstride.common.limits import check_limit
from longstride.patterns import Pattern
from longstride.patterns import leaves as patterns


def merged(*heads: Pattern) -> Pattern:
    """One head that sees what any of these sees (the paper's merged head)."""
    return patterns.union(*heads)


_CALLS: dict[str, Callable[..., Pattern | tuple[Pattern, ...]]] = {
    "dense": patterns.Dense,
    "local": patterns.Local,
    "column": patterns.Column,
    "dilated": patterns.Dilated,
    "block": patterns.Block,
    "summary": patterns.Summary,
    "strided": patterns.strided,
    "fixed": patterns.fixed,
    "grid": patterns.grid,
    "merged": merged,
}
NAMES = tuple(_CALLS)


@lru_cache(maxsize=1024)
def parse(text: str) -> tuple[Pattern, ...]:
    """The patterns that `text` names, one for each head."""
    if not isinstance(text, str):
        raise ValueError(f"pattern {shown(text)} must be text, such as 'local(128) | column(128)'")
    try:
        tree = read_syntax(f"[{text}\n]")
        if not isinstance(tree, ast.List) or not tree.elts:
            raise SyntaxError
    except SyntaxError:
        raise ValueError(
            f"pattern {shown(text)} does not read as patterns; write it like 'local(128) | column(128)'"
        ) from None
    try:
        found: list[Pattern] = []
        for node in tree.elts:
            found += read_heads(node)
            check_limit("parse", "the number of patterns", len(found), "placed")
        return tuple(found)
    except ValueError as error:
        raise ValueError(f"pattern {shown(text)}: {error}") from None
    except RecursionError:
        raise ValueError(f"pattern {shown(text)} has too many brackets inside brackets") from None


def read_syntax(text: str) -> ast.expr:
    """The syntax tree of an expression; SyntaxError if it is none, or larger than Python can read."""
    try:
        if "\\" in text:  # Python would warn of some of them, and no pattern has one.
            raise SyntaxError
        return ast.parse(text, mode="eval").body
    except (ValueError, RecursionError, MemoryError):
        raise SyntaxError from None


def operands(node: ast.expr, operator: type[ast.operator]) -> list[ast.expr]:
    """a, b and c of `a | b | c`, of which Python makes (a | b) | c; without recursion, however long it is."""
    found = []
    while isinstance(node, ast.BinOp) and isinstance(node.op, operator):
        found.append(node.right)
        node = node.left
    return [node, *reversed(found)]


def written(node: ast.expr) -> str:
    """How a part of the text reads, for errors."""
    try:
        return shown(ast.unparse(node))
    except RecursionError:
        return "a part of it"


def write(heads: Sequence[Pattern]) -> str:
    """Text that `parse` reads back as the same patterns."""
    return ", ".join([pattern.text for pattern in heads])


def read_heads(node: ast.expr) -> tuple[Pattern, ...]:
    """The patterns that a part of the text names."""
    if len(joined := operands(node, ast.BitOr)) > 1:
        return (merged(*(pattern for one in joined for pattern in read_heads(one))),)
    if isinstance(node, ast.Name):
        node = ast.Call(node, [], [])  # 'dense' for 'dense()'
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        raise ValueError(f"cannot read {written(node)}; write it like 'local(128) | column(128)'")
    name = node.func.id.lower()
    if name not in _CALLS:
        raise ValueError(f"there is no pattern {shown(node.func.id)}; {suggest(name, _CALLS)}")
    call = _CALLS[name]
    if call is merged:
        if node.keywords:
            raise ValueError(f"merged takes patterns without names, got {shown(node.keywords[0].arg)}")
        return (merged(*(pattern for argument in node.args for pattern in read_heads(argument))),)
    try:
        arguments = inspect.signature(call).bind(
            *(_number(argument) for argument in node.args),
            **{keyword.arg or "**": _number(keyword.value) for keyword in node.keywords},
        )
    except TypeError as error:
        shape = ", ".join(inspect.signature(call).parameters)
        raise ValueError(f"{name} takes ({shape}): {error}") from None
    made = call(*arguments.args, **arguments.kwargs)
    return made if isinstance(made, tuple) else (made,)


def _number(node: ast.expr) -> int | None:
    number, sign = node, 1
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        number, sign = node.operand, -1 if isinstance(node.op, ast.USub) else 1
    if isinstance(number, ast.Constant) and type(number.value) is int:
        return sign * number.value
    if isinstance(node, ast.Constant) and node.value is None:
        return None
    raise ValueError(f"{written(node)} must be a whole number")
