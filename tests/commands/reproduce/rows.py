"""Results for tests, made by hand."""

from longstride.commands.reproduce.results import RowResult, ScoreRow


def row(name: str = "enwik8-fixed", bits: float = 1.2, step_seconds: float = 0.5, **changes) -> RowResult:
    """A finished row: 4 steps of 2 x 50 bytes, with a validation after the second and the fourth."""
    given = {
        "data": "text", "context": 50, "batch": 2, "parameters": 1000, "steps": 4, "step_seconds": step_seconds,
        "validation_steps": [2.0, 4.0], "validation_bits": [bits + 1, bits], "scores": [ScoreRow(0, bits, 100, 2, 0.1)],
        "machine": {"device": "a GPU", "threads": 2}, "settings": {"scale": "tiny"}, "done": 1, "wall_seconds": 90.0,
    }  # fmt: skip
    return RowResult(name, **{**given, **changes})
