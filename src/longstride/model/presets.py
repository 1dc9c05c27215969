"""The paper's networks by name, and small, medium and modern ones of our own. The suffix -dense selects full attention.

Where the paper leaves details open, presets follow its authors' code: CIFAR-10 with stride 96, one row of 32 pixels, and one
block of columns to three of rows; enwik8 with separate summary cells for each head.
"""

from collections.abc import Callable
from dataclasses import replace

from longstride.common.checks import suggest
from longstride.model.config import ModelConfig
from longstride.model.recipes import apply_recipe, check_recipe

DENSE = "-dense"


def cifar10() -> ModelConfig:
    """59 M parameters; images of 32 x 32 pixels."""
    return ModelConfig(
        layers=128,
        width=256,
        heads=2,
        context=3072,
        pattern="column(96) + 3*local(96)",
        embedding="image(32, 32, 3)",
        qk_ratio=0.5,
        ff_ratio=2.0,
        dropout=0.25,
        precision="bfloat16",
        recompute="on",
    )


def enwik8() -> ModelConfig:
    """95 M parameters; text."""
    return ModelConfig(
        layers=30,
        width=512,
        heads=8,
        context=12_288,
        pattern="distinct(merged(fixed(128, 32)))",
        embedding="matrix(128)",
        dropout=0.4,
        precision="bfloat16",
        recompute="on",
    )


def imagenet64() -> ModelConfig:
    """152 M parameters; images of 64 x 64 pixels."""
    return ModelConfig(
        layers=48,
        width=512,
        heads=16,
        context=12_288,
        pattern="interleave(strided(128))",
        embedding="image(64, 64, 3)",
        dropout=0.01,
        precision="bfloat16",
        recompute="on",
    )


def music_65536() -> ModelConfig:
    """152 M parameters; five seconds of sound at 12 kHz."""
    return ModelConfig(
        layers=48,
        width=512,
        heads=16,
        context=65_536,
        pattern="interleave(strided(256))",
        embedding="matrix(256)",
        precision="bfloat16",
        recompute="on",
    )


def music_262144() -> ModelConfig:
    """25 M parameters; 22 seconds."""
    return replace(
        music_65536(),
        layers=31,
        width=256,
        heads=8,
        context=262_144,
        pattern="interleave(strided(512))",
        embedding="matrix(512)",
    )


def music_1048576() -> ModelConfig:
    """3 M parameters; 87 seconds."""
    return replace(
        music_65536(),
        layers=13,
        width=128,
        heads=2,
        context=1_048_576,
        pattern="interleave(strided(1024))",
        embedding="matrix(1024)",
    )


def text_small() -> ModelConfig:
    """1.1 M parameters; learns a megabyte of text in minutes on two cores."""
    return apply_recipe(
        ModelConfig(
            layers=2,
            width=192,
            heads=4,
            context=512,
            pattern="local(32) + distinct(merged(fixed(32, 8)))",
            embedding="rotary",
            precision="auto",
        ),
        "modern",
    )


def text_modern() -> ModelConfig:
    """57 M parameters; text, with what makes training fast on today's GPUs (docs/log.md)."""
    return apply_recipe(
        ModelConfig(
            layers=8,
            width=768,
            heads=12,
            context=8192,
            pattern="local(1024) + distinct(merged(fixed(128, 8)))",
            embedding="rotary",
            precision="bfloat16",
        ),
        "modern",
    )


def text_medium() -> ModelConfig:
    """5 M parameters; text. A laptop samples from it faster than one reads."""
    return apply_recipe(
        ModelConfig(
            layers=6,
            width=256,
            heads=4,
            context=8192,
            pattern="local(1024) + distinct(merged(fixed(128, 8)))",
            embedding="rotary",
            precision="bfloat16",
        ),
        "modern",
    )


def image_medium() -> ModelConfig:
    """5 M parameters; images of 32 x 32 pixels."""
    return apply_recipe(
        ModelConfig(
            layers=8,
            width=256,
            heads=4,
            context=3072,
            pattern="column(96) + 3*local(96)",
            embedding="image(32, 32, 3)",
            ff_ratio=2.5,
            precision="bfloat16",
        ),
        "modern",
    )


def audio_medium() -> ModelConfig:
    """5 M parameters; a second and a third of sound at 12 kHz."""
    return apply_recipe(
        ModelConfig(
            layers=6,
            width=256,
            heads=4,
            context=16_384,
            pattern="interleave(strided(128))",
            embedding="rotary",
            precision="bfloat16",
        ),
        "modern",
    )


def image_small() -> ModelConfig:
    """0.9 M parameters; images of 32 x 32 pixels."""
    return ModelConfig(
        layers=4,
        width=128,
        heads=2,
        context=3072,
        pattern="column(96) + 3*local(96)",
        embedding="image(32, 32, 3)",
        precision="auto",
    )


def audio_small() -> ModelConfig:
    """0.9 M parameters; a sixth of a second of sound at 12 kHz."""
    return ModelConfig(
        layers=4,
        width=128,
        heads=2,
        context=2048,
        pattern="interleave(strided(64))",
        embedding="matrix(64)",
        precision="auto",
    )


PRESETS: dict[str, Callable[[], ModelConfig]] = {
    "cifar10": cifar10,
    "enwik8": enwik8,
    "imagenet64": imagenet64,
    "music-65536": music_65536,
    "music-262144": music_262144,
    "music-1048576": music_1048576,
    "text-small": text_small,
    "image-small": image_small,
    "audio-small": audio_small,
    "text-medium": text_medium,
    "image-medium": image_medium,
    "audio-medium": audio_medium,
    "text-modern": text_modern,
}


def preset(name: str, recipe: str | None = None) -> ModelConfig:
    """Returns the model config of that name. `recipe`: "paper" or "modern", instead of the preset's own."""
    if recipe is not None:
        check_recipe("preset", recipe)
    plain = name.removesuffix(DENSE)
    if plain not in PRESETS:
        raise ValueError(f"there is no preset {name!r}; {suggest(plain, PRESETS)}")
    config = PRESETS[plain]() if recipe is None else apply_recipe(PRESETS[plain](), recipe)
    return config if plain == name else replace(config, pattern="dense()")
