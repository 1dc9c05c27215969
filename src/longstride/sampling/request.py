"""A request for samples: every flag of `longstride sample`. Imported without torch and numpy."""

from dataclasses import dataclass
from pathlib import Path

from longstride.common.checks import finite_number, whole_number
from longstride.data.kinds import KindName
from longstride.sampling.params import SamplingParams

OWNER = "sample"
LARGEST_SCALE = 64


@dataclass(frozen=True)
class Request:
    length: int | None = None
    """Bytes after the prompt. Left out: 500 for text, otherwise up to the context. Beyond the context the window slides: its
    last half is the prompt of the next. Images are always whole."""
    prompt: str | None = None
    """Text that samples begin with."""
    prompt_file: Path | None = None
    """File that samples begin with: text, bytes, a sound, or images (PNG, JPEG, npy, or a folder of them), whose upper part
    is kept and the rest generated."""
    items: tuple[int, ...] = ()
    """Which images of the prompt file, from 0 on; all if left out."""
    keep_top: float | None = None
    """Fraction of these images that is kept; half if left out."""
    seconds: float | None = None
    """Seconds kept from the beginning of a sound. Left out: one, or half of the context if that is less."""
    scale: int = 1
    """Magnification of images: each pixel becomes a square of this size."""
    count: int = 1
    """Number of samples; for each image, if images are completed."""
    batch: int | None = None
    """Samples generated together; left out: as many as have 65,536 bytes. It does not change the samples."""
    seed: int = 0
    """The same seed gives the same samples."""
    temperature: float = 1.0
    """Below 1 likely bytes become likelier; 1 is the model's distribution."""
    top_k: int | None = None
    """Draw only from the k most likely bytes; 1 always takes the most likely."""
    top_p: float | None = None
    """Draw only from the smallest set of bytes with this total probability."""
    out: Path | None = None
    """A file for all samples, or a folder (a name without a suffix) with a file for each. Left out: sample.txt, .png, .wav
    or .bin in the run; a single text is printed."""
    force: bool = False
    """Replace existing files."""
    kind: KindName | None = None
    """What the bytes are, if the run or the model does not say."""
    checkpoint: str | None = None
    """A checkpoint of the run, such as step-1000, instead of its best weights."""
    device: str = "auto"
    """Auto is the GPU if there is one."""

    def check(self) -> None:
        """Raises ValueError for values that no model accepts."""
        if self.prompt is not None and self.prompt_file is not None:
            raise ValueError(f"{OWNER}: prompt = {self.prompt!r} and prompt_file = {str(self.prompt_file)!r}: give one")
        if self.prompt_file is not None and not self.prompt_file.exists():
            raise ValueError(f"{OWNER}: prompt_file = {str(self.prompt_file)!r} does not exist; give a file")
        whole_number(OWNER, "count", self.count, 1)
        if whole_number(OWNER, "scale", self.scale, 1) > LARGEST_SCALE:
            raise ValueError(f"{OWNER}: scale must be at most {LARGEST_SCALE}, got {self.scale}")
        for name in ("batch", "length"):
            if getattr(self, name) is not None:
                whole_number(OWNER, name, getattr(self, name), 1)
        if self.keep_top is not None and not 0 < self.keep_top < 1:
            raise ValueError(f"{OWNER}: keep_top must be between 0 and 1, got {self.keep_top}; 0.5 keeps the upper half")
        if self.seconds is not None and finite_number(OWNER, "seconds", self.seconds) <= 0:
            raise ValueError(f"{OWNER}: seconds must be above 0, got {self.seconds}")
        try:
            SamplingParams(self.temperature, self.top_k, self.top_p)
        except ValueError as error:
            raise ValueError(f"{OWNER}: {str(error).removeprefix('generate: ')}") from None
