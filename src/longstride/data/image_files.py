"""Readers of images: CIFAR-10, .npy, .npz, and folders of PNG or JPEG files."""

import math
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from longstride.common.checks import short_repr
from longstride.common.lazy import import_optional
from longstride.data import cifar
from longstride.data.arrays import open_npy, open_npz
from longstride.data.limits import Limit
from longstride.data.plan import (
    READ,
    SPLITS,
    Bytes,
    Plan,
    data_suffix,
    files_under,
    named_splits,
    split_of,
    split_sizes,
)
from longstride.data.streams import open_reader, read_start

PICTURES = (".png", ".jpg", ".jpeg")
ARRAYS = (".npy", ".npz")
LOOKED_FOR = f"{', '.join(PICTURES + ARRAYS)} and CIFAR-10"
MODES = {1: "L", 3: "RGB", 4: "RGBA"}
SEED = 0
"""Seed of the shuffle that selects the held-out images."""
MAX_SCANNED = 1 << 33
"""The most pixels that all scans of a JPEG may cover: a scan of a few bytes can cover the whole image."""
SHUFFLE_BYTES = 32
"""Bytes of memory per image that the shuffle needs."""

Item = tuple[int, int, int]
Places = NDArray[np.int64]


@dataclass(frozen=True)
class ImageSet:
    """Images of one shape, read on demand."""

    owner: str
    count: int
    item: Item
    read: Callable[[Places], Bytes]
    """Returns the images with these indices: [images, height, width, channels]."""

    def pieces(self, places: Places) -> Iterator[Bytes]:
        step = max(1, READ // math.prod(self.item))
        for start in range(0, len(places), step):
            yield self.read(places[start : start + step])


@dataclass(frozen=True)
class ImageSource:
    """The images of a source, by split."""

    groups: dict[str, ImageSet]
    """The images of each split of the source; '' for images without a split."""
    used: Sequence[Path]
    is_cifar: bool = False


def plan(kind: str, source: Path, limit: Limit | None = None, join: bool = False) -> Plan:
    """Plans images. CIFAR-10's 50,000 training images become 48,000 for train and 2,000 for valid. Other images are split
    90/5/5 per cent, unless files, folders or arrays are named train, valid and test; with `join` the names of files and
    folders do not count."""
    limit = limit or Limit(source)
    source_images = _open_source(source, limit, join)
    groups, is_cifar = source_images.groups, source_images.is_cifar
    items = {images.item: images for images in groups.values()}
    if len(items) > 1:
        first, second = list(items.values())[:2]
        raise ValueError(
            f"{second.owner} has images of {shape_text(second.item)} and {first.owner} of {shape_text(first.item)}; "
            "all must have one shape"
        )
    unsplit = groups.get("") or (None if "valid" in groups else groups.get("train"))
    if unsplit and (unsplit.count, unsplit.item) == (cifar.IMAGES, cifar.ITEM):
        groups = {"train": unsplit} | {name: images for name, images in groups.items() if name == "test"}
        is_cifar = True
    item = next(iter(items))
    count = sum(images.count for images in groups.values())
    limit.check(source, f"{count:,} images of {shape_text(item)}", count * max(math.prod(item), SHUFFLE_BYTES))
    chosen, how = _select(source, groups, is_cifar)
    splits: dict[str, Iterable[Bytes] | Bytes] = {name: images.pieces(places) for name, (images, places) in chosen.items()}
    total = sum(len(places) for _, places in chosen.values()) * math.prod(item)
    return Plan(kind, splits, total, f"{source.name}: {shape_text(item)}; {how}", item=item, used=source_images.used)


def _select(source: Path, groups: dict[str, ImageSet], is_cifar: bool) -> tuple[dict[str, tuple[ImageSet, Places]], str]:
    if "" in groups:
        sizes, how = split_sizes(source, groups[""].count, "images"), "train, valid and test"
        groups = dict.fromkeys(SPLITS, groups[""])
    elif "valid" not in groups:
        count = groups["train"].count
        if count < 2:
            raise ValueError(f"{groups['train'].owner} holds {count} image; at least 2 are needed, for train and valid")
        held = max(1, count * cifar.HELD_OUT // cifar.IMAGES if is_cifar else count * 5 // 100)
        sizes, how = {"train": count - held, "valid": held}, "train and valid"
        groups = {"train": groups["train"], "valid": groups["train"]} | groups
    else:
        return {name: (groups[name], np.arange(groups[name].count)) for name in SPLITS if name in groups}, "splits as named"
    # RandomState gives the same order in every version of NumPy.
    order = np.random.RandomState(SEED).permutation(sum(sizes.values())).astype(np.int64)
    start, chosen = 0, {}
    for name in (name for name in SPLITS if name in groups):
        images = groups[name]
        size = sizes.get(name)
        chosen[name] = (images, np.arange(images.count) if size is None else np.sort(order[start : start + size]))
        start += size or 0
    return chosen, f"{how} by a shuffle with seed {SEED}: {', '.join(f'{name} {size}' for name, size in sizes.items())}"


def _open_source(source: Path, limit: Limit, join: bool = False) -> ImageSource:
    if source.is_dir():
        place = cifar.find_batches(source)
        if place:
            used = [path for path in files_under(place) if path.name in cifar.WANTED | cifar.OTHER_FILES]
            return ImageSource(
                {name: _from_array(x, str(place)) for name, x in cifar.from_folder(place, limit).items()}, used, True
            )
        return _from_folder(source, limit, join)
    if source.stat().st_size == 0:
        raise ValueError(f"{source} is empty")
    groups = _from_file(source, limit)
    if groups is None:
        return ImageSource(
            {name: _from_array(x, str(source)) for name, x in cifar.from_tar(source, limit).items()}, [source], True
        )
    return ImageSource(groups, [source])


def _from_file(source: Path, limit: Limit) -> dict[str, ImageSet] | None:
    """Returns the images of a file by split; None for a tar archive."""
    suffix = data_suffix(source)
    if suffix in PICTURES:
        return {"": _from_pictures([source], limit)}
    if suffix == ".npz" or (suffix != ".npy" and zipfile.is_zipfile(source)):
        return _from_npz(source, limit)
    if suffix == ".npy" or read_start(source, False, 6) == b"\x93NUMPY":
        return {"": _from_array(open_npy(source, limit), str(source))}
    if suffix == ".bin":
        records = cifar.records(np.memmap(source, np.uint8, mode="r"), str(source))
        return {
            "": ImageSet(
                str(source), len(records), cifar.ITEM, lambda places: cifar.interleave_channels(records[places, 1:])
            )
        }
    if is_tar(source):
        return None
    raise ValueError(f"{source} is no file of images; looked for {LOOKED_FOR} (.tar.gz, .bin)")


def is_tar(path: Path) -> bool:
    """Whether a file, decompressed, begins as a tar archive."""
    return read_start(path, True, 262)[257:] == b"ustar"


def _from_folder(folder: Path, limit: Limit, join: bool) -> ImageSource:
    paths, make = files_under(folder, PICTURES), _from_pictures
    if not paths:
        paths, make = files_under(folder, ARRAYS), _single_array
    if not paths:
        raise ValueError(f"{folder} holds no images; looked for {LOOKED_FOR} ({cifar.BATCHES[0]}, {cifar.BATCHES[0]}.bin)")
    named = None if join else named_splits(folder, paths, valid_from_train=True)
    groups = named or {"": paths}
    used = [path for members in groups.values() for path in members]
    return ImageSource({name: make(members, limit) for name, members in groups.items()}, used)


def _single_array(paths: Sequence[Path], limit: Limit) -> ImageSet:
    if len(paths) > 1:
        raise ValueError(
            f"{paths[0]} and {paths[1].name} are two arrays; keep one in the folder, or name them train, valid and test"
        )
    if data_suffix(paths[0]) == ".npz":
        raise ValueError(f"{paths[0]} lies in a folder; give the file itself")
    return _from_array(open_npy(paths[0], limit), str(paths[0]))


def _from_array(array: Bytes, owner: str) -> ImageSet:
    shape = list(array.shape)
    if array.ndim == 4 and shape[3] not in MODES and shape[1] in MODES:
        raise ValueError(f"{owner} has shape {shape}: move the channels to the end, [n, height, width, channels]")
    if array.ndim not in (3, 4) or 0 in shape or (array.ndim == 4 and shape[3] not in MODES):
        raise ValueError(
            f"{owner} has shape {shape}; images must be [n, height, width, channels], with 1, 3 or 4 channels, or "
            "[n, height, width]: reshape it"
        )
    height, width, channels = (*shape[1:], 1)[:3]
    return ImageSet(owner, shape[0], (height, width, channels), lambda places: np.asarray(array[places]))


def _from_npz(path: Path, limit: Limit) -> dict[str, ImageSet]:
    """Returns the images of one array, or of arrays named train, valid and test."""
    arrays: dict[str, ImageSet] = {}
    for name, array in open_npz(path, limit):
        if name in arrays:
            raise ValueError(f"{path} holds the array {short_repr(name)} twice; save it again")
        arrays[name] = _from_array(array, f"{path}: array {short_repr(name)}")
    if len(arrays) == 1:
        return {"": next(iter(arrays.values()))}
    splits = [split_of(name) for name in arrays]
    if None in splits or "train" not in splits or len(set(splits)) < len(splits):
        names = ", ".join(map(short_repr, list(arrays)[:5])) + (", ..." if len(arrays) > 5 else "") if arrays else "(none)"
        raise ValueError(f"{path} holds the arrays {names}; keep one, or train, valid and test")
    return {str(name): images for name, images in zip(splits, arrays.values())}


def _from_pictures(paths: Sequence[Path], limit: Limit) -> ImageSet:
    """Returns the images of PNG and JPEG files, all of one size. If any is RGB, grey ones become RGB."""
    sizes: dict[tuple[int, int], Path] = {}
    channels = 1
    for path in paths:
        limit.check_held(path, "its file", path.stat().st_size)  # Pillow reads each chunk as a whole, also a comment.
        with _open_picture(path) as image:
            if image.mode not in ("L", "RGB"):
                raise ValueError(f"{path} has mode {image.mode}; convert it to RGB or grey (L), 8 bits a channel")
            if image.format == "PNG" and getattr(image, "n_frames", 1) > 1:
                raise ValueError(f"{path} is animated; save each of its images in a file of its own")
            channels = max(channels, len(image.mode))
            sizes.setdefault((image.height, image.width), path)
        if len(sizes) > 1:
            (first, first_path), (second, second_path) = sizes.items()
            shapes = f"{second_path} is {shape_text(second)} and {first_path} is {shape_text(first)}"
            raise ValueError(f"{shapes}; all images must have one size: crop or scale them first, see docs/training.md")
    mode = MODES[channels]
    height, width = next(iter(sizes))
    limit.check_held(paths[0], f"an image of {shape_text((height, width, channels))}", height * width * channels)

    def read(places: Places) -> Bytes:
        return np.stack([_read_pixels(paths[place], mode, (height, width)) for place in places])

    return ImageSet(str(paths[0].parent), len(paths), (height, width, channels), read)


@contextmanager
def _open_picture(path: Path) -> Iterator[Any]:
    """Opens an image; reads its header, but no pixels."""
    pillow = import_optional("PIL.Image", f"{path}: reading images", "data")
    # `Limit.held` replaces Pillow's own bound on pixels, which first warns and then raises.
    bound, pillow.MAX_IMAGE_PIXELS = pillow.MAX_IMAGE_PIXELS, None
    try:
        image = pillow.open(path, formats=("PNG", "JPEG"))
    except Exception as error:  # A broken image may raise anything.
        reason = "it is empty" if path.stat().st_size == 0 else str(error).replace(f" '{path}'", "")
        raise ValueError(f"{path} cannot be read as PNG or JPEG: {reason or type(error).__name__}") from None
    finally:
        pillow.MAX_IMAGE_PIXELS = bound
    with image:
        yield image


def _read_pixels(path: Path, mode: str, size: tuple[int, int]) -> Bytes:
    with _open_picture(path) as image:
        if (image.height, image.width) != size:
            raise ValueError(f"{path} changed while it was read")
        if image.format != "PNG" and (scans := _count_scans(path)) * math.prod(size) > MAX_SCANNED:
            raise ValueError(f"{path} has about {scans:,} scans of {shape_text(size)} pixels; save it again, as PNG")
        try:
            pixels = np.asarray(image if image.mode == mode else image.convert(mode), np.uint8)
        except Exception as error:
            raise ValueError(f"{path} cannot be read to its end: {str(error) or type(error).__name__}") from None
    return pixels.reshape(*pixels.shape[:2], -1)


def _count_scans(path: Path) -> int:
    with open_reader(path, False) as file:
        return sum(piece.count(b"\xff\xda") for piece in iter(lambda: file.read(READ), b""))


def open_images(source: Path) -> ImageSet:
    """Opens all images of a file or folder, in the order of their names; ValueError if it has several splits."""
    groups = _open_source(source, Limit(source)).groups
    if len(groups) > 1:
        raise ValueError(f"{source} has images for {', '.join(groups)}; give one file or folder of them")
    return next(iter(groups.values()))


def from_png(path: str | Path) -> tuple[bytes, Item]:
    """Returns the bytes and the shape of one image."""
    images = _from_pictures([Path(path)], Limit(Path(path)))
    return images.read(np.zeros(1, np.int64)).tobytes(), images.item


def shape_text(item: Sequence[int]) -> str:
    """Formats a shape: "32 x 32 x 3"."""
    return " x ".join(str(size) for size in item)
