"""Text notation for patterns.

    >>> parse("local(128) | column(128)")
    (Local(128) | Column(128),)
    >>> parse("fixed(128, 32), dense()")
    (Block(128), Summary(128, 32), Dense())

Commas separate the patterns of the heads. The names are those of `longstride.patterns`, in upper or lower case;
`strided`, `fixed` and `grid` give several heads at once, and `merged(...)` joins its arguments into one head. The repr of a
pattern parses as the same pattern. The text is never executed: only these calls and integers are allowed.
"""

import ast
import inspect
from collections.abc import Callable, Sequence
from functools import lru_cache

from longstride.common.checks import short_repr, suggest
from longstride.common.limits import check_limit
from longstride.patterns import Pattern, factorizations, leaves
from longstride.patterns.pattern import known_leaves, union


def merged(*heads: Pattern) -> Pattern:
    """Returns one head that sees the keys of all these patterns (the paper's merged head)."""
    return union(*heads)


_CALLS: dict[str, Callable[..., Pattern | tuple[Pattern, ...]]] = {
    "dense": leaves.Dense,
    "local": leaves.Local,
    "column": leaves.Column,
    "dilated": leaves.Dilated,
    "block": leaves.Block,
    "summary": leaves.Summary,
    "strided": factorizations.strided,
    "fixed": factorizations.fixed,
    "grid": factorizations.grid,
    "merged": merged,
}
NAMES = tuple(_CALLS)


@lru_cache(maxsize=1024)
def parse(text: str) -> tuple[Pattern, ...]:
    """Parses `text` into one pattern per head."""
    if not isinstance(text, str):
        raise ValueError(f"pattern {short_repr(text)} must be text, such as 'local(128) | column(128)'")
    try:
        tree = read_syntax(f"[{text}\n]")
        if not isinstance(tree, ast.List) or not tree.elts:
            raise SyntaxError
    except SyntaxError:
        raise ValueError(
            f"pattern {short_repr(text)} does not read as patterns; write it like 'local(128) | column(128)'"
        ) from None
    try:
        heads: list[Pattern] = []
        for node in tree.elts:
            heads += read_heads(node)
            check_limit("parse", "the number of patterns", len(heads), "placed")
        return tuple(heads)
    except ValueError as error:
        raise ValueError(f"pattern {short_repr(text)}: {error}") from None
    except RecursionError:
        raise ValueError(f"pattern {short_repr(text)} has too many brackets inside brackets") from None


def parse_heads(text: str, heads: int) -> tuple[Pattern, ...]:
    """As `parse`; ValueError unless it gives one pattern for each of so many heads."""
    found = parse(text)
    if len(found) != heads:
        raise ValueError(f"pattern {short_repr(text)} has {len(found)} patterns for {heads} heads; write one for each head")
    return found


def read_syntax(text: str) -> ast.expr:
    """Returns the syntax tree of an expression; SyntaxError if it is none, or too large for Python's parser."""
    try:
        if "\\" in text:  # Python warns about invalid escapes, and no pattern has a backslash.
            raise SyntaxError
        return ast.parse(text, mode="eval").body
    except (ValueError, RecursionError, MemoryError):
        raise SyntaxError from None


def operands(node: ast.expr, operator: type[ast.operator]) -> list[ast.expr]:
    """Returns a, b and c of `a | b | c`, which Python parses as (a | b) | c; without recursion, for any length."""
    right_operands = []
    while isinstance(node, ast.BinOp) and isinstance(node.op, operator):
        right_operands.append(node.right)
        node = node.left
    return [node, *reversed(right_operands)]


def node_text(node: ast.expr) -> str:
    """Returns the text of a node, for error messages."""
    try:
        return short_repr(ast.unparse(node))
    except RecursionError:
        return "a part of it"


def write(heads: Sequence[Pattern]) -> str:
    """Formats patterns as text that `parse` reads back. TypeError for a pattern that it would read as another one."""
    checked = None
    for pattern in heads:
        if pattern is not checked:  # Heads often share one pattern.
            known_leaves("notation", pattern)
            checked = pattern
    return ", ".join([pattern.text for pattern in heads])


def read_heads(node: ast.expr) -> tuple[Pattern, ...]:
    """Converts a syntax tree to one pattern per head."""
    if len(joined := operands(node, ast.BitOr)) > 1:
        return (merged(*(pattern for operand in joined for pattern in read_heads(operand))),)
    if isinstance(node, ast.Name):
        node = ast.Call(node, [], [])  # 'dense' is short for 'dense()'
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        raise ValueError(f"cannot read {node_text(node)}; write it like 'local(128) | column(128)'")
    name = node.func.id.lower()
    if name not in _CALLS:
        raise ValueError(f"there is no pattern {short_repr(node.func.id)}; {suggest(name, _CALLS)}")
    call = _CALLS[name]
    if call is merged:
        if node.keywords:
            raise ValueError(f"merged takes patterns without names, got {short_repr(node.keywords[0].arg)}")
        return (merged(*(pattern for argument in node.args for pattern in read_heads(argument))),)
    try:
        arguments = inspect.signature(call).bind(
            *(_read_integer(argument) for argument in node.args),
            **{keyword.arg or "**": _read_integer(keyword.value) for keyword in node.keywords},
        )
    except TypeError as error:
        shape = ", ".join(inspect.signature(call).parameters)
        raise ValueError(f"{name} takes ({shape}): {error}") from None
    made = call(*arguments.args, **arguments.kwargs)
    return made if isinstance(made, tuple) else (made,)


def _read_integer(node: ast.expr) -> int | None:
    constant, sign = node, 1
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        constant, sign = node.operand, -1 if isinstance(node.op, ast.USub) else 1
    if isinstance(constant, ast.Constant) and type(constant.value) is int:
        return sign * constant.value
    if isinstance(node, ast.Constant) and node.value is None:
        return None
    raise ValueError(f"{node_text(node)} must be a whole number")
