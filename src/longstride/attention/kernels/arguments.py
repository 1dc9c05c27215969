"""The arguments of the kernels in plain Triton: what belongs together is one NamedTuple.

`Dims` and `Tiling` are compiled in: one constexpr, whose fields are constexprs too, which `compiled` makes of plain values.
The others are passed field by field, as if each were an argument.
"""

from typing import Any, NamedTuple, TypeVar

import triton
import triton.language as tl
from torch import Tensor

from longstride.attention.kernels.settings import padded

Constants = TypeVar("Constants", bound=tuple[Any, ...])


class Matrix(NamedTuple):
    """A tensor [batch, heads, n, d] and its strides; the last one is 1."""

    data: Any
    batch: Any
    head: Any
    row: Any


class Gradients(NamedTuple):
    """Those of q, k and v, as matrices."""

    dq: Any
    dk: Any
    dv: Any


class Tables(NamedTuple):
    """Int32 tensors, [jobs, fields] and [jobs, exclusions, fields]."""

    jobs: Any
    exclusions: Any
    work: Any = None
    """[items, fields], if the call has documents: tiles, as `work.py` describes them."""
    documents: Any = None
    """[documents, fields] of `work.DocumentRow`."""


class Scales(NamedTuple):
    """The factors of backward kernels."""

    scores: Any
    """The softmax scale times log2(e), for scores in base 2."""
    gradients: Any
    """The softmax scale, by which dq and dk are multiplied."""


class Sizes(NamedTuple):
    heads: Any
    n: Any
    """Of q, the output and the lse."""
    jobs: Any
    tiles: Any
    """Of a job."""
    total: Any
    """Tiles of all jobs and the whole batch."""


class RowShape(NamedTuple):
    """The rows of a matrix."""

    d: Any
    width: Any
    """The power of two that d is padded to."""
    wide: Any
    """Whether offsets inside a head need 64 bits."""


class Dims(NamedTuple):
    """The head dimensions."""

    qk: Any
    v: Any


class Tiling(NamedTuple):
    """How a kernel passes over queries and keys."""

    rows: Any
    """Queries of a tile."""
    columns: Any
    """Keys of a tile."""
    summary: Any
    """Whether summary cells of earlier lanes are keys, too."""
    even: Any
    """Whether every job's number of cells divides `columns`."""
    by_block: Any
    """Whether in some job a query does not see its lane's whole past."""
    short: Any
    """Whether windows have so few tiles that all are masked, in one loop."""
    exclude: Any
    """Exclusions of a job, at most."""
    group: Any = 1
    """Heads of queries for one of keys."""
    varied: Any = False
    """Whether there are documents, or fewer queries than keys: `Tables.work` says what a program computes."""
    together: Any = 1
    """In kernels of lanes: whole lanes of a tile, if it does not depend on the document."""
    shared: Any = False
    """Whether all heads have the same job."""
    same: Any = False
    """Whether all tensors have the same stride from row to row. One set of offsets then serves them all."""
    stages: Any = 1


def compiled(kind: type[Constants], **values: Any) -> Constants:
    """A NamedTuple of constants, from the value of each field."""
    return kind(*map(tl.constexpr, kind(**values)))


def matrix(x: Tensor) -> Matrix:
    return Matrix(x, x.stride(0), x.stride(1), x.stride(2))


def row_shape(x: Tensor, wide: bool) -> RowShape:
    return compiled(RowShape, d=x.shape[3], width=padded(x.shape[3]), wide=wide)


def dims(q: Tensor, v: Tensor, wide: bool) -> Dims:
    shapes = row_shape(q, wide), row_shape(v, wide)
    if not triton.knobs.runtime.interpret:  # The interpreter has no attributes of constexprs.
        shapes = tl.constexpr(shapes[0]), tl.constexpr(shapes[1])
    return Dims(*shapes)


def row_sizes(x: Tensor, rows: int) -> Sizes:
    """For tiles of so many rows, and no jobs but the heads."""
    batch, heads, n, _ = x.shape
    tiles = -(-n // rows)
    return Sizes(heads, n, heads, tiles, batch * heads * tiles)
