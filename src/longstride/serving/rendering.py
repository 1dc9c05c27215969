"""JSON of answers in parts: one answer may have hundreds of megabytes, and the event loop serves others meanwhile."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from typing import Any

from starlette.responses import Response, StreamingResponse

from longstride.serving.answers import Piece
from longstride.serving.choices import Choice

PART_BYTES = 2**16
"""The most bytes of an answer that are sent at a time."""
LINE_ENDS = {end.encode(): json.dumps(end)[1:-1].encode() for end in "\x85\u2028\u2029"}
"""Characters at which some clients end a line, and with it an event of a stream, and what JSON has instead of them."""


async def chunks_of(choice: Choice, piece: Piece) -> AsyncIterator[dict[str, Any]]:
    """The chunks of a piece. Others have their turn after each."""
    for chunk in choice.chunks(piece):
        yield chunk
        await asyncio.sleep(0)


class WholeChoice:
    """A choice as JSON that grows by chunks."""

    def __init__(self, choice: Choice) -> None:
        self.choice = choice
        self._text = bytearray()
        self._byte_ids = bytearray()
        self._logprobs: dict[str, bytearray] = {}
        self._finish: str | None = None

    def add(self, chunk: dict[str, Any]) -> None:
        self._text += to_json(chunk["text"])[1:-1]
        _extend(self._byte_ids, chunk["byte_ids"])
        for name, values in (chunk["logprobs"] or {}).items():
            _extend(self._logprobs.setdefault(name, bytearray()), values)
        self._finish = chunk["finish_reason"]

    def parts(self) -> Iterator[bytes | bytearray]:
        yield b'{"index":%d,"text":"' % self.choice.index
        yield self._text
        yield b'","byte_ids":['
        yield self._byte_ids
        yield b'],"logprobs":'
        if self.choice.likely is None:
            yield b"null"
        else:
            for number, (name, values) in enumerate(self._logprobs.items()):
                yield b'%c"%s":[' % (b"," if number else b"{", name.encode())
                yield values
                yield b"]"
            yield b"}"
        yield b',"finish_reason":%s}' % to_json(self._finish)


def _extend(values: bytearray, more: Sequence[Any]) -> None:
    """Appends to the values of a JSON list."""
    if values and more:
        values += b","
    values += to_json(more)[1:-1]


def whole_answer(head: dict[str, Any], choices: Sequence[WholeChoice], usage: dict[str, int]) -> Response:
    """Returns the response with all choices, in parts if it is long."""
    parts: list[bytes | bytearray] = [to_json(head)[:-1], b',"choices":[']
    for number, choice in enumerate(choices):
        parts += ([b","] if number else []) + list(choice.parts())
    parts += [b'],"usage":', to_json(usage), b"}"]
    size = sum(map(len, parts))
    if size <= PART_BYTES:
        return Response(b"".join(parts), media_type="application/json")
    return StreamingResponse(_slices(parts), headers={"content-length": str(size)}, media_type="application/json")


async def _slices(parts: Iterable[bytes | bytearray]) -> AsyncIterator[bytes]:
    for part in parts:
        for first in range(0, len(part), PART_BYTES):
            yield bytes(part[first : first + PART_BYTES])
            await asyncio.sleep(0)  # Sending does not wait for a client that reads fast.


def to_json(content: Any) -> bytes:
    made = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    for end, escaped in LINE_ENDS.items():
        made = made.replace(end, escaped)
    return made
