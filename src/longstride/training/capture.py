"""A training step as one CUDA graph: the host launches the whole step at once instead of kernel by kernel.

The first steps run plainly, on a stream of their own: they compile kernels and create the optimizers' state. The next one is
captured and then replayed, as are all that follow. What differs between steps is in tensors that the graph reads: the batch,
the learning rate, the loss scale, and the seed of the default generator, which PyTorch hands to a graph at every replay. So
captured and plain steps compute the same, and a run may be resumed with either.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from longstride.model.recompute import IN_PARTS
from longstride.training.config import TrainConfig
from longstride.training.ranks import Ranks

PLAIN_STEPS = 2
"""Steps that run plainly before the capture."""


def obstacle(config: TrainConfig, device: torch.device, ranks: Ranks) -> str | None:
    """Returns why the steps of a run cannot be captured; None if they can."""
    if device.type != "cuda":
        return f"CUDA graphs need a GPU, and the device is {device}"
    if ranks.count > 1 and config.parallel == "fsdp":
        return "fsdp gathers and frees the weights of a block during a step, which is not captured"
    if config.optimizer.name == "adafactor":
        return "PyTorch's Adafactor waits for the GPU in every step; adamw and muon do not"
    return None


def choose(config: TrainConfig, device: torch.device, ranks: Ranks) -> str | None:
    """Returns why the steps of a run are not captured; None if they are. ValueError if the config demands it in vain."""
    if config.capture == "off":
        return "--capture off"
    reason = obstacle(config, device, ranks)
    if reason is not None and config.capture == "on":
        raise ValueError(f"train: --capture on is not possible: {reason}; use --capture auto or off")
    if reason is None and config.capture == "auto":
        if ranks.count > 1:
            return f"of {ranks.count} processes steps are captured with --capture on only"
        if set(config.model.recomputed) <= set(IN_PARTS):
            return (
                "all blocks are computed in parts, which takes the GPU longer than the host, and a graph would take memory"
            )
    return reason


@dataclass(frozen=True)
class Graph:
    replay: Callable[[], None]
    output: Tensor
    """The tensor that the captured function returned. Each replay overwrites it."""


class CapturedStep:
    """Calls `work` with batches of one shape, the first times plainly, then as a CUDA graph."""

    def __init__(
        self, work: Callable[[Tensor], Tensor], optimizers: Sequence[Optimizer], device: torch.device,
        report: Callable[[str], None] | None = None,
    ) -> None:  # fmt: skip
        """`report`: gets the reason if the capture fails, and steps go on plainly. Without it that is an error."""
        self.work, self.optimizers, self.device, self.report = work, optimizers, device, report
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.tokens: Tensor | None = None
        self.graph: Graph | None = None
        self.calls = 0
        self.plain_steps = PLAIN_STEPS
        """Calls before the capture."""
        self.failed = False

    def __call__(self, tokens: Tensor) -> Tensor:
        """Returns what `work` returns. The next call may overwrite it."""
        if self.tokens is None:
            self.tokens = torch.empty_like(tokens)
        assert tokens.shape == self.tokens.shape
        self.tokens.copy_(tokens)
        self.calls += 1
        if self.calls > self.plain_steps and self.graph is None and not self.failed:
            self._capture(self.tokens)
        if self.graph is None:
            with self.on_own_stream():
                return self.work(self.tokens)
        self.graph.replay()
        return self.graph.output

    def _capture(self, tokens: Tensor) -> None:
        seed = torch.initial_seed()
        try:
            with _capturable(self.optimizers):
                self.graph = record(lambda: self.work(tokens), self.stream)
        except RuntimeError as error:
            self._end_failed_capture(seed)
            if self.report is None and isinstance(error, torch.OutOfMemoryError):
                raise
            cause = error.__context__ or error  # The end of a capture that failed is an error, too.
            reason = str(cause).split("\n", 1)[0]
            if self.report is None:
                raise RuntimeError(f"train: --capture on: the step cannot be captured: {reason}") from error
            self.report(f"steps run without a CUDA graph, as the capture failed: {reason}")

    def _end_failed_capture(self, seed: int) -> None:
        self.failed = True
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        if self.stream is not None:  # A new generator: the old one still counts as captured.
            generator = torch.cuda.default_generators[self.stream.device.index]
            generator.graphsafe_set_state(torch.Generator(self.stream.device))
        torch.manual_seed(seed)

    @contextmanager
    def on_own_stream(self) -> Iterator[None]:
        """Context for what runs before the capture. Autograd remembers the stream of weights' gradients, and the default one
        has no graph."""
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            yield
        torch.cuda.current_stream(self.device).wait_stream(self.stream)


def record(work: Callable[[], Tensor], stream: torch.cuda.Stream | None) -> Graph:
    """Captures the kernels that `work` launches. They run when the graph is replayed, not before."""
    assert stream is not None
    graph = torch.cuda.CUDAGraph()
    # The outer context restores the current stream after a failure. Only calls of this thread are restricted: the loader's
    # thread allocates pinned memory meanwhile.
    with (
        torch.cuda.stream(torch.cuda.current_stream(stream.device)),
        torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"),
    ):
        output = work()
    return Graph(graph.replay, output)


@contextmanager
def _capturable(optimizers: Sequence[Optimizer]) -> Iterator[None]:
    """Context that sets `capturable`, without which Adam refuses to be captured. Fused Adam computes the same either way."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups if "capturable" in group]
    for group in groups:
        group["capturable"] = True
    try:
        yield
    finally:
        for group in groups:
            group["capturable"] = False
