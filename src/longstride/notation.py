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

from longstride import patterns
from longstride.checks import suggest
from longstride.patterns import Pattern


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
    try:
        tree = ast.parse(f"[{text}\n]", mode="eval").body
        if not isinstance(tree, ast.List) or not tree.elts:
            raise SyntaxError
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError(f"pattern {text!r} does not read as patterns; write it like 'local(128) | column(128)'") from None
    return tuple(pattern for node in tree.elts for pattern in _heads(node, text))


def write(heads: Sequence[Pattern]) -> str:
    """Text that `parse` reads back as the same patterns."""
    return ", ".join([pattern.text for pattern in heads])


def _heads(node: ast.expr, text: str) -> tuple[Pattern, ...]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return (merged(*_heads(node.left, text), *_heads(node.right, text)),)
    if isinstance(node, ast.Name):
        node = ast.Call(node, [], [])  # 'dense' for 'dense()'
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        raise ValueError(f"pattern {text!r}: cannot read {ast.unparse(node)!r}; write it like 'local(128) | column(128)'")
    name = node.func.id.lower()
    if name not in _CALLS:
        raise ValueError(f"pattern {text!r}: there is no pattern {node.func.id!r}; {suggest(name, _CALLS)}")
    call = _CALLS[name]
    if call is merged:
        if node.keywords:
            raise ValueError(f"pattern {text!r}: merged takes patterns without names, got {node.keywords[0].arg!r}")
        return (merged(*(pattern for argument in node.args for pattern in _heads(argument, text))),)
    try:
        arguments = inspect.signature(call).bind(
            *(_number(argument, text) for argument in node.args),
            **{keyword.arg or "**": _number(keyword.value, text) for keyword in node.keywords},
        )
    except TypeError as error:
        shape = ", ".join(inspect.signature(call).parameters)
        raise ValueError(f"pattern {text!r}: {name} takes ({shape}): {error}") from None
    made = call(*arguments.args, **arguments.kwargs)
    return made if isinstance(made, tuple) else (made,)


def _number(node: ast.expr, text: str) -> int | None:
    try:
        value = ast.literal_eval(node)
    except ValueError:
        value = node
    if value is None or type(value) is int:
        return value
    raise ValueError(f"pattern {text!r}: {ast.unparse(node)!r} must be a whole number")
