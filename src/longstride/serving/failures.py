"""Errors of the engine. Their messages are for clients: they name nothing of the machine."""

FAILED = "the model failed; the server's log says why"
NOT_FINITE = "the model's logits are not finite: its weights are not, or are too large for its precision"


class BusyError(Exception):
    """The queue is full."""

    def __init__(self, retry_after: int) -> None:
        super().__init__(f"the queue is full; try again in {retry_after} s")
        self.retry_after = retry_after


class StoppingError(Exception):
    """The engine finishes what is under way and takes nothing new."""


class ModelError(Exception):
    """The model gave nothing that can be used."""
