"""Parses the arguments of a verb with tyro. Bad arguments are ValueErrors of one line that names the nearest flag."""

import difflib
import inspect
import io
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from decimal import Decimal, InvalidOperation
from functools import partial, wraps
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from longstride.commands.help import box_lines, format_help, sections, terminal_width
from longstride.common.checks import short_repr

HELP = ("-h", "--help")
WIDE, NARROW = 4000, 100
"""Widths for tyro's output: one that wraps no error, and one at which the help has a single column of boxes."""
DIGITS = 30
"""The most digits of a whole number: 1e999999999 would take a gigabyte."""


def parse(function: Callable[..., None], prog: str, words: Sequence[str], verb: str = "") -> Callable[[], None]:
    """Parses the arguments and returns the call of `function` with them. `verb`: its name in errors.

    --help prints the help and raises SystemExit.
    """

    bind = with_unwrapped_help(function)

    def read(typed: Sequence[str]) -> Any:
        return tyro.cli(bind, prog=prog, args=typed, registry=value_registry())

    if any(word in HELP for word in words):
        print(format_help(_help(read), terminal_width()))
        sys.exit(0)
    box = _Captured()
    try:
        with redirect_stdout(box), redirect_stderr(box), _columns(WIDE):
            call: Callable[[], None] = read(words)
            return call
    except SystemExit:
        owner = verb or prog.removeprefix("longstride ")
        wrong = _unknown_flag(words, _flags(_help(read))) or _refusal(box.getvalue())
        see = "" if wrong.endswith("?") else f"; longstride {owner} --help lists the flags"
        raise ValueError(f"{owner}: {wrong}{see}") from None


def whole_number_from(text: str) -> int:
    """Parses a whole number: 1000, 1_000 or 1e3."""
    try:
        return int(text)
    except ValueError:
        pass
    try:
        number = Decimal(text if "e" in text.lower() else "nan")
    except InvalidOperation:
        number = Decimal("nan")
    if not number.is_finite() or number.adjusted() > DIGITS or number != number.to_integral_value():
        raise ValueError(f"must be a whole number, got {short_repr(text)}")
    return int(number)


def number_from(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"must be a number, got {short_repr(text)}") from None


def path_from(text: str) -> Path:
    if not text:  # As of a shell variable that is not set: Path("") would be the current folder.
        raise ValueError("must be a path, got ''")
    return Path(text)


def with_unwrapped_help(function: Callable[..., None]) -> Callable[..., Callable[[], None]]:
    """A function with the same parameters that returns the call, and whose docstring has no line breaks inside sentences."""

    @wraps(function)
    def bind(*arguments: Any, **named: Any) -> Callable[[], None]:
        return partial(function, *arguments, **named)

    bind.__doc__ = _unwrapped(function.__doc__ or "")
    signature = inspect.signature(function)
    given = {name: _with_typing_union(parameter.annotation) for name, parameter in signature.parameters.items()}
    parameters = [parameter.replace(annotation=given[name]) for name, parameter in signature.parameters.items()]
    bind.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    bind.__annotations__ = {**given, "return": signature.return_annotation}
    del bind.__wrapped__  # tyro would read the docstring of that function.
    return bind


def _with_typing_union(annotation: Any) -> Any:
    """`int | None` as Union[int, None]: only that does tyro check without typeguard, whose import takes 0.1 s."""
    if isinstance(annotation, UnionType):
        return Union[get_args(annotation)]  # noqa: UP007
    if get_origin(annotation) is Annotated:
        inner, *about = get_args(annotation)
        return Annotated[_with_typing_union(inner), *about]
    return annotation


def _unwrapped(docstring: str) -> str:
    """The docstring with each paragraph and each argument's description on one line: tyro keeps line breaks."""
    lines: list[str] = []
    for line in inspect.cleandoc(docstring).splitlines():
        continues = lines and lines[-1] and line and not re.match(r"Args:| {4}\w+:", line) and lines[-1] != "Args:"
        lines[-1:] = [f"{lines[-1]} {line.strip()}"] if continues else [*lines[-1:], line]
    return "\n".join(lines)


def value_registry() -> ConstructorRegistry:
    """How tyro reads numbers, whole ones also as 1e3, and paths, which are not empty."""
    registry = ConstructorRegistry()
    readers: dict[Any, Callable[[str], Any]] = {int: whole_number_from, float: number_from, Path: path_from}

    @registry.primitive_rule
    def read_value(kind: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
        if kind.type not in readers:
            return None
        instances = (Path,) if kind.type is Path else (kind.type, int)
        return PrimitiveConstructorSpec(
            nargs=1,
            metavar=kind.type.__name__.upper(),
            instance_from_str=lambda words: readers[kind.type](words[0]),
            is_instance=lambda value: isinstance(value, instances) and not isinstance(value, bool),
            str_from_instance=lambda value: [str(value)],
        )

    return registry


class _Captured(io.StringIO):
    """Text that tyro prints, in boxes of Unicode characters and without colours."""

    encoding = "utf-8"


def _help(read: Callable[[Sequence[str]], Any]) -> str:
    """The help as tyro prints it."""
    text = _Captured()
    with redirect_stdout(text), _columns(NARROW), suppress(SystemExit):
        read(["--help"])
    return text.getvalue()


@contextmanager
def _columns(width: int) -> Iterator[None]:
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = str(width)
    try:
        yield
    finally:
        if before is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = before


def _flags(text: str) -> list[str]:
    """The flags that a help lists."""
    entries = (flags for section in sections(text) for flags, _ in section.entries)
    return [flag for flags in entries for flag in re.findall(r"(?:^|, )(-{1,2}[\w.-]+)", flags)]


def _unknown_flag(words: Sequence[str], flags: Sequence[str]) -> str | None:
    """The error for the first argument that looks like a flag but is none; None if there is no such argument."""
    for word in words:
        name = word.split("=")[0]
        if re.match(r"--?[A-Za-z]", word) and name.replace("_", "-") not in flags:
            near = _nearest(name.lstrip("-").lower(), flags)
            return f"there is no flag {name[:80]}" + (f"; did you mean {near}?" if near else "")
    return None


def _nearest(name: str, flags: Sequence[str]) -> str | None:
    """The flag of that name in another group, with these initials (lr: learning-rate), or with the closest spelling."""
    last = {flag: flag.lstrip("-").split(".")[-1] for flag in flags}
    for flag, word in last.items():
        initials = "".join(part[0] for part in word.split("-") if part)
        if word == name or (len(name) > 1 and initials == name):
            return flag
    for spelled in ({flag.lstrip("-"): flag for flag in flags}, {word: flag for flag, word in last.items()}):
        near = difflib.get_close_matches(name[:80], spelled, n=1)
        if near:
            return spelled[near[0]]
    return None


def _refusal(box: str) -> str:
    """The first error in tyro's output, as one line in our words."""
    lines = box_lines(box)
    rule = next((number for number, line in enumerate(lines) if set(line.strip()) == {"─"}), len(lines))
    lines = lines[:rule]
    text = " ".join(" ".join(lines).split())
    if text.startswith("Missing from"):
        names = [line.strip() for line in lines if re.match(r" {4}\S", line)]
        return f"{' and '.join(names)} must be given"
    if choice := re.match(r"invalid choice (.*) for argument '(.*)'\. Expected one of \((.*)\)", text):
        names = sorted(name for name in re.findall(r"'([^']*)'", choice[3]) if name != "None")
        return f"{choice[2]} must be one of {', '.join(names)}, got {choice[1]}"
    if lacking := re.match(r"Missing value for argument '(.*)'", text):
        return f"{lacking[1]} needs a value"
    if extra := re.match("Unrecognized options: (.*)", text):
        return f"unexpected {short_repr(extra[1])}"
    if value := re.match(r"Error parsing ([^:]*): (.*)", text):
        flag, why = value.groups()
        if ours := re.search(r"must be a (?:whole number|number|path), got .*", why):
            return f"{flag} {ours[0]}"
        if typed := re.search(r"Could not find valid parse for arguments: \[(.*)\]", why):
            return f"{flag} cannot be {typed[1]}"
        return why if why.startswith(flag) else f"{flag}: {why}"
    return text or "these arguments cannot be parsed"
