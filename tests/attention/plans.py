"""Plans with other settings than those that ship: they are kept in a process, and forgotten before and after."""

from contextlib import contextmanager

import pytest

from longstride.attention.kernels import general
from longstride.attention.kernels.launch import forget_plans
from longstride.attention.kernels.saved import Setting


@contextmanager
def patched(**replacements):
    """Replaces names in the general backend."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in replacements.items():
            patch.setattr(general, name, value)
        forget_plans()
        yield
    forget_plans()


def tiles_of(rows, columns):
    return patched(tile_setting=lambda *_: Setting(rows, columns, 4, 1))
