"""Triton's interpreter without work that changes no result: tests of kernels take about half the time so.

The interpreter patches triton.language for a launch, and again in every call of a device function. It computes sums and
products of integers a second time in 64 bits, and looks at them only if it debugs. It makes a table of types at each use.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import ModuleType
from typing import Any

import pytest
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction, InterpreterError, interpreter_builder

_numpy_type = cache(interpreter._get_np_dtype)


@cache
def language_modules(function: Callable) -> list[ModuleType]:
    """Where a function finds the language: what the interpreter patches for it."""
    return [value for value in function.__globals__.values() if value is tl or value is tl.core]


def call_device_function(self: InterpretedFunction, *arguments: Any, **named: Any) -> Any:
    if any(tl.core.is_builtin(module.load) for module in language_modules(self.fn)):
        interpreter._patch_lang(self.fn)
    function = self.rewrite()
    try:
        return function(*arguments, **named)
    except Exception as error:
        raise InterpreterError(repr(error)) from error


def numpy_type(of: tl.dtype) -> Any:
    scalar = of.scalar
    return SHIPPED["_get_np_dtype"](scalar) if isinstance(scalar, tl.pointer_type) else _numpy_type(scalar)


PLACES = {"__call__": InterpretedFunction, "options": interpreter_builder, "_get_np_dtype": interpreter}
SHIPPED = {name: getattr(place, name) for name, place in PLACES.items()}
FAST = {
    "__call__": call_device_function,
    "options": replace(SHIPPED["options"], sanitize_overflow=SHIPPED["options"].debug),
    "_get_np_dtype": numpy_type,
}


def install(what: dict[str, Any], patch: pytest.MonkeyPatch) -> None:
    """Either `FAST` or `SHIPPED`."""
    for name, place in PLACES.items():
        patch.setattr(place, name, what[name])
