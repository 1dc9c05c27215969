"""The verbs: each file is one, and its name says which: data_prepare.py is `longstride data prepare`.

A file has `main`, whose parameters are the flags and whose docstring is the --help text, its first sentence also the line
in `longstride --help`; and may have these constants:

    ORDER         place in the list of `longstride --help`; verbs without it come last
    TAKES_WORDS   True if `main` takes the list of arguments and parses it itself, because its flags depend on it

A file imports torch, and the modules that do the work, inside its functions only: `longstride --help` reads the files
without running them, and a verb's own --help must be quick.
"""

import ast
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from math import inf
from types import ModuleType
from typing import Any


@dataclass(frozen=True)
class Verb:
    """A file of this folder."""

    name: str
    """As it is typed."""

    @property
    def main(self) -> Callable[..., None]:
        """The function that runs the verb. Imports the file."""
        function: Callable[..., None] = self._module.main
        return function

    @property
    def takes_words(self) -> bool:
        return getattr(self._module, "TAKES_WORDS", False)

    @property
    def summary(self) -> str:
        """The first line of the docstring of `main`, without an example."""
        functions = {node.name: node for node in self._tree.body if isinstance(node, ast.FunctionDef)}
        assert "main" in functions, f"{self._path} has no main"
        return (ast.get_docstring(functions["main"]) or "").partition("\n")[0].partition(" Example: ")[0]

    @property
    def order(self) -> float:
        values: list[Any] = [
            ast.literal_eval(node.value)
            for node in self._tree.body
            if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["ORDER"]
        ]
        return values[0] if values else inf

    @property
    def _path(self) -> str:
        return f"{__name__}.{self.name.replace(' ', '_')}"

    @property
    def _module(self) -> ModuleType:
        return import_module(self._path)

    @cached_property
    def _tree(self) -> ast.Module:
        """The parsed source: importing the file would import tyro."""
        spec = find_spec(self._path)
        assert spec is not None
        source: str = spec.loader.get_source(self._path)  # type: ignore[union-attr]
        return ast.parse(source)


def find_verbs() -> dict[str, Verb]:
    """The verbs by name, in alphabetical order. Reads the folder, not the files."""
    names = [module.name.replace("_", " ") for module in pkgutil.iter_modules(__path__)]
    return {name: Verb(name) for name in sorted(names)}


def in_order(verbs: dict[str, Verb]) -> dict[str, Verb]:
    """The verbs in the order of `longstride --help`. Reads the files."""
    return dict(sorted(verbs.items(), key=lambda item: item[1].order))
