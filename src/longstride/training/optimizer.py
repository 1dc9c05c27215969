"""Optimizers by name, and the learning rate schedule."""

from collections.abc import Iterable, Mapping, Sequence
from math import cos, pi

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Adafactor, AdamW, Optimizer

from longstride.model.attention import Attention
from longstride.training.config import OptimizerConfig
from longstride.training.muon import ROWS, BatchedMuon
from longstride.training.ranks import SINGLE_RANK, Ranks

BLOCKS = "blocks."
FACTOR = "rate_factor"
"""Key of a parameter group: the multiple of the learning rate that it has."""


def warmup_steps(config: OptimizerConfig, steps: int) -> int:
    """Returns the warm-up steps of a run: those configured, but at most a tenth of the run."""
    return min(config.warmup, steps // 10)


def learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """Linear warm-up from 0, the peak until `flat` of the run, then a cosine or a line to `final` times the peak.

    Steps count from 0.
    """
    warmup = warmup_steps(config, steps)
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    fall = max(warmup, config.flat * steps)
    done = max(0, step - fall) / max(1, steps - fall)
    left = (1 + cos(pi * done)) / 2 if config.schedule == "cosine" else 1 - done
    return config.learning_rate * (config.final + (1 - config.final) * left)


def describe_extension(config: OptimizerConfig, step: int, before: int, steps: int) -> str:
    """Describes the learning rates of a run that is extended from `before` to `steps` steps, after `step` of them."""
    was, now = learning_rate(config, max(0, step - 1), before), learning_rate(config, step, steps)
    return (
        f"from {before:,} to {steps:,} steps; from step {step + 1:,} on it has the learning rates of a run of {steps:,} "
        f"steps: {now:.3g} now, {was:.3g} before"
    )


def make_optimizers(
    model: nn.Module, config: OptimizerConfig, fused: bool | None = None, ranks: Ranks = SINGLE_RANK
) -> list[Optimizer]:
    """Returns optimizers that together have every parameter once. Only those with 2 or more dimensions decay.

    fused: whether AdamW is PyTorch's fused one; by default on GPUs.
    ranks: the processes that have the same weights and gradients; Muon shares its work among them.
    """
    named = dict(model.named_parameters())
    if config.name == "adafactor":
        groups = _groups(named, config)
        return [Adafactor(groups, lr=config.learning_rate)]
    matrices = {}
    if config.name == "muon":
        matrices = {name: x for name, x in named.items() if x.ndim == 2 and name.startswith(BLOCKS)}
    rest = {name: x for name, x in named.items() if name not in matrices}
    if fused is None:
        fused = bool(rest) and all(x.device.type == "cuda" for x in rest.values())
    betas = (config.beta1, config.beta2)
    optimizers: list[Optimizer] = [
        AdamW(_groups(rest, config), lr=config.learning_rate, betas=betas, eps=config.epsilon, fused=fused)
    ]
    if matrices:
        # Update sizes like Adam's, so that one learning rate serves both.
        muon = BatchedMuon(
            _muon_groups(model, matrices, config),
            lr=config.learning_rate,
            weight_decay=config.decay,
            momentum=config.momentum,
            adjust_lr_fn="match_rms_adamw",
        )
        muon.ranks = ranks
        optimizers.append(muon)
    return optimizers


def _muon_groups(model: nn.Module, matrices: Mapping[str, Tensor], config: OptimizerConfig) -> list[dict[str, object]]:
    """Returns Muon's groups of parameters: with split_projections a group for each way in which matrices are split."""
    rows: dict[str, tuple[int, ...]] = {}
    if config.split_projections:
        layers = (item for item in model.named_modules() if isinstance(item[1], Attention))
        rows = {f"{name}.query_key_value.weight": layer.sizes for name, layer in layers}
    groups: dict[tuple[int, ...], list[Tensor]] = {}
    for name, x in matrices.items():
        groups.setdefault(rows.get(name, ()), []).append(x)
    return [{"params": group, **({ROWS: key} if key else {})} for key, group in groups.items()]


def can_skip_on_device(optimizers: Sequence[Optimizer]) -> bool:
    """Whether these optimizers read from the GPU whether to skip a step, and the learning rate."""
    parameters = (x for optimizer in optimizers for group in optimizer.param_groups for x in group["params"])
    able = all(isinstance(optimizer, BatchedMuon) or optimizer.defaults.get("fused", False) for optimizer in optimizers)
    return able and all(x.is_cuda and not isinstance(x, DTensor) for x in parameters)


def rate_factors(optimizers: Iterable[Optimizer]) -> set[float]:
    """Returns the multiples of the learning rate that some weights have."""
    return {group.get(FACTOR, 1.0) for optimizer in optimizers for group in optimizer.param_groups}


def set_learning_rate(optimizers: Iterable[Optimizer], rate: float, tensors: Mapping[float, Tensor] | None = None) -> None:
    """Sets the rate of every group, times its factor. `tensors`: for each factor the tensor that has the rate."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            factor = group.get(FACTOR, 1.0)
            group["lr"] = rate * factor if tensors is None else tensors[factor]


def _groups(named: Mapping[str, Tensor], config: OptimizerConfig) -> list[dict[str, object]]:
    """Returns the groups of parameters with the same decay and the same factor; those that decay come first."""
    groups: dict[tuple[bool, float], list[Tensor]] = {}
    for name, x in named.items():
        decays = x.ndim >= 2 and (config.decayed == "all" or name.startswith(BLOCKS))
        factor = config.embedding_factor if name.startswith("embedding.") else 1.0
        groups.setdefault((not decays, factor), []).append(x)
    return [
        {"params": group, "weight_decay": 0.0 if without else config.decay, FACTOR: factor}
        for (without, factor), group in sorted(groups.items(), key=lambda item: item[0])
    ]
