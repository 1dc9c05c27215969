"""A wheel made from the repository holds what it needs and runs where nothing else of the repository is."""

import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
if not (ROOT / "pyproject.toml").exists():
    pytest.skip("not run from the repository", allow_module_level=True)
pytest.importorskip("setuptools")
pytest.importorskip("tyro")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    copy = tmp_path_factory.mktemp("source") / "longstride"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "demo"))
    out = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, copy], check=True, capture_output=True
    )
    (made,) = out.glob("*.whl")
    return made


def test_holds_every_module_and_nothing_else(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    source = ROOT / "src"
    expected = {
        str(path.relative_to(source))
        for path in (source / "longstride").rglob("*")
        if path.suffix in (".py", ".typed")
        or (path.parent.name == "samples" and path.suffix in (".xz", ".md"))
        or path.parent.name == "page"
        or (path.parent.parent.name == "shipped" and path.parent.name != "__pycache__" and path.is_file())
    }
    assert expected == {name for name in names if ".dist-info/" not in name}
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_models_and_data_in_it_are_free(wheel):
    """What has a non-commercial licence, or is for research alone, stays in the repository."""
    names = zipfile.ZipFile(wheel).namelist()
    models = {name.split("/")[3] for name in names if re.match(r"longstride/model/shipped/.*/", name)}
    assert models <= {"text"}
    assert not [name for name in names if "images32" in name or "models/" in name]
    cards = [name for name in names if name.endswith(("card.json", "README.md"))]
    assert "longstride/data/samples/README.md" in cards
    for name in cards:
        text = zipfile.ZipFile(wheel).read(name).decode().lower()
        assert not re.search(r"by-nc|non-commercial|not for commercial|research use", text), name


def test_runs_in_an_environment_of_its_own(wheel, tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)  # It would come before the wheel.
    home = tmp_path / "environment"
    venv.create(home, with_pip=True)
    python = home / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel], check=True)
    # What it depends on is borrowed from this environment, as torch is large; longstride is not, as the wheel comes first.
    site = next((home / "lib").glob("python*/site-packages"))
    (site / "borrowed.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    where = subprocess.run(
        [python, "-c", "import longstride; print(longstride.__file__)"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert str(home) in where.stdout
    doctor = subprocess.run(
        [home / "bin" / "longstride", "doctor"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert "agrees with the oracle here" in doctor.stdout
    listed = subprocess.run(
        [home / "bin" / "longstride", "--help"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert "longstride data prepare      Turn files into a store" in listed.stdout
