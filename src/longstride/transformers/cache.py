"""LongstrideCache: keys and values of the positions that later queries see, as a Cache of transformers.

It holds a `Decoder` of `longstride sample`, so generation computes what sampling does: activations in float32, and weights
rounded to the model's precision. After n tokens the network has been at positions 0 to n: the input at position 0 is the
start vector, that at position i token i - 1.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from longstride.common.checks import short_repr, whole_number
from longstride.model import SparseTransformer
from longstride.model.layers import check_plain
from longstride.sampling.decoder import Decoder

OWNER = "LongstrideCache"


class LongstrideCache(Cache):
    """The cache of one batch. Its size is fixed when the first tokens come."""

    def __init__(self, network: SparseTransformer, tokens: int | None = None) -> None:
        """`tokens`: the most that will be given, prompt included; as many as the context allows if None."""
        super().__init__(layers=[])
        if not isinstance(network, SparseTransformer):
            raise ValueError(
                f"{OWNER}: network must be a SparseTransformer, got {type(network).__name__}; give model.network"
            )
        self.network = network
        most = network.config.context - 1  # The last position predicts a token that has none of its own.
        self.tokens = most if tokens is None else min(whole_number(OWNER, "tokens", tokens, 1), most)
        self.decoder: Decoder | None = None

    @torch.compiler.disable(reason="longstride: generation with a cache is not compiled")  # type: ignore[untyped-decorator]
    @torch.no_grad()
    def extend(self, tokens: Tensor) -> Tensor:
        """Takes more tokens [batch, n] and returns logits of next tokens: after the last one, [batch, 1, 256], if it was
        empty, and after each of them, [batch, n, 256], if it was not."""
        batch, total = len(tokens), self.get_seq_length() + tokens.shape[1]
        if not batch:
            raise ValueError(f"{OWNER}: input_ids has no rows; give at least one")
        if total > self.tokens:
            is_whole = self.tokens == self.network.config.context - 1
            fix = "" if is_whole else ", or LongstrideCache(model.network) as past_key_values from the first call on"
            raise ValueError(
                f"{OWNER}: there is room for {self.tokens:,} tokens, got {total:,} (the context is "
                f"{self.network.config.context:,}, and the last token is only predicted); give a smaller max_new_tokens{fix}"
            )
        if self.decoder is None:
            fix = "merge what they add into the layers' weights, or give generate() use_cache=False"
            check_plain(OWNER, self.network, fix)
            self.decoder = Decoder(self.network, batch, self.tokens + 1)
            self.decoder.prefill(tokens)
            tokens = tokens[:, -1:]
        elif batch != self.decoder.batch:
            raise ValueError(f"{OWNER}: input_ids has {batch} rows, and the cache {self.decoder.batch}; make a new cache")
        # Copies, since the decoder's are inference tensors.
        return torch.stack([self.decoder.step(column).clone() for column in tokens.unbind(1)], 1)

    def __deepcopy__(self, _: Any) -> "LongstrideCache":
        """A copy goes on with the same network, so that several can go on from one prompt."""
        made = LongstrideCache(self.network, self.tokens)
        made.decoder = None if self.decoder is None else self.decoder.copy()
        return made

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Returns the number of tokens that were given."""
        return 0 if self.decoder is None else self.decoder.position - 1

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return self.tokens

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row r takes the keys and values of row beam_idx[r]."""
        if self.decoder is None:
            return
        rows = self.decoder.batch
        if not isinstance(beam_idx, Tensor) or beam_idx.shape != (rows,):
            got = list(beam_idx.shape) if isinstance(beam_idx, Tensor) else short_repr(beam_idx)
            raise ValueError(f"{OWNER}: beam_idx must be a tensor of the {rows} rows to go on from, got {got}")
        self.decoder.reorder(beam_idx)

    def reset(self) -> None:
        self.decoder = None

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            raise NotImplementedError(
                f"{OWNER}: crop({tokens_to_remove}) is not possible, since keys that no later query sees are gone; generate "
                "without an assistant"
            )

    def update(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"{OWNER}: it is for LongstrideForCausalLM alone; give other models a DynamicCache")

    def batch_repeat_interleave(self, repeats: int) -> None:
        raise NotImplementedError(f"{OWNER}: its number of rows is fixed; generate by sampling or beam search")

    def batch_select_indices(self, indices: Tensor) -> None:
        raise NotImplementedError(f"{OWNER}: its number of rows is fixed; generate by sampling or beam search")

    @property
    def batch_size(self) -> int:
        return -1 if self.decoder is None else self.decoder.batch

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_initialized(self) -> bool:
        return self.decoder is not None

    @property
    def is_croppable(self) -> bool:
        return False
