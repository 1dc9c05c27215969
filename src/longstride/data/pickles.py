"""Safe reader for the pickles of CIFAR-10: executes no code, imports nothing and bounds its memory.

Python's unpickler allocates whatever a pickle asks for, such as a memo of 2 ** 30 entries. This one interprets the opcodes
itself and supports only those of a CIFAR-10 batch.
"""

import io
import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from longstride.common.checks import short_repr
from longstride.data.limits import HELD
from longstride.data.plan import Bytes

MAX_OPCODES = 300_000
"""The most instructions. A published batch has about 60,000."""
RECONSTRUCT = ("numpy.core.multiarray _reconstruct", "numpy._core.multiarray _reconstruct")
NDARRAY, DTYPE, ENCODE = "numpy ndarray", "numpy dtype", "_codecs encode"
ALLOWED_NAMES = {*RECONSTRUCT, NDARRAY, DTYPE, ENCODE}


@dataclass
class Array:
    """A NumPy array: created empty, filled by the opcode BUILD."""

    array: Bytes | None = None


@dataclass(frozen=True)
class Name:
    """The name of a function or class. It is never imported."""

    text: str


@dataclass(frozen=True)
class Uint8:
    """NumPy's type uint8."""


def read_pickle(data: bytes) -> Any:
    """Reads a pickle of dictionaries, lists, text, bytes, numbers and uint8 arrays; ValueError for anything else."""
    machine = Machine()
    for index, (code, argument, _) in enumerate(pickletools.genops(io.BytesIO(data))):
        if index >= MAX_OPCODES:
            raise ValueError(f"its pickle has more than {MAX_OPCODES:,} instructions")
        step = OPCODES.get(code.name)
        if step is None:
            raise ValueError(f"its pickle has the instruction {code.name}, which no batch of CIFAR-10 has")
        step(machine, argument)
    return machine.pop()


class Machine:
    """The stack machine of the pickle protocol."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []
        """The stacks under each mark."""
        self.memo: dict[int, Any] = {}
        self.encoded = 0

    def pop(self) -> Any:
        if not self.stack:
            raise ValueError("its pickle pops from an empty stack")
        return self.stack.pop()

    def top(self, kind: type) -> Any:
        if not self.stack or not isinstance(self.stack[-1], kind):
            raise ValueError(f"its pickle needs a {kind.__name__} where it has none")
        return self.stack[-1]

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def push_text(self, value: str) -> None:
        """Pushes a string of Python 2, which is bytes."""
        self.push(value.encode("latin1"))

    def push_dict(self, items: list[Any]) -> None:
        self.push({})
        self.set_items(items)

    def last(self, count: int) -> list[Any]:
        return [self.pop() for _ in range(count)][::-1]

    def mark(self) -> None:
        self.below.append(self.stack)
        self.stack = []

    def since_mark(self) -> list[Any]:
        if not self.below:
            raise ValueError("its pickle has no mark where it needs one")
        values, self.stack = self.stack, self.below.pop()
        return values

    def get(self, place: int) -> None:
        if place not in self.memo:
            raise ValueError("its pickle reads a memo entry that it has not stored")
        self.push(self.memo[place])

    def put(self, place: int) -> None:
        self.memo[place] = self.top(object)

    def extend(self, values: list[Any]) -> None:
        self.top(list).extend(values)

    def set_items(self, items: list[Any]) -> None:
        into = self.top(dict)
        if len(items) % 2:
            raise ValueError("its pickle has a key without a value")
        for key, value in zip(items[::2], items[1::2]):
            # Hashing deeply nested tuples could take for ever.
            if not isinstance(key, str | bytes | int):
                raise ValueError("its pickle has a key that is no text and no number")
            into[key] = value

    def name(self, text: str) -> None:
        if text not in ALLOWED_NAMES:
            raise ValueError(f"its pickle asks for {short_repr(text.replace(' ', '.'))}, which no batch of CIFAR-10 has")
        self.push(Name(text))

    def stack_name(self) -> None:
        name, module = self.pop(), self.pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise ValueError("its pickle has a name that is no text")
        self.name(f"{module} {name}")

    def call(self) -> None:
        arguments, called = self.pop(), self.top(Name).text
        if not isinstance(arguments, tuple) or called == NDARRAY:
            raise ValueError("its pickle calls what no batch of CIFAR-10 does")
        self.stack[-1] = self.encode(arguments) if called == ENCODE else make(called, arguments)

    def encode(self, arguments: tuple[Any, ...]) -> bytes:
        """Decodes bytes as Python 3 writes them for Python 2: a call of _codecs.encode."""
        if len(arguments) != 2 or not isinstance(arguments[0], str) or arguments[1] not in ("latin1", b"latin1"):
            raise ValueError("it holds bytes in an unknown form")
        self.encoded += len(arguments[0])
        if self.encoded > HELD:
            raise ValueError(f"its pickle would take more than {HELD:,} bytes of memory")
        return arguments[0].encode("latin1")

    def build(self) -> None:
        state, made = self.pop(), self.top(object)
        if isinstance(made, Array):
            made.array = array_of(state)
        elif not isinstance(made, Uint8):  # Byte order and alignment do not matter for single bytes.
            raise ValueError("it sets the state of something other than an array")


def make(called: str, arguments: tuple[Any, ...]) -> Array | Uint8:
    if called in RECONSTRUCT:
        return Array()
    code = arguments[0] if arguments else None
    if code not in ("u1", b"u1"):
        kind = f"of {code[:20]!r}" if isinstance(code, str | bytes) else "of an unknown type"
        raise ValueError(f"it holds an array {kind}, not of uint8")
    return Uint8()


def array_of(state: Any) -> Bytes:
    """Returns the array of NumPy's pickled state: version, shape, dtype, Fortran order, bytes."""
    if not isinstance(state, tuple) or len(state) != 5:
        raise ValueError("it holds an array in an unknown form")
    _, shape, kind, fortran_order, raw = state
    if not isinstance(kind, Uint8) or not isinstance(raw, bytes) or fortran_order:
        raise ValueError("it holds an array that is not uint8 in rows")
    if not isinstance(shape, tuple) or not all(isinstance(size, int) for size in shape):
        raise ValueError("it holds an array without a shape")
    if len(shape) != 2 or min(shape) < 1 or shape[0] * shape[1] != len(raw):
        raise ValueError("it holds an array whose shape is not that of its bytes, [n, 3072]")
    return np.frombuffer(raw, np.uint8).reshape(shape)


OPCODES: dict[str, Callable[[Machine, Any], None]] = {
    **dict.fromkeys(("PROTO", "FRAME", "STOP"), lambda machine, _: None),
    "NONE": lambda machine, _: machine.push(None),
    "NEWTRUE": lambda machine, _: machine.push(True),
    "NEWFALSE": lambda machine, _: machine.push(False),
    "EMPTY_DICT": lambda machine, _: machine.push({}),
    "EMPTY_LIST": lambda machine, _: machine.push([]),
    "EMPTY_TUPLE": lambda machine, _: machine.push(()),
    "MARK": lambda machine, _: machine.mark(),
    "DICT": lambda machine, _: machine.push_dict(machine.since_mark()),
    "LIST": lambda machine, _: machine.push(machine.since_mark()),
    "TUPLE": lambda machine, _: machine.push(tuple(machine.since_mark())),
    "TUPLE1": lambda machine, _: machine.push(tuple(machine.last(1))),
    "TUPLE2": lambda machine, _: machine.push(tuple(machine.last(2))),
    "TUPLE3": lambda machine, _: machine.push(tuple(machine.last(3))),
    "APPEND": lambda machine, _: machine.extend(machine.last(1)),
    "APPENDS": lambda machine, _: machine.extend(machine.since_mark()),
    "SETITEM": lambda machine, _: machine.set_items(machine.last(2)),
    "SETITEMS": lambda machine, _: machine.set_items(machine.since_mark()),
    "MEMOIZE": lambda machine, _: machine.put(len(machine.memo)),
    "GLOBAL": lambda machine, text: machine.name(text),
    "STACK_GLOBAL": lambda machine, _: machine.stack_name(),
    "REDUCE": lambda machine, _: machine.call(),
    "BUILD": lambda machine, _: machine.build(),
}
INTEGERS = ("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1")
TEXTS = ("UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "SHORT_BINBYTES", "BINBYTES", "BINBYTES8")
OPCODES |= dict.fromkeys(INTEGERS + TEXTS, Machine.push)
OPCODES |= dict.fromkeys(("STRING", "BINSTRING", "SHORT_BINSTRING"), Machine.push_text)
OPCODES |= dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT"), Machine.put)
OPCODES |= dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), Machine.get)
