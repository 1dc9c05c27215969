"""Choices of a completion in OpenAI's shape: text that is always valid UTF-8, the bytes themselves, and logprobs."""

import codecs
from collections.abc import Sequence
from typing import Any

from longstride.sampling.places import Score
from longstride.serving.answers import Piece


class Choice:
    """One choice as it grows. A character that spans pieces is shown when it is complete; bytes that are no UTF-8 become
    U+FFFD."""

    def __init__(self, index: int, prompt: bytes, echo: bool, has_logprobs: bool) -> None:
        self.index, self.prompt, self.has_logprobs = index, prompt, has_logprobs
        self.unsent_prompt = prompt if echo else b""
        self.size = 0
        """Bytes that were made."""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offsets = codecs.getincrementaldecoder("utf-8")("replace")
        self._characters = 0

    def chunk(self, piece: Piece) -> dict[str, Any]:
        """Returns the next part of the choice; of the echoed prompt, too, if it is the first."""
        data, scores = self.unsent_prompt + piece.data, (piece.prompt_scores or []) + piece.scores
        self.unsent_prompt = b""
        self.size += len(piece.data)
        return {
            "index": self.index,
            "text": self._decoder.decode(data, final=piece.finish is not None),
            "byte_ids": list(data),
            "logprobs": self._logprobs(data, scores) if self.has_logprobs else None,
            "finish_reason": piece.finish,
        }

    def _logprobs(self, data: bytes, scores: Sequence[Score]) -> dict[str, Any]:
        offsets = []
        for byte in data:
            self._characters += len(self._offsets.decode(bytes([byte])))
            is_incomplete = bool(self._offsets.getstate()[0])
            offsets.append(self._characters if is_incomplete else self._characters - 1)
        return {
            "tokens": [token(byte) for byte in data],
            "token_logprobs": [score.logprob for score in scores],
            "top_logprobs": [{token(byte): logprob for byte, logprob in score.likely} for score in scores],
            "text_offset": offsets,
        }


def token(byte: int) -> str:
    """Returns a byte as OpenAI writes a token: a character, or what is none by itself as bytes:\\xNN."""
    return chr(byte) if byte < 128 else f"bytes:\\x{byte:02x}"
