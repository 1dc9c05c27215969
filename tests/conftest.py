import importlib.util
import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

# Without a GPU the kernels run in Triton's interpreter. Triton looks at this when the kernels are imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# Tests are small and run side by side: more threads would only wait for each other.
torch.set_num_threads(1)

# Nor do the settings count that somebody has saved for the GPU at hand; empty stands for no file.
os.environ["LONGSTRIDE_SETTINGS"] = ""

# The same examples on every run of the same code: a failure is then always somebody's change.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nothing is written to, or taken from, the cache of whoever runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LONGSTRIDE_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
        yield


@pytest.fixture(autouse=True, scope="session")
def interpreter() -> Iterator[None]:
    """Triton's, with the parts that tests do without left out, and addresses checked."""
    if torch.cuda.is_available() or not importlib.util.find_spec("triton"):
        yield
        return
    from tests import addresses
    from tests.interpreter import FAST, install

    with pytest.MonkeyPatch.context() as patch:
        install(FAST, patch)
        addresses.install(patch)
        yield


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Fills uninitialized memory with NaN, so that an element that is never written shows."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
