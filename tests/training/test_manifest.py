import json
from itertools import product
from random import Random

import pytest

from longstride.training.manifest import DamagedError, UnfinishedError, check_manifest, write_manifest
from tests.training.saved import bits, equal, keeper, made, part, save


@pytest.fixture
def folder(tmp_path):
    """Sealed; small, so that all that can go wrong with it can be tried."""
    folder = tmp_path / "it"
    (folder / "deep").mkdir(parents=True)
    (folder / "a.txt").write_text("some words")
    (folder / "deep/b.bin").write_bytes(bytes(range(256)))
    write_manifest(folder)
    return folder


def test_what_was_sealed_is_whole(folder):
    check_manifest(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["a.txt", "deep", "manifest.json"]
    assert list(json.loads((folder / "manifest.json").read_text())["files"]) == ["a.txt", "deep/b.bin"]


def test_it_can_be_sealed_anew(folder):
    (folder / "a.txt").write_text("other words")
    with pytest.raises(DamagedError):
        check_manifest(folder)
    write_manifest(folder)
    check_manifest(folder)


def test_without_a_manifest_it_is_unfinished(folder, tmp_path):
    (folder / "manifest.json").unlink()
    with pytest.raises(UnfinishedError, match=f"{folder} is unfinished: it has no manifest.json"):
        check_manifest(folder)
    with pytest.raises(UnfinishedError, match="missing is unfinished"):
        check_manifest(tmp_path / "missing")


def test_a_failure_while_it_is_sealed_leaves_no_manifest(folder, monkeypatch):
    (folder / "manifest.json").unlink()
    before = sorted(folder.rglob("*"))

    def fails(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("longstride.common.atomic.os.replace", fails)
    with pytest.raises(OSError, match="No space"):
        write_manifest(folder)
    assert sorted(folder.rglob("*")) == before


DAMAGES = {
    "a file less": (lambda folder: (folder / "a.txt").unlink(), "a.txt is missing"),
    "a file more": (lambda folder: (folder / "deep/c").touch(), "deep/c is not in its manifest.json"),
    "a hidden file more": (lambda folder: (folder / ".c").touch(), ".c is not in its manifest.json"),
    "another name": (lambda folder: (folder / "a.txt").rename(folder / "b.txt"), "a.txt is missing"),
    "a byte more": (lambda folder: (folder / "a.txt").write_text("some words!"), "a.txt has other bytes than"),
    "a folder for a file": (
        lambda folder: ((folder / "a.txt").unlink(), (folder / "a.txt").mkdir()), "a.txt is missing"
    ),
    "a folder for the manifest": (
        lambda folder: ((folder / "manifest.json").unlink(), (folder / "manifest.json").mkdir()),
        "manifest.json cannot be read",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("damage", "says"), DAMAGES.values(), ids=DAMAGES)
def test_what_is_wrong_is_named(damage, says, folder):
    damage(folder)
    with pytest.raises(DamagedError, match=f"{folder} is damaged: {says}"):
        check_manifest(folder)


HOSTILE = {
    "empty": b"",
    "no text": b"\xff\xfe\x00",
    "a list": b"[]",
    "nested without end": b"[" * 100_000,
    "a number of many digits": b'{"version": ' + b"9" * 5000 + b"}",
    "another version": b'{"version": 2, "files": {}}',
    "files that are none": b'{"version": 1, "files": 3}',
    "nothing that is asked for": b'{"version": 1}',
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_a_manifest_that_is_none(content, folder):
    (folder / "manifest.json").write_bytes(content)
    with pytest.raises(DamagedError, match=f"{folder} is damaged: manifest.json"):
        check_manifest(folder)


def test_a_manifest_does_not_reach_out_of_its_folder(folder, tmp_path):
    (tmp_path / "secret").write_text("some words")
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"]["../secret"] = manifest["files"]["a.txt"]
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=2, sort_keys=True) + "\n")
    with pytest.raises(DamagedError, match="secret is missing"):
        check_manifest(folder)


def test_any_bit_of_a_manifest_and_any_length(folder):
    path = folder / "manifest.json"
    whole = path.read_bytes()
    broken = [whole[:length] for length in range(len(whole))]
    for place, bit in product(range(len(whole)), range(8)):
        broken.append(flipped(whole, place, bit))
    for content in broken:
        path.write_bytes(content)
        with pytest.raises(DamagedError, match=f"{folder} is damaged: "):
            check_manifest(folder)
    path.write_bytes(whole)
    check_manifest(folder)


def flipped(content, place, bit):
    changed = bytearray(content)
    changed[place] ^= 1 << bit
    return bytes(changed)


def cut(path, random):
    path.write_bytes(path.read_bytes()[: random.randrange(path.stat().st_size)])


def flip(path, random):
    content = path.read_bytes()
    path.write_bytes(flipped(content, random.randrange(len(content)), random.randrange(8)))


def delete(path, random):
    path.unlink()


def test_any_damage_to_a_checkpoint_is_found_and_the_one_before_is_used(tmp_path):
    """Each kind of damage to each file, at 300 random places."""
    saved = made(steps=1)
    before = bits(*saved)
    save(tmp_path, 5, given=saved)
    folder = save(tmp_path, 10, given=made(seed=1, steps=2))
    files = [part(folder), *(folder / name for name in ("manifest.json", "model.safetensors", "state.json"))]
    assert set(files) == {path for path in folder.rglob("*") if path.is_file()}
    checkpoints, random, refused = keeper(tmp_path), Random(0), 0
    for path, damage, _ in product(files, (cut, flip, delete), range(25)):
        whole = path.read_bytes()
        damage(path, random)
        said = []
        assert checkpoints.newest(said.append) == 5
        (message,) = said
        assert message.startswith(f"{folder} is ")
        assert message.endswith("; the one before it is used")
        # A manifest that is not what it was may accuse another file.
        assert path.name in message or path.name == "manifest.json"
        refused += 1
        path.write_bytes(whole)
    assert refused == 300
    assert checkpoints.newest(pytest.fail) == 10
    other = made(seed=1)
    checkpoints.load(5, *other)
    assert equal(before, bits(*other))
