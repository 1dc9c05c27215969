"""ByteTokenizer: text as its bytes in UTF-8, 256 ids and no others.

There are no special tokens: no byte ends a text, and none pads one, so a batch has rows of one length.
"""

from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizer

from longstride.model.config import BYTES
from longstride.transformers.config import CODE


class ByteTokenizer(PreTrainedTokenizer):
    """Id b is byte b. Bytes that are no UTF-8 are decoded as U+FFFD; the ids keep them."""

    model_input_names = ["input_ids", "attention_mask"]  # noqa: RUF012  # As in the base class.

    def __init__(self, **given: Any) -> None:
        given.setdefault("auto_map", {"AutoTokenizer": [f"{CODE}.ByteTokenizer", None]})
        super().__init__(**{"clean_up_tokenization_spaces": False, **given})

    @property
    def vocab_size(self) -> int:
        return BYTES

    def get_vocab(self) -> dict[str, int]:
        return {chr(byte): byte for byte in range(BYTES)} | self.added_tokens_encoder

    def _tokenize(self, text: str, **_: Any) -> list[str]:
        return [chr(byte) for byte in text.encode("utf-8")]

    def _convert_token_to_id(self, token: str) -> int:
        return ord(token)

    def _convert_id_to_token(self, index: int) -> str:
        return chr(index)

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return bytes(map(ord, tokens)).decode("utf-8", errors="replace")

    def save_vocabulary(self, save_directory: str | Path, filename_prefix: str | None = None) -> tuple[str, ...]:
        """There is none."""
        return ()
