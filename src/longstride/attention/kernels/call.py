"""A call of the operator, forward or backward, and its plan: backends are asked in turn for the launches of each pass.

A backend is a module with two functions, which return the launches for a pass, or None if they cannot compute it. The first
backend of a device may have a third, which reorders the passes:

    forward(call: Forward, pass_: Pass, accumulate: bool) -> list[Launch] | None
    backward(call: Backward, pass_: Pass, accumulate: bool) -> list[Launch] | None
    order(call: Forward | Backward, passes: list[Pass]) -> list[Pass]

For a new architecture, add its module to `BACKENDS`.

Tensors are [batch, heads, n, d] with any strides; only the last dimension is contiguous. A backend declines what it does not
know, by the dtype, d_qk, d_v, strides and addresses of the tensors, and by

    call.layout             fewer heads of keys, fewer queries, documents, a gradient of the lse; None in a plain call
    pass_.jobs              they may leave out heads, and differ from head to head (`pass_.shared`: they do not)
    the fields of a job     several lanes, and in a lane a window of `near` to `far` positions back (`Geometry`)
    pass_.summary           summary cells of earlier lanes
    pass_.by_block          queries that see less of their lane than its past
    pass_.most_exclusions   pairs of earlier leaves, to be left out

Forward writes the output, divided by the sum of the weights, and the lse in base 2: 0 and -inf for a query that sees no key,
or only scores of -inf. `accumulate`: an earlier pass has computed other keys of the same queries, and this one adds its own
to the results. Backward gets the output and lse of all passes. A pass writes its part of the gradients that are needed, or
adds it if `accumulate`.
"""

from collections.abc import Sequence
from functools import lru_cache
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longstride.attention.kernels.arguments import Scales
from longstride.attention.kernels.hopper.choice import is_hopper
from longstride.attention.kernels.jobs import passes
from longstride.attention.kernels.launch import Plan, Workspace, capture_safe
from longstride.attention.kernels.work import Documents, document_table
from longstride.patterns import notation

HERE = __name__.rsplit(".", 1)[0]
BACKENDS = (
    ("hopper.launch", is_hopper),
    ("general", lambda device: True),
)
"""A module, by its name in this folder, and whether it may be imported and used on a device. The last takes everything."""


class Layout(NamedTuple):
    """What a call that is not plain (`ops.py`) has beside the tensors."""

    lengths: tuple[int, ...]
    """Of the documents, as in `layout.py`."""
    d_lse: Tensor | None = None
    """Backward: the gradient of the natural lse, float32 [batch, heads, n], contiguous."""
    documents: Documents | None = None
    """None: each row is one document with as many queries as keys."""

    @property
    def key(self) -> Any:
        """For a plan's key."""
        return self.lengths, self.d_lse is None


class Forward(NamedTuple):
    """Fills output and lse [batch, heads, n], the log-sum-exp of each query's scores in base 2, float32."""

    q: Tensor
    k: Tensor
    v: Tensor
    output: Tensor
    lse: Tensor
    scale: float
    """The softmax scale times log2(e), for scores in base 2; positive."""
    workspace: Workspace
    layout: Layout | None = None
    """None: a plain call."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self[:5]


class Backward(NamedTuple):
    """Fills dq, dk and dv."""

    q: Tensor
    k: Tensor
    v: Tensor
    d_output: Tensor
    output: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    scale: float
    """As in `Forward`."""
    softmax_scale: float
    need_q: bool
    need_kv: bool
    workspace: Workspace
    layout: Layout | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self[:9]

    @property
    def scales(self) -> Scales:
        return Scales(self.scale, self.softmax_scale)


def matrices_of(call: Forward | Backward) -> list[Tensor]:
    """The call's tensors [batch, heads, n, d], in their order."""
    return [x for x in call.tensors if x.dim() == 4]


def has_only_documents(call: Forward | Backward) -> bool:
    """Whether the call has documents, and nothing else that is not plain."""
    layout = call.layout
    return layout is not None and layout.documents is not None and layout.d_lse is None and call.q.shape == call.k.shape


@lru_cache(maxsize=16)
def backends(device: torch.device) -> tuple[ModuleType, ...]:
    return tuple(import_module(f"{HERE}.{name}") for name, runs_on in BACKENDS if runs_on(device))


def make_plan(
    kind: type[Forward] | type[Backward], tensors: Sequence[Tensor], settings: Sequence[Any], patterns: str, aligned: bool,
    layout: Layout | None = None,
) -> Plan:  # fmt: skip
    """Returns the launches for all passes of the patterns, in order. `settings`: the call's fields between tensors and
    workspace; `aligned`: as in `Plan`. A layout's d_lse comes after the tensors of the call."""
    notation.parse_heads(patterns, tensors[0].shape[1])  # The tables would have rows for heads that are not there.
    direction, count = ("forward", 5) if kind is Forward else ("backward", 9)
    device = tensors[0].device
    with capture_safe(device.type == "cuda"):
        workspace = Workspace(device)
        distinct = [x.detach() for x in tensors]  # A plan tells tensors apart by `id`; a caller may pass one as q and as k.
        n = tensors[0].shape[2]
        if layout is not None:
            documents = document_table(tensors[0].shape, tensors[1].shape, layout.lengths)
            d_lse = None if layout.d_lse is None else distinct[count]
            layout = layout._replace(d_lse=d_lse, documents=documents)
            n = n if documents is None else max(row.n for row in documents.rows)
        assert distinct[4 if kind is Forward else 5].is_contiguous(), "the lse"
        call: Any = kind._make((*distinct[:count], *settings, workspace, layout))
        launches = []
        needed = [pass_ for index, pass_ in enumerate(passes(patterns, n)) if not index or not pass_.empty]
        order = getattr(backends(device)[0], "order", None)
        for index, pass_ in enumerate(order(call, needed) if order else needed):
            offers = (getattr(backend, direction)(call, pass_, index > 0) for backend in backends(device))
            launches += next(offer for offer in offers if offer is not None)
        return Plan(launches, distinct, workspace, aligned)
