"""Imports at first use: public names of a package (PEP 562), so that --help needs no torch, and optional dependencies."""

from __future__ import annotations

import sys
from importlib import import_module

TYPE_CHECKING = False  # True for type checkers.
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any


def lazy_names(package: str, public: Mapping[str, Sequence[str]]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns `__getattr__` and `__dir__` for the package. `public` maps a module to the names that it defines.

    Modules of the package are found as well: `import longstride; longstride.patterns`. No name may be that of a module:
    importing the module would replace it.
    """
    modules = {name: module for module, names in public.items() for name in names}

    def get_attribute(name: str) -> Any:
        if name in modules:
            value = getattr(import_module(modules[name]), name)
            setattr(sys.modules[package], name, value)  # Later uses do not come here.
            return value
        if not name.startswith("_"):
            full = f"{package}.{name}"
            try:
                return import_module(full)
            except ModuleNotFoundError as error:
                if error.name != full:
                    raise
        raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name, obj=sys.modules[package])

    def list_names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *modules})

    return get_attribute, list_names


def import_optional(module: str, purpose: str, extra: str) -> Any:
    """Imports an optional dependency; ValueError with the pip command if it is missing.

    `purpose`: what needs it, for the error. `extra`: the optional dependencies of the package that include it.
    """
    try:
        return import_module(module)
    except ImportError as error:
        name = (error.name or module).split(".")[0]
        raise ValueError(f"{purpose} needs {name}: pip install 'longstride[{extra}]' ({error})") from None
