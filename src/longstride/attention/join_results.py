"""join(): attention over all keys from results over disjoint parts of them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from longstride.attention.precision import DTYPES
from longstride.common.checks import short_repr


def join(outputs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Joins results of `attend(..., return_lse=True)` for the same queries over disjoint sets of keys.

    In each call the queries are at positions of its own keys, by default the last ones. So several queries do not see all
    of a part that lies before them; join a query at a time, or parts in which that holds.

    Args:
        outputs: Each [batch, heads, n_q, d_v].
        lses: Each [batch, heads, n_q], float32 or float64.

    Returns:
        The output and the lse over all of the keys, with gradients. A query that sees no key in any part gets output 0 and
        lse -inf. As in `attend`, an lse of +inf in any part makes its output NaN and its lse +inf.
    """
    _validate(outputs, lses)
    parts = torch.stack(list(lses))  # [parts, batch, heads, n_q]
    largest = parts.detach().amax(0)
    largest = largest.masked_fill(largest == -torch.inf, 0)
    weights = (parts - largest).exp()
    total = weights.sum(0)
    nothing = total == 0
    total = total.masked_fill(nothing, 1)
    weights = weights / total
    output = sum(weight.unsqueeze(-1) * part for weight, part in zip(weights, outputs))
    assert isinstance(output, Tensor)
    lse = (largest + total.log()).masked_fill(nothing, -torch.inf).masked_fill(largest == torch.inf, torch.inf)
    return output.to(outputs[0].dtype), lse


def _validate(outputs: Sequence[Tensor], lses: Sequence[Tensor]) -> None:
    for name, given in (("outputs", outputs), ("lses", lses)):
        if not isinstance(given, list | tuple) or not given or not all(isinstance(x, Tensor) for x in given):
            raise ValueError(f"join: {name} must be a list or tuple of tensors, got {short_repr(given)}")
    if len(outputs) != len(lses):
        raise ValueError(f"join: outputs has {len(outputs)} tensors and lses {len(lses)}; give one lse for each output")
    shape = outputs[0].shape
    for index, (output, lse) in enumerate(zip(outputs, lses)):
        if output.dim() != 4 or output.shape != shape:
            raise ValueError(
                f"join: outputs[{index}] has shape {list(output.shape)}; all must be [batch, heads, n_q, d_v] and alike, "
                f"and outputs[0] is {list(shape)}"
            )
        if lse.shape != shape[:3]:
            raise ValueError(f"join: lses[{index}] has shape {list(lse.shape)}; it must be {list(shape[:3])}")
        if output.dtype not in DTYPES or output.dtype != outputs[0].dtype:
            raise ValueError(
                f"join: outputs[{index}] has dtype {output.dtype}; all must be float64, float32, bfloat16 or float16, and "
                f"that of outputs[0], {outputs[0].dtype}"
            )
        if lse.dtype not in (torch.float32, torch.float64) or lse.dtype != lses[0].dtype:
            raise ValueError(
                f"join: lses[{index}] has dtype {lse.dtype}; all must be float32, or float64, as attend returns them"
            )
        if not output.device == lse.device == outputs[0].device:
            raise ValueError(
                f"join: outputs[{index}] is on {output.device} and lses[{index}] on {lse.device}; all must be on the device "
                f"of outputs[0], {outputs[0].device}"
            )
