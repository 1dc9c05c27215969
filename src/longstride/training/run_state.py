"""RunState: the best validation and the recent losses of a run, saved in a checkpoint's state.json."""

from dataclasses import dataclass, field
from math import log
from typing import Any

from longstride.common.checks import finite_number, whole_number


@dataclass
class RunState:
    best: float | None = None
    """Bits per byte of the best validation so far."""
    best_step: int | None = None
    without_better: int = 0
    """Validations since the best one."""
    losses: list[float] = field(default_factory=list)
    """Losses of the steps since the last line of metrics."""
    skipped: int = 0
    """Steps since then that changed no weight, as their gradients were not finite in float16."""

    def begin_row(self) -> None:
        """Forgets the steps before a line of metrics."""
        self.losses, self.skipped = [], 0

    def loss_row(self, step: int) -> dict[str, Any]:
        """The mean loss for a line of metrics."""
        loss = sum(self.losses) / len(self.losses) if self.losses else float("nan")
        return {"step": step, "loss": loss, "bits_per_byte": loss / log(2)}

    @classmethod
    def read(cls, values: dict[str, Any], step: int, owner: str) -> "RunState":
        """Validates the content of state.json at `step`, which is untrusted. `owner` names the file in errors."""
        for name in ("best", "best_step", "without_better", "losses"):
            if name not in values:
                raise ValueError(f"{owner}: {name} is missing")
        state = cls(without_better=whole_number(owner, "without_better", values["without_better"], 0))
        if (values["best"] is None) != (values["best_step"] is None):
            raise ValueError(f"{owner}: best and best_step must both be given or both be null")
        if values["best"] is not None:
            state.best = finite_number(owner, "best", values["best"])
            state.best_step = _at_most(owner, "best_step", whole_number(owner, "best_step", values["best_step"], 1), step)
        _at_most(owner, "without_better", state.without_better, step)
        if not isinstance(values["losses"], list):
            raise ValueError(f"{owner}: losses must be a list, got {type(values['losses']).__name__}")
        _at_most(owner, "the number of losses", len(values["losses"]), step)
        skipped = whole_number(owner, "skipped", values.get("skipped", 0), 0)  # Older checkpoints do not have it.
        state.skipped = _at_most(owner, "skipped", skipped, step)
        state.losses = [finite_number(owner, "losses", loss) for loss in values["losses"]]
        return state


def _at_most(owner: str, name: str, value: int, step: int) -> int:
    if value > step:
        raise ValueError(f"{owner}: {name} must be at most its step, {step}, got {value}")
    return value
