"""The rooms, and the one direction of imports between them. Every rule follows from the tree."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import longstride
from longstride.data.kinds import KINDS

ROOT = Path(longstride.__file__).parent
ROOMS = [
    "common", "patterns", "attention", "model", "data", "evaluation", "training", "sampling", "transformers", "pictures",
    "serving", "commands",
]  # fmt: skip
"""A module imports only from its own room and from rooms to the left."""
FREE = {"version"}
"""Outside of the rooms, and imported by all."""
BACKENDS = [{"reference"}, {"blocked", "tiles", "chunks"}, {"kernels"}]
"""Implementations of attention: none imports another."""
DATA_KINDS = {place.partition(":")[0].rpartition(".")[2] for place in KINDS.values()}
HEAVY = {"tyro", "rich", "numpy", "matplotlib", "triton", "safetensors", "transformers"}
"""What somebody who wants `attend` alone does not have to install."""
FILES = sorted(path for path in ROOT.rglob("*.py") if path.parent != ROOT)


def imports(path: Path) -> set[str]:
    """The modules that a file imports, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module
            inside = {f"{node.module}.{name.name}" for name in node.names}
            found |= {one if is_module(one) else node.module for one in inside}
    return found


def is_module(name: str) -> bool:
    path = ROOT.parent / name.replace(".", "/")
    return name.startswith("longstride.") and (path.with_suffix(".py").is_file() or path.is_dir())


def ours(path: Path) -> set[str]:
    return {name.removeprefix("longstride.") for name in imports(path) if name.startswith("longstride.")}


def room(path: Path) -> str:
    return path.relative_to(ROOT).parts[0]


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def test_the_rooms_are_those_of_the_tree():
    assert {path.name for path in ROOT.iterdir() if path.is_dir() and path.name != "__pycache__"} == set(ROOMS)
    assert {path.stem for path in ROOT.glob("*.py")} == FREE | {"__init__", "__main__"}
    for name in ROOMS:
        text = ast.get_docstring(ast.parse((ROOT / name / "__init__.py").read_text())) or ""
        assert "import" in text.lower(), f"{name}/__init__.py does not say what the room may import"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_point_left(path):
    for name in ours(path):
        target = name.split(".")[0]
        assert target in FREE or ROOMS.index(target) <= ROOMS.index(room(path)), f"{name_of(path)} imports {name}"


def test_no_module_imports_itself_by_a_detour():
    graph = {name_of(path): ours(path) - {name_of(path)} for path in FILES if path.name != "__init__.py"}
    TopologicalSorter({name: found & graph.keys() for name, found in graph.items()}).prepare()


@pytest.mark.parametrize("path", sorted((ROOT / "attention").rglob("*.py")), ids=name_of)
def test_implementations_do_not_import_each_other(path):
    own = path.relative_to(ROOT / "attention").parts[0].removesuffix(".py")
    others = set().union(*(backend for backend in BACKENDS if own not in backend))
    if any(own in backend for backend in BACKENDS):
        assert not {name.split(".")[1] for name in ours(path) if name.startswith("attention.")} & others


@pytest.mark.parametrize("kind", sorted(DATA_KINDS))
def test_kinds_of_data_do_not_import_each_other(kind):
    assert not ours(ROOT / "data" / f"{kind}.py") & {f"data.{other}" for other in DATA_KINDS - {kind}}


@pytest.mark.parametrize("path", [path for path in FILES if room(path) in ("patterns", "attention")], ids=name_of)
def test_the_operator_needs_torch_alone(path):
    """Also the tools in common that it imports."""
    if "kernels" not in path.parts:
        reached = {path} | {ROOT / f"{name.replace('.', '/')}.py" for name in ours(path) if name.startswith("common.")}
        for one in reached:
            assert not {name.split(".")[0] for name in imports(one)} & HEAVY


@pytest.mark.parametrize("path", [path for path in FILES if room(path) != "transformers"], ids=name_of)
def test_one_room_imports_transformers_where_it_starts(path):
    """Elsewhere only functions import it, so that nobody has to install it."""
    top = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {name.name if isinstance(node, ast.Import) else str(node.module) for node in top for name in node.names}
    assert not {name for name in names if name.split(".")[0] == "transformers" or name.startswith("longstride.transformers")}


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_files_stay_short(path):
    assert len(path.read_text().splitlines()) <= 400, f"{path} has outgrown its one concept"
