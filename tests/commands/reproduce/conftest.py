from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="package")
def without_curves() -> Iterator[None]:
    """Runs draw no curve of their own, which would take longer than their few steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("longstride.training.trainer.plot_curve", lambda folder: None)
        yield
