import importlib
import pkgutil
import subprocess
import sys

import pytest

import longstride
from longstride.common.lazy import import_optional

PACKAGES = ["longstride", *(f"longstride.{name}" for name in ("attention", "evaluation", "model", "sampling", "training"))]


def in_a_process(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("name", PACKAGES)
def test_every_public_name_is_there_and_listed(name):
    package = importlib.import_module(name)
    for public in package.__all__:
        assert getattr(package, public) is not None
        assert public in dir(package)


@pytest.mark.parametrize("name", PACKAGES)
def test_no_public_name_is_that_of_a_module(name):
    """Importing the module would replace the name."""
    package = importlib.import_module(name)
    assert not set(package.__all__) & {module.name for module in pkgutil.iter_modules(package.__path__)}


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'longstride' has no attribute 'atend'"):
        longstride.atend  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'atend' from 'longstride'"):
        exec("from longstride import atend")


def test_a_missing_dependency_is_named_itself(monkeypatch):
    monkeypatch.setitem(sys.modules, "longstride.model.transformer", None)
    monkeypatch.delattr(longstride, "SparseTransformer", raising=False)
    with pytest.raises(ModuleNotFoundError, match=r"longstride\.model\.transformer"):
        longstride.SparseTransformer  # noqa: B018


def test_rooms_are_found_without_an_import_of_their_own():
    assert in_a_process("import longstride; print(longstride.patterns.Local(3))") == "Local(3)\n"


def test_configs_are_read_without_torch_and_numpy():
    code = """if True:
        import sys
        from longstride import ModelConfig, Local, parse, preset
        from longstride.commands.bench.settings import AttentionBenchmark
        from longstride.sampling.request import Request
        from longstride.training import TrainConfig, train_preset
        train_preset("enwik8"), parse("strided(4)"), Request(), AttentionBenchmark()
        print({"torch", "numpy", "rich", "matplotlib"} & sys.modules.keys())"""
    assert in_a_process(code) == "set()\n"


def test_help_of_the_package_lists_its_names():
    text = in_a_process("import longstride, pydoc; print(pydoc.plain(pydoc.render_doc(longstride)))")
    assert "attend(" in text
    assert "class SparseTransformer(" in text


def test_compiled_code_may_use_a_name_first():
    code = """if True:
        import torch, longstride
        q = torch.randn(1, 1, 8, 4)
        pattern = longstride.patterns.Local(2)
        compiled = torch.compile(lambda q: longstride.attend(q, q, q, pattern), fullgraph=True, backend="eager")
        print((compiled(q) - longstride.attend(q, q, q, pattern)).abs().max().item() < 1e-6)"""
    assert in_a_process(code) == "True\n"


def test_a_missing_dependency_is_named_with_the_extra_that_has_it():
    with pytest.raises(ValueError, match=r"^reading stars needs nosuchmodule: pip install 'longstride\[data\]'"):
        import_optional("nosuchmodule.sky", "reading stars", "data")
    assert import_optional("json", "reading", "data").loads("1") == 1
