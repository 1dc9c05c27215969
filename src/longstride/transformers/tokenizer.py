"""ByteTokenizer: text as its bytes in UTF-8, 256 ids and no others.

There are no special tokens: no byte ends a text, and none pads one, so a batch has rows of one length. None can be added,
since the network has 256 inputs; but a byte may get a role, such as tokenizer.pad_token = "\\0".
"""

from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizer

from longstride.common.checks import short_repr, whole_number
from longstride.model.config import BYTES
from longstride.transformers.config import CODE

OWNER = "ByteTokenizer"


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
        try:
            return [chr(byte) for byte in text.encode("utf-8")]
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{OWNER}: {short_repr(text[error.start])} is half of a character, which UTF-8 cannot encode; give "
                "text.encode('utf-8', 'replace').decode()"
            ) from None

    def __setattr__(self, key: str, value: Any) -> None:
        name = key.removesuffix("_ids").removesuffix("_id")
        if name in (*self.SPECIAL_TOKENS_ATTRIBUTES, "extra_special_tokens"):
            ids = () if name == key or value is None else value if isinstance(value, list | tuple) else [value]
            tokens = [self._convert_id_to_token(whole_number(OWNER, key, one, 0)) for one in ids]
            _check_tokens(tokens if name != key else value)
        super().__setattr__(key, value)

    def add_special_tokens(self, special_tokens_dict: dict[str, Any], *others: Any, **given: Any) -> int:
        for tokens in special_tokens_dict.values():
            _check_tokens(tokens)
        return int(super().add_special_tokens(special_tokens_dict, *others, **given))

    def _add_tokens(self, new_tokens: Any, special_tokens: bool = False) -> int:
        _check_tokens(new_tokens)
        return int(super()._add_tokens(new_tokens, special_tokens))

    def _convert_token_to_id(self, token: str) -> int:
        if len(token) != 1 or ord(token) >= BYTES:
            raise ValueError(
                f"{OWNER}: {short_repr(token)} is no token; ids are the {BYTES} bytes, and tokens their characters"
            )
        return ord(token)

    def _convert_id_to_token(self, index: int) -> str:
        if not 0 <= index < BYTES:
            raise ValueError(f"{OWNER}: {index} is no id; ids are the {BYTES} bytes, 0 to {BYTES - 1}")
        return chr(index)

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return bytes(map(ord, tokens)).decode("utf-8", errors="replace")

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoTokenizer") -> None:
        """As for LongstrideForCausalLM: only subclasses have code of their own to be saved."""
        if cls is not ByteTokenizer:
            super().register_for_auto_class(auto_class)

    def save_vocabulary(self, save_directory: str | Path, filename_prefix: str | None = None) -> tuple[str, ...]:
        """There is none."""
        return ()


def _check_tokens(tokens: Any) -> None:
    """Raises ValueError unless each token is one byte. Other characters are several, and a token is a text."""
    for token in tokens if isinstance(tokens, list | tuple) else [tokens]:
        text = str(token)
        if token is not None and not (len(text) == 1 and text.isascii()):
            raise ValueError(
                f"{OWNER}: {short_repr(text)} cannot be a token; ids are the {BYTES} bytes, so give a role only to an ASCII "
                "character, such as pad_token='\\0'"
            )
