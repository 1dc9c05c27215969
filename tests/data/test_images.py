import lzma

import numpy as np
import pytest
from PIL import Image

from longstride.data import image_files, images
from tests.data.small import contents, made, some_images


def pictures(folder, array, ending=".png"):
    folder.mkdir(parents=True)
    for number, image in enumerate(array):
        Image.fromarray(image.squeeze(-1) if image.shape[2] == 1 else image).save(folder / f"{number:03}{ending}")
    return folder


@pytest.mark.parametrize("item", [(5, 7, 3), (5, 7, 1), (1, 1, 3)])
def test_raster_order_channel_fastest(tmp_path, item):
    array = some_images(40, item)
    sources = [pictures(tmp_path / "png", array), tmp_path / "a.npy", tmp_path / "a.npz", tmp_path / "a.npy.xz"]
    np.save(tmp_path / "a.npy", array)
    np.savez_compressed(tmp_path / "a.npz", array)
    (tmp_path / "a.npy.xz").write_bytes(lzma.compress((tmp_path / "a.npy").read_bytes()))
    if item[2] == 1:
        np.save(tmp_path / "grey.npy", array[..., 0])
        sources.append(tmp_path / "grey.npy")
    order = np.random.RandomState(0).permutation(40)
    places = {"train": order[:36], "valid": order[36:38], "test": order[38:]}
    for number, source in enumerate(sources):
        store = made(images.Images.plan(source), tmp_path / f"made-{number}")
        assert (store.kind, store.item) == ("images", item)
        assert contents(store) == {name: array[np.sort(chosen)].tobytes() for name, chosen in places.items()}
        assert "seed 0" in store.source


def test_many_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(image_files, "READ", 100)
    np.save(tmp_path / "a.npy", some_images(40, (5, 7, 3)))
    plan = images.Images.plan(tmp_path / "a.npy")
    pieces = list(plan.splits["train"])
    assert [len(piece) for piece in pieces] == [1] * 36
    assert plan.total == 40 * 105


def test_jpeg(tmp_path):
    smooth = np.broadcast_to(np.arange(64, dtype=np.uint8)[:, None], (4, 64, 64, 3)[1:3])
    folder = pictures(tmp_path / "jpg", np.stack([np.stack([smooth] * 3, -1)] * 4), ".JPG")
    store = made(images.Images.plan(folder), tmp_path / "made")
    assert store.splits == {"train": 2 * 12288, "valid": 12288, "test": 12288}
    assert contents(store)["valid"] == np.asarray(Image.open(folder / "000.JPG")).tobytes()


def test_named_splits(tmp_path):
    array = some_images(30, (2, 2, 3))
    groups = {"train": array[:20], "val": array[20:24], "test": array[24:]}
    for name, part in groups.items():
        pictures(tmp_path / "set" / name, part)
        (tmp_path / "arrays").mkdir(exist_ok=True)
        np.save(tmp_path / "arrays" / f"set-{name}.npy", part)
    np.savez(tmp_path / "set.npz", **groups)
    expected = {"train": array[:20].tobytes(), "valid": array[20:24].tobytes(), "test": array[24:].tobytes()}
    for number, source in enumerate(("set", "arrays", "set.npz")):
        assert contents(made(images.Images.plan(tmp_path / source), tmp_path / f"made-{number}")) == expected
    np.savez(tmp_path / "two.npz", train=array[:20], test=array[24:])
    store = made(images.Images.plan(tmp_path / "two.npz"), tmp_path / "made-two")
    assert store.splits == {"train": 19 * 12, "valid": 12, "test": 6 * 12}
    assert contents(store)["test"] == expected["test"]


def test_grey_among_colours(tmp_path):
    folder = pictures(tmp_path / "set", some_images(3, (2, 2, 3)))
    grey = some_images(1, (2, 2))[0]
    Image.fromarray(grey).save(folder / "003.png")
    store = made(images.Images.plan(folder), tmp_path / "made")
    assert store.item == (2, 2, 3)
    assert np.stack([grey] * 3, -1).tobytes() in [store.split(name)[:12].tobytes() for name in store.splits] + [
        store.split("train")[12:].tobytes()
    ]


def put(tmp_path, name, value):
    np.save(tmp_path / name, value)


def text_png(tmp_path):
    (pictures(tmp_path / "set", some_images(4, (2, 2, 3))) / "fake.png").write_text("just text")


def empty_png(tmp_path):
    (pictures(tmp_path / "set", some_images(4, (2, 2, 3))) / "none.png").touch()


def cut_png(tmp_path):
    path = pictures(tmp_path / "set", some_images(4, (50, 50, 3))) / "002.png"
    path.write_bytes(path.read_bytes()[:2000])


def mixed(tmp_path):
    pictures(tmp_path / "set", some_images(2, (4, 4, 3)))
    pictures(tmp_path / "set" / "x", some_images(2, (4, 5, 3)))


def transparent(tmp_path):
    pictures(tmp_path / "set", some_images(3, (2, 2, 4)))


def mixed_groups(tmp_path):
    pictures(tmp_path / "set" / "train", some_images(2, (4, 4, 3)))
    pictures(tmp_path / "set" / "valid", some_images(2, (4, 5, 3)))


def nothing(tmp_path):
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "notes.txt").write_text("no images here")


def two_arrays(tmp_path):
    (tmp_path / "set").mkdir()
    put(tmp_path, "set/a.npy", some_images(4))
    put(tmp_path, "set/b.npy", some_images(4))


def cut_npy(tmp_path):
    put(tmp_path, "set", some_images(4))
    (tmp_path / "set.npy").write_bytes((tmp_path / "set.npy").read_bytes()[:-1])


@pytest.mark.parametrize(
    ("make", "source", "message"),
    [
        (text_png, "set", r"set/fake.png cannot be read as PNG or JPEG: cannot identify image file"),
        (empty_png, "set", r"set/none.png cannot be read as PNG or JPEG: it is empty"),
        (cut_png, "set", r"set/002.png cannot be read to its end"),
        (mixed, "set", r"set/x/000.png is 4 x 5 and .*set/000.png is 4 x 4; all .* one size: crop or scale them first"),
        (mixed_groups, "set", r"set/valid has images of 4 x 5 x 3 and .*set/train of 4 x 4 x 3"),
        (transparent, "set", r"set/000.png has mode RGBA; convert it to RGB or grey"),
        (nothing, "set", r"set holds no images; looked for .png, .jpg, .jpeg, .npy, .npz and CIFAR-10 \(data_batch_1"),
        (two_arrays, "set", r"set/a.npy and b.npy are two arrays"),
        (cut_npy, "set.npy", r"set.npy cannot be read as .npy"),
        (lambda p: put(p, "a", some_images(2)), "a.npy", r"a.npy holds 2 images; at least 3 are needed"),
        (lambda p: put(p, "a", np.zeros((9, 4, 4, 3))), "a.npy", r"a.npy holds float64; images must be uint8"),
        (lambda p: put(p, "a", np.zeros((9, 3072), np.uint8)), "a.npy", r"a.npy has shape \[9, 3072\]; images must be"),
        (lambda p: put(p, "a", np.zeros((9, 3, 8, 8), np.uint8)), "a.npy", r"\[9, 3, 8, 8\]: move the channels to the end"),
        (lambda p: put(p, "a", np.zeros((0, 8, 8, 3), np.uint8)), "a.npy", r"a.npy has shape \[0, 8, 8, 3\]"),
        (lambda p: put(p, "a", np.array([{}, {}])), "a.npy", r"a.npy holds object; images must be uint8"),
        (lambda p: (p / "a.npy").write_bytes(b"text"), "a.npy", r"a.npy cannot be read as .npy"),
        (lambda p: (p / "a.npy").touch(), "a.npy", r"a.npy is empty"),
        (lambda p: (p / "a.npz").write_bytes(b"text"), "a.npz", r"a.npz cannot be read: File is not a zip file"),
        (lambda p: (p / "a.xyz").write_bytes(b"text"), "a.xyz", r"a.xyz is no file of images; looked for .png"),
        (
            lambda p: np.savez(p / "a.npz", x=some_images(3), z=some_images(3)),
            "a.npz",
            r"a.npz holds the arrays 'x', 'z'; keep one",
        ),
        (
            lambda p: np.savez(p / "a.npz", x=np.array([{}])),
            "a.npz",
            r"a.npz: array 'x.npy' holds object; images must be uint8",
        ),
    ],
)
def test_bad_images_are_named(tmp_path, make, source, message):
    make(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match=message):
        made(images.Images.plan(tmp_path / source), tmp_path / "made")
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("item", [(5, 7, 3), (5, 7, 1)])
def test_to_png_and_back(tmp_path, item):
    data = some_images(1, item).tobytes()
    images.to_png(data, item, tmp_path / "one.png")
    assert image_files.from_png(tmp_path / "one.png") == (data, item)


def test_sheet(tmp_path):
    array = some_images(5, (3, 4, 3))
    images.sheet(array, (3, 4, 3), 3, tmp_path / "grid.png", gap=1)
    grid = np.asarray(Image.open(tmp_path / "grid.png"))
    assert grid.shape == (7, 14, 3)
    assert np.array_equal(grid[:3, :4], array[0])
    assert np.array_equal(grid[4:, 5:9], array[4])
    assert (grid[4:, 9:] == 255).all()
    assert (grid[3] == 255).all()
    assert [path.name for path in tmp_path.iterdir()] == ["grid.png"]


@pytest.mark.parametrize(
    ("data", "item", "columns", "message"),
    [
        (bytes(11), (2, 2, 3), 1, "11 bytes are no whole number of images of 2 x 2 x 3"),
        (b"", (2, 2, 3), 1, "0 bytes are no whole number"),
        (bytes(12), (2, 6), 1, r"item must be \(height, width, channels\)"),
        (bytes(12), (2, 2, 3), 0, "columns must be at least 1, got 0"),
    ],
)
def test_wrong_sheets_are_refused(tmp_path, data, item, columns, message):
    with pytest.raises(ValueError, match=message):
        images.sheet(data, item, columns, tmp_path / "grid.png")
    assert list(tmp_path.iterdir()) == []
