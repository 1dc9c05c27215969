"""How the custom ops of an implementation are joined into one differentiable operator."""

from typing import Any

from torch import Tensor


def join(forward: Any, backward: Any) -> None:
    """Makes `backward` the gradient of `forward`, both made by `torch.library.custom_op`.

    forward(q, k, v, patterns, scale) gives the output and what backward needs besides;
    backward(gradient, q, k, v, output, ..., patterns, scale, needed) gives the gradients of q, k and v.
    """

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        q, k, v, ctx.patterns, ctx.scale = inputs
        ctx.save_for_backward(q, k, v, *output)
        ctx.mark_non_differentiable(*output[1:])

    def differentiate(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        needed = list(ctx.needs_input_grad[:3])
        gradients = backward(gradient, *ctx.saved_tensors, ctx.patterns, ctx.scale, needed)
        return *(x if wanted else None for x, wanted in zip(gradients, needed)), None, None

    forward.register_autograd(differentiate, setup_context=save)
