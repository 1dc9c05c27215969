"""How far a run has come, beside its tensors: the numbers of a checkpoint's state.json."""

from dataclasses import dataclass, field
from math import log
from typing import Any

from longstride.common.checks import finite_number, whole_number


@dataclass
class Standing:
    best: float | None = None
    """Bits per byte of the best validation so far."""
    best_step: int | None = None
    without_better: int = 0
    """Validations since then."""
    losses: list[float] = field(default_factory=list)
    """Of the steps since the last line of metrics."""

    def loss_row(self, step: int) -> dict[str, Any]:
        """The mean loss for a line of metrics."""
        loss = sum(self.losses) / len(self.losses) if self.losses else float("nan")
        return {"step": step, "loss": loss, "bits_per_byte": loss / log(2)}

    @classmethod
    def read(cls, numbers: dict[str, Any], step: int, owner: str) -> "Standing":
        """From state.json of that step, which somebody else may have written. `owner` names it in errors."""
        for name in ("best", "best_step", "without_better", "losses"):
            if name not in numbers:
                raise ValueError(f"{owner}: {name} is missing")
        found = cls(without_better=whole_number(owner, "without_better", numbers["without_better"], 0))
        if (numbers["best"] is None) != (numbers["best_step"] is None):
            raise ValueError(f"{owner}: best and best_step must both be there or both be null")
        if numbers["best"] is not None:
            found.best = finite_number(owner, "best", numbers["best"])
            found.best_step = _at_most(owner, "best_step", whole_number(owner, "best_step", numbers["best_step"], 1), step)
        _at_most(owner, "without_better", found.without_better, step)
        if not isinstance(numbers["losses"], list):
            raise ValueError(f"{owner}: losses must be a list, got {type(numbers['losses']).__name__}")
        _at_most(owner, "the number of losses", len(numbers["losses"]), step)
        found.losses = [finite_number(owner, "losses", loss) for loss in numbers["losses"]]
        return found


def _at_most(owner: str, name: str, value: int, step: int) -> int:
    if value > step:
        raise ValueError(f"{owner}: {name} must be at most its step, {step}, got {value}")
    return value
