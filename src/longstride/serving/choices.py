"""Choices of a completion in OpenAI's shape: text that is always valid UTF-8, the bytes themselves, and logprobs."""

import codecs
from collections.abc import Iterator, Sequence
from typing import Any

from longstride.sampling.scores import Score
from longstride.serving.answers import Piece

MOST_NUMBERS = 2**11
"""The most bytes and logprobs of a chunk, unless one byte has more: so many take some milliseconds."""


class Choice:
    """One choice as it grows. A character that spans pieces is shown when it is complete; bytes that are no UTF-8 become
    U+FFFD."""

    def __init__(self, index: int, prompt: bytes, echo: bool, likely: int | None) -> None:
        """likely: bytes listed for each position with logprobs; None without logprobs."""
        self.index, self.prompt, self.likely = index, prompt, likely
        self.unsent_prompt = prompt if echo else b""
        self.size = 0
        """Bytes that were made."""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offsets = codecs.getincrementaldecoder("utf-8")("replace")
        self._characters = 0

    def chunks(self, piece: Piece) -> Iterator[dict[str, Any]]:
        """Returns the next parts of the choice, each of few numbers; of the echoed prompt, too, if it is the first."""
        data, self.unsent_prompt = self.unsent_prompt + piece.data, b""
        self.size += len(piece.data)
        most = max(1, MOST_NUMBERS // (1 if self.likely is None else 2 + self.likely))
        prompt = 0 if piece.prompt_scores is None else len(piece.prompt_scores.logprobs)
        for first in range(0, max(1, len(data)), most):
            end = first + most
            scores = piece.scores[max(0, first - prompt) : max(0, end - prompt)]
            if piece.prompt_scores is not None and first < prompt:
                scores = piece.prompt_scores.listed(first, end) + scores
            yield self._chunk(data[first:end], scores, piece.finish if end >= len(data) else None)

    def _chunk(self, data: bytes, scores: Sequence[Score], finish: str | None) -> dict[str, Any]:
        return {
            "index": self.index,
            "text": self._decoder.decode(data, final=finish is not None),
            "byte_ids": list(data),
            "logprobs": None if self.likely is None else self._logprobs(data, scores),
            "finish_reason": finish,
        }

    def _logprobs(self, data: bytes, scores: Sequence[Score]) -> dict[str, Any]:
        return {
            "tokens": [TOKENS[byte] for byte in data],
            "token_logprobs": [score.logprob for score in scores],
            "top_logprobs": [{TOKENS[byte]: logprob for byte, logprob in score.likely} for score in scores],
            "text_offset": self._text_offsets(data),
        }

    def _text_offsets(self, data: bytes) -> list[int]:
        """Returns the index of the character that each byte belongs to."""
        if data.isascii() and not self._offsets.getstate()[0]:
            self._characters += len(data)
            return list(range(self._characters - len(data), self._characters))
        offsets = []
        for byte in data:
            self._characters += len(self._offsets.decode(bytes([byte])))
            is_incomplete = bool(self._offsets.getstate()[0])
            offsets.append(self._characters if is_incomplete else self._characters - 1)
        return offsets


def token(byte: int) -> str:
    """Returns a byte as OpenAI writes a token: a character, or what is none by itself as bytes:\\xNN."""
    return chr(byte) if byte < 128 else f"bytes:\\x{byte:02x}"


TOKENS = [token(byte) for byte in range(256)]
