"""Images as bytes in raster order, channel fastest; and back to PNG files, one by one or as a sheet."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from longstride.common.atomic import atomic_path
from longstride.common.checks import short_repr, whole_number
from longstride.common.lazy import import_optional
from longstride.data import cifar, image_files
from longstride.data.image_files import ARRAYS, LOOKED_FOR, MODES, PICTURES, open_images, shape_text
from longstride.data.kind import DataKind, Prompt, name_prompt_in_errors
from longstride.data.limits import Limit
from longstride.data.plan import Bytes, Plan, data_suffix
from longstride.data.streams import detect_compression

ACROSS = 8
"""The most images in a row of a sheet of samples."""
EXAMPLES_ACROSS = 4
GREY = b"\x80"
MOST_PROMPTS = 64
"""The most images of a file that are completed unless they are chosen by --items."""


class Images(DataKind):
    name = "images"
    label = "images"
    nouns = ("image", "images")
    suffixes = PICTURES + ARRAYS
    has_items = True
    presets = ("image-small", "image-medium", "cifar10", "imagenet64")
    ending = ".png"
    needs_ending = True
    overview_name = "sheet.png"
    can_join = True
    prompt_example = "an image, as in --prompt-file a.png"
    prompt_options = ("keep_top", "items")
    output_options = ("scale",)
    examples = 16

    @classmethod
    def plan(
        cls, source: Path, limit: Limit | None = None, join: bool = False, others: Sequence[str] = ()
    ) -> Plan:  # fmt: skip
        return image_files.plan(cls.name, source, limit, join)

    @classmethod
    def recognizes(cls, path: Path) -> bool:
        """Whether it is a batch of CIFAR-10 in its binary form, or a tar archive."""
        if data_suffix(path) == ".bin" and cifar.is_binary(path):
            return True
        return detect_compression(path) != "zip" and image_files.is_tar(path)

    @classmethod
    def recognizes_folder(cls, folder: Path, paths: Sequence[Path]) -> bool:
        return cifar.find_batches(folder) is not None

    @classmethod
    def looked_for(cls) -> str:
        return f"{cls.label} ({LOOKED_FOR})"

    @classmethod
    def describe_misnamed(cls, start: bytes) -> str | None:
        if start.startswith((b"\x89PNG\r\n", b"\xff\xd8\xff", b"\x93NUMPY")):
            return "holds an image or an array; give it the ending .png, .jpg or .npy"
        return None

    @classmethod
    def check_form(cls, owner: str, item: Sequence[Any], rate: object) -> None:
        if len(item) != 3:
            raise ValueError(f"{owner}: item of images must be [height, width, channels], got {short_repr(list(item))}")
        for name, size in zip(("height", "width", "channels"), item):
            whole_number(owner, name, size, 1)
        super().check_form(owner, (), rate)

    @classmethod
    def item_of_model(cls, sizes: tuple[int, ...]) -> tuple[int, ...]:
        return sizes if len(sizes) == 3 else ()

    @classmethod
    def of_model(cls, owner: str, known: DataKind | None, sizes: tuple[int, ...], embedding: str) -> Self:
        item = (known.item if known else ()) or cls.item_of_model(sizes)
        if not item:
            raise ValueError(
                f"{owner}: kind = 'images', and neither the run's data nor the embedding {embedding!r} says how large "
                "they are; give another --kind"
            )
        if item[2] not in MODES:
            raise ValueError(f"{owner}: a PNG cannot have {item[2]} channels ({shape_text(item)}); give --kind bytes")
        return cls(item)

    def describe(self) -> str:
        return f"images of {shape_text(self.item)}"

    def check_writer(self, owner: str) -> None:
        import_optional("PIL.Image", f"{owner}: writing images", "data")

    def write_sample(self, data: bytes, path: Path, scale: int = 1) -> None:
        to_png(data, self.item, path, scale)

    def write_together(
        self, samples: Sequence[bytes], path: Path, prompts: Sequence[bytes], originals: Sequence[bytes], scale: int = 1
    ) -> None:  # fmt: skip
        """Writes a sheet. With originals it has a row for each: the original, the part that was kept, and its samples."""
        images, across = list(samples), min(ACROSS, math.ceil(math.sqrt(len(samples))))
        if originals:
            images, across = side_by_side(samples, prompts, originals)
        sheet(b"".join(images), self.item, across, path, scale=scale)

    def write_examples(self, sequences: Bytes, folder: Path, stem: str) -> Path:
        path = folder / f"{stem}.png"
        sheet(sequences, self.item, EXAMPLES_ACROSS, path)
        return path

    def read_prompts(self, owner: str, path: Path, context: int, options: Mapping[str, Any]) -> list[Prompt]:
        """Reads images, all or the chosen `items`. Of each the upper part is kept, the share `keep_top` of its rows."""
        originals = self._read_originals(owner, path, options["items"])
        share, height = 0.5 if options["keep_top"] is None else options["keep_top"], self.item[0]
        rows = round(height * share)
        if not 0 < rows < height:
            between = f"between {0.5 / height:.3g} and {1 - 0.5 / height:.3g}"
            raise ValueError(f"{owner}: keep_top = {share} keeps {rows} of {height} rows; give a number {between}")
        kept = rows * math.prod(self.item[1:])
        return [Prompt(original[:kept], original) for original in originals]

    def _read_originals(self, owner: str, path: Path, items: Sequence[int]) -> list[bytes]:
        with name_prompt_in_errors(owner, path):
            images = open_images(path)
        repeat = self.item[2] if images.item[2] == 1 else 1  # A grey image becomes one with equal channels.
        if (*images.item[:2], images.item[2] * repeat) != self.item:
            raise ValueError(
                f"{owner}: {path} is {shape_text(images.item)}, and the model makes images of {shape_text(self.item)}; "
                "give such"
            )
        for item in items:
            if not 0 <= item < images.count:
                last, count = f"{images.count - 1:,}", f"{images.count:,}"
                raise ValueError(f"{owner}: items must be 0 to {last}, got {item}; {path} has {count}")
        if not items and images.count > MOST_PROMPTS:
            raise ValueError(f"{owner}: {path} has {images.count:,} images; say which, as in --items 0 1 2")
        places = np.array(items or range(images.count), np.int64)
        with name_prompt_in_errors(owner, path):
            pixels: Bytes = images.read(places).reshape(len(places), *images.item)
        return [image.tobytes() for image in pixels.repeat(repeat, -1)]


def to_png(data: bytes | Bytes, item: tuple[int, ...], path: str | Path, scale: int = 1) -> None:
    """Writes the bytes of one image as a PNG file, each pixel as a square of `scale` pixels."""
    sheet(data, item, 1, path, scale=scale)


def sheet(
    data: bytes | Bytes, item: tuple[int, ...], columns: int, path: str | Path, gap: int = 2, scale: int = 1
) -> None:  # fmt: skip
    """Writes the bytes of images as one PNG file: a grid, row by row, on white. `scale` as for `to_png`."""
    pillow = import_optional("PIL.Image", f"{path}: writing images", "data")
    columns = whole_number("sheet", "columns", columns, 1)
    if len(item) != 3 or item[2] not in MODES:
        raise ValueError(f"sheet: item must be (height, width, channels) with 1, 3 or 4 channels, got {tuple(item)}")
    height, width, channels = item
    flat = np.frombuffer(bytes(data), np.uint8)
    if flat.size == 0 or flat.size % math.prod(item):
        raise ValueError(f"sheet: {flat.size} bytes are no whole number of images of {shape_text(item)}")
    images = flat.reshape(-1, *item).repeat(scale, axis=1).repeat(scale, axis=2)
    height, width = height * scale, width * scale
    rows, columns = math.ceil(len(images) / columns), min(columns, len(images))
    grid = np.full((rows * (height + gap) - gap, columns * (width + gap) - gap, channels), 255, np.uint8)
    for index, image in enumerate(images):
        top, left = index // columns * (height + gap), index % columns * (width + gap)
        grid[top : top + height, left : left + width] = image
    with atomic_path(path) as temporary:
        pillow.fromarray(grid[:, :, 0] if channels == 1 else grid).save(temporary, format="PNG")


def side_by_side(
    samples: Sequence[bytes], prompts: Sequence[bytes], originals: Sequence[bytes]
) -> tuple[list[bytes], int]:  # fmt: skip
    """Returns the images of a sheet and their number per row: in each row an original, the part that was kept, and the
    samples that complete it."""
    count = len(prompts) // len(originals)
    images: list[bytes] = []
    for number, original in enumerate(originals):
        completed = samples[number * count : (number + 1) * count]
        empty = GREY * len(original)
        kept = prompts[number * count]
        row = [original, kept + empty[len(kept) :], *completed]
        images += row + [empty] * (2 + count - len(row))
    return images, 2 + count
