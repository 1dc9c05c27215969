"""The mask function of attn_implementation="longstride": masks of transformers in the form that `attend` takes.

Every mask is an int16 tensor, also where nothing is padded: a layer without one, such as cross-attention, did not get its
mask from here, and is refused. Its shape is [rows, 1 + window, 1, n_k], with a window of 0 for layers that have none; the
second dimension only carries the number. The third is that of the queries: Gemma 4 keeps the last of them in some layers, of
the mask as of the hidden states. There are `batch` rows, in which equal neighbours are of one document, or none where each
row is one document. The third dimension is 0 where the cache does not fit: `read_mask` raises, since there may be no
layer that reads the mask, as in the first layers alone (assistant_early_exit).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import masking_utils
from transformers.masking_utils import causal_mask_function

DTYPE = torch.int16
"""Masks of users have other dtypes. Neighbouring documents differ by one, so that they differ after the conversion, too."""


class Mask(NamedTuple):
    documents: Tensor | None
    """[batch, n_k]; None where each row is one document."""
    window: int | None
    """The sliding window: query i sees keys from i - window + 1 on."""


def longstride_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    device: torch.device | None = None,
    **_: Any,
) -> Tensor:
    """Returns the mask of one kind of layer, for `read_mask`.

    With padding on the left a pattern counts from the first token of the text, so a row's results are those of the row
    without padding. Padding on the right needs no mask: no query before it sees it, and results at padding mean nothing.
    Padding between is an error.
    """
    window, packed = (None, None) if mask_function is causal_mask_function else _parts(mask_function)
    own_keys = kv_offset == 0 or window is not None
    if not own_keys or not isinstance(q_offset, int) or q_offset + q_length != kv_offset + kv_length:
        return torch.empty(0, 1, 0, kv_length, dtype=DTYPE, device=device)
    documents = packed
    if attention_mask is not None:  # transformers looks for packed sequences only without one.
        total = kv_offset + kv_length
        if attention_mask.shape != (batch_size, total):
            raise ValueError(f"longstride: attention_mask must be {[batch_size, total]}, got {list(attention_mask.shape)}")
        documents = _find_padding(attention_mask[:, kv_offset:])
    if documents is None:
        documents = torch.empty(0, kv_length, dtype=DTYPE, device=device)
    return documents.to(DTYPE)[:, None, None].expand(-1, 1 + (window or 0), -1, -1)


def read_mask(mask: Tensor | None, n_k: int) -> Mask:
    """Reads what `longstride_mask` returned for layers with n_k keys; ValueError for any other mask."""
    if mask is None:
        raise ValueError(
            "longstride: a layer has no mask, as in cross-attention and in models that do not call create_causal_mask; "
            "only causal self-attention is computed; use another attn_implementation"
        )
    if isinstance(mask, Tensor) and mask.dtype == DTYPE and mask.dim() == 4 and not mask.shape[2]:
        raise ValueError(
            "longstride: the cache must hold all keys and no others; use the default DynamicCache, no static or other one"
        )
    if not isinstance(mask, Tensor) or mask.dtype != DTYPE or mask.dim() != 4 or mask.shape[2] != 1:
        got = f"{mask.dtype} {list(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"longstride: attention_mask = {got} is not computed; give a mask of padding, [batch, n]")
    rows, sizes, _, length = mask.shape
    if length != n_k:
        raise ValueError(
            f"longstride: a layer has {n_k} keys and a mask for {length}, so they are those of another sequence; "
            "only causal self-attention is computed; use another attn_implementation"
        )
    return Mask(mask[:, 0, 0] if rows else None, sizes - 1 or None)


def _find_padding(mask: Tensor) -> Tensor | None:
    """Returns documents that tell padding on the left from text; None without any."""
    if torch.compiler.is_compiling():
        torch._assert_async(mask.all(), "longstride: under torch.compile attention_mask must have no padding")
        return None
    text = mask.bool()
    if bool((text[:, :1] & (text[:, 1:] <= text[:, :-1]).all(1, keepdim=True)).all()):
        return None
    documents = text.cumsum(1) > 0
    if bool((text[:, 1:] & ~text[:, :-1] & documents[:, :-1]).any()):
        raise ValueError(
            "longstride: attention_mask has padding between tokens; pad on the left (padding_side='left') to generate"
        )
    return documents


NOT_TRACED = "longstride: torch.compile with fullgraph=True needs attention_mask, as ones, and no sliding window"


@torch.compiler.disable(reason=NOT_TRACED)  # type: ignore[untyped-decorator]
def _parts(mask_function: Any) -> tuple[int | None, Tensor | None]:
    """Returns the window of a mask function, and its packed sequences [batch, n] if a row has several; ValueError if it
    has other parts.

    transformers makes mask functions of a few known ones. Each is told by its code, and what it was made with is read from
    its closure.
    """
    window = packed = None
    remaining = [mask_function]
    while remaining:
        part = remaining.pop()
        kind, made_with = KINDS.get(getattr(part, "__code__", None)), _closure(part)
        if kind == "and":
            remaining.extend(made_with["mask_functions"])
        elif kind == "remap":  # Positions within a packed sequence: the distances are those in the row.
            remaining.append(made_with["mask_function"])
        elif kind == "window" and window is None:
            window = made_with["sliding_window"]
        elif kind == "packed" and packed is None:
            packed = made_with["packed_sequence_mask"]
        elif kind != "causal":
            raise ValueError(
                "longstride: only causal masks with padding, packed sequences and sliding windows are computed, no "
                "cross-attention, no chunks, no other mask; turn it off in the model's config, or use another "
                "attn_implementation"
            )
    is_packed = packed is not None and bool((packed != packed[:, :1]).any())
    return window, packed if is_packed else None


def _closure(function: Any) -> dict[str, Any]:
    """Returns the variables that a nested function was made with, by name."""
    cells = getattr(function, "__closure__", None) or ()
    return dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in cells))) if cells else {}


def _known_kinds() -> dict[Any, str]:
    """Returns the kinds of mask functions by their code. Older versions of transformers do not have all of them."""
    makers: dict[str, tuple[str, tuple[Any, ...]]] = {
        "and": ("and_masks", (causal_mask_function,)),
        "remap": ("remap_positions_for_packed_sequence", (causal_mask_function, None)),
        "window": ("sliding_window_overlay", (1,)),
        "packed": ("packed_sequence_mask_function", (None,)),
    }
    known = {causal_mask_function.__code__: "causal"}
    for kind, (name, arguments) in makers.items():
        make = getattr(masking_utils, name, None)
        if make is not None:
            known[make(*arguments).__code__] = kind
    return known


KINDS = _known_kinds()
