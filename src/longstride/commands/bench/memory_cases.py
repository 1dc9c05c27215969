"""Networks of `longstride bench memory`: one preset at each context. Imported without torch."""

from longstride.commands.bench.checks import check_distinct, check_files
from longstride.commands.bench.settings import MemoryBenchmark
from longstride.common.checks import size_in_bytes, whole_number
from longstride.common.files import check_source
from longstride.training.config import TrainConfig
from longstride.training.presets import train_preset

CONTEXTS, SMALL_CONTEXTS = (65_536, 262_144, 1_048_576), (256, 1024)
PRESET, SMALL_PRESET = "music-65536", "audio-small"
MANY = 10**6
"""Steps of the run that the measured steps are the first of: the learning rate stays as it is."""


def check_memory_settings(settings: MemoryBenchmark, on_gpu: bool = True) -> list[TrainConfig]:
    """Validates the settings and returns the configs to train, without data: none if results are read from a file."""
    check_files("bench memory", settings)
    if settings.read is not None:
        return []
    whole_number("bench memory", "steps", settings.steps, least=1)
    size_in_bytes("bench memory", "gpu_memory", settings.gpu_memory)
    if settings.host_memory:
        size_in_bytes("bench memory", "host_memory", settings.host_memory)
    if settings.data is not None:
        check_source(settings.data)
    contexts = settings.contexts or (CONTEXTS if on_gpu else SMALL_CONTEXTS)
    check_distinct("bench memory", "contexts", contexts)
    return [_config(settings, context, on_gpu) for context in contexts]


def _config(settings: MemoryBenchmark, context: int, on_gpu: bool) -> TrainConfig:
    stride = stride_of(whole_number("bench memory", "contexts", context, least=1, limit="positions"))
    model = {
        "context": context,
        "pattern": f"interleave(strided({stride}))",
        "embedding": f"matrix({stride})",
        "recompute": settings.recompute,
        "dropout": 0.0,
    }
    optimizer = {"name": "adamw", "learning_rate": settings.learning_rate, "warmup": 0}
    return train_preset(
        settings.preset or (PRESET if on_gpu else SMALL_PRESET), model=model, optimizer=optimizer, batch=1, accumulate=1,
        steps=MANY, gpu_memory=settings.gpu_memory, validate_bytes=1,
    )  # fmt: skip


def stride_of(context: int) -> int:
    """Returns the power of two next to the square root, as the paper's music has: 256 for 65,536 bytes."""
    return 1 << (context.bit_length() // 2)
