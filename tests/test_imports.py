"""One way through the house: a module imports only from modules to its left."""

import ast
from pathlib import Path

import pytest

import longstride

ROOT = Path(longstride.__file__).parent
# A unit may import what stands before it. The first five are tools without imports of ours.
FLOW = [
    "version",
    "limits",
    "checks",
    "files",
    "atomic",
    "standard",
    "bar",
    "tensor_file",
    "device",
    "figures",
    "pair_counts",
    "reach",
    "patterns",
    "notation",
    "attention",
    "model",
    "samples",
    "data",
    "evaluation",
    "training",
    "source",
    "sampling",
    "looking",
    "benchmarks",
    "plots",
    "doctor",
    "making",
    "results",
    "evaluate_run",
    "sample_run",
    "demo",
    "endings",
    "cli",
]
# Inside attention: the oracle and the fast implementations never import each other, and api joins them.
BY_LANES = {f"attention.kernels.hopper.{name}" for name in ("lane_boxes", "lane_settings", "pair_slopes")}
BY_LANES |= {"attention.kernels.settings", "attention.kernels.primitives"}
IN_TILES = {"attention.kernels.hopper.ring", "attention.kernels.hopper.tiles", "attention.kernels.primitives"}
ATTENTION = {
    "reference": {"patterns"},
    "tiles": {"patterns"},
    "chunks": {"patterns", "attention.tiles"},
    "slots": {"patterns"},
    "decode": set(),
    "kernels/cached": {"patterns", "attention.slots"},
    "precision": set(),
    "gradient": set(),
    "flops": {"notation"},
    "blocked": {
        "patterns",
        "notation",
        "attention.chunks",
        "attention.flops",
        "attention.gradient",
        "attention.precision",
        "attention.tiles",
    },
    "api": {
        "patterns",
        "attention.reference",
        "attention.blocked",
        "attention.kernels.ops",
        "attention.precision",
    },
    "kernels/__init__": set(),
    "kernels/jobs": {"patterns", "notation"},
    "kernels/primitives": set(),
    "kernels/forward": {"attention.kernels.primitives"},
    "kernels/backward": {"attention.kernels.primitives"},
    "kernels/lanes": {"attention.kernels.primitives"},
    "kernels/launches": set(),
    "kernels/saved": {"atomic", "files", "attention.kernels.launches"},
    "kernels/settings": {"attention.kernels.jobs", "attention.kernels.launches", "attention.kernels.saved"},
    "kernels/ops": {
        "patterns",
        "notation",
        "attention.flops",
        "attention.gradient",
        "attention.kernels.jobs",
        "attention.kernels.forward",
        "attention.kernels.backward",
        "attention.kernels.lanes",
        "attention.kernels.settings",
        "attention.kernels.hopper",
        "attention.kernels.hopper.choice",
    },
    "kernels/hopper/__init__": set(),
    "kernels/hopper/choice": {"attention.kernels.jobs"},
    "kernels/hopper/ring": set(),
    "kernels/hopper/tiles": set(),
    "kernels/hopper/window_forward": IN_TILES,
    "kernels/hopper/past_forward": IN_TILES,
    "kernels/hopper/backward_dq": {"attention.kernels.hopper.ring", "attention.kernels.hopper.tiles"},
    "kernels/hopper/backward_dkv": {"attention.kernels.hopper.ring"},
    "kernels/hopper/numbers": {"attention.kernels.backward", "attention.kernels.primitives"},
    "kernels/hopper/lane_boxes": {"attention.kernels.settings"},
    "kernels/hopper/lane_settings": set(),
    "kernels/hopper/pair_slopes": set(),
    "kernels/hopper/lane_forward": BY_LANES,
    "kernels/hopper/lane_backward": BY_LANES,
    "kernels/hopper/walk_forward": BY_LANES,
    "kernels/hopper/walk_backward": BY_LANES,
    "kernels/hopper/launch": {
        "attention.kernels.jobs",
        "attention.kernels.settings",
        "attention.kernels.hopper.backward_dkv",
        "attention.kernels.hopper.backward_dq",
        "attention.kernels.hopper.past_forward",
        "attention.kernels.hopper.choice",
        "attention.kernels.hopper.window_forward",
        "attention.kernels.hopper.lane_backward",
        "attention.kernels.hopper.lane_boxes",
        "attention.kernels.hopper.lane_forward",
        "attention.kernels.hopper.numbers",
        "attention.kernels.hopper.walk_backward",
        "attention.kernels.hopper.walk_forward",
    },
    "__init__": {"attention.api"},
}
# Inside data: formats know the store and the plan of what goes into it, not each other, and prepare joins them.
PLANNED = {"data.limits", "data.plan", "data.store", "data.streams"}
DATA = {
    "__init__": set(),
    "hashes": {"atomic", "bar"},
    "limits": {"checks"},
    "store": {"checks", "data.hashes", "files"},
    "plan": {"data.store"},
    "streams": {"atomic", "checks", "data.limits", "data.plan", "data.store"},
    "arrays": {"checks", *PLANNED},
    "pickles": {"checks", "data.limits", "data.store"},
    "tars": {"data.streams"},
    "text": PLANNED,
    "files": PLANNED,
    "audio": {"atomic", *PLANNED},
    "cifar": {"data.pickles", "data.tars", *PLANNED},
    "images": {"atomic", "checks", "data", "data.arrays", "data.cifar", *PLANNED},
    "prepare": {"bar", "data", "data.hashes", "standard", *PLANNED},
    "loader": {"checks", "data.store"},
    "fetch": {"atomic", "bar", "checks"},
}
LIGHT = {
    "version", "limits", "checks", "files", "pair_counts", "reach", "atomic",
    "patterns", "notation", "attention", "__init__",
}  # fmt: skip


def imports(path: Path) -> set[str]:
    """The modules that a file imports, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module
            found |= {f"{node.module}.{name.name}" for name in node.names} if node.module == "longstride" else {node.module}
    return found


def ours(path: Path) -> set[str]:
    return {name.removeprefix("longstride.") for name in imports(path) if name.startswith("longstride.")}


def unit(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


FILES = sorted(ROOT.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_left(path):
    if unit(path) in ("__init__", "__main__"):
        return
    assert unit(path) in FLOW, f"{path.name} has no place in the flow yet"
    for name in ours(path):
        target = name.split(".")[0]
        assert FLOW.index(target) <= FLOW.index(unit(path)), f"{unit(path)} imports {target}, which is to its right"


@pytest.mark.parametrize("path", sorted((ROOT / "attention").rglob("*.py")), ids=lambda path: path.stem)
def test_implementations_do_not_import_each_other(path):
    assert ours(path) <= ATTENTION[path.relative_to(ROOT / "attention").with_suffix("").as_posix()]


@pytest.mark.parametrize("path", sorted((ROOT / "data").rglob("*.py")), ids=lambda path: path.stem)
def test_data_stands_alone(path):
    assert ours(path) <= DATA[path.stem]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_core_needs_torch_alone(path):
    if unit(path) in LIGHT and "kernels" not in path.parts:
        foreign = {name.split(".")[0] for name in imports(path)} & {"tyro", "rich", "numpy", "matplotlib", "triton"}
        assert not foreign


def test_files_stay_short():
    for path in FILES:
        assert len(path.read_text().splitlines()) <= 400, f"{path} has outgrown its one concept"
