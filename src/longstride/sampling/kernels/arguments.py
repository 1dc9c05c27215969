"""Kernel arguments that belong together, as NamedTuples: tensors and numbers, or constants.

Triton passes each field as a parameter of its own, so a group costs no more than its fields. A group of constants is one
`tl.constexpr` argument, made by `constants`. No field may be called `values` or `type`, which Triton's own tuples have.
"""

from typing import Any, NamedTuple


class Linear(NamedTuple):
    """A linear layer's weight [out, in] and bias [out]; stacked over blocks, each has one more dimension in front."""

    weight: Any
    bias: Any


class Norm(NamedTuple):
    """A layer norm's scale and shift, [width] or stacked over blocks."""

    scale: Any
    shift: Any


class BlockWeights(NamedTuple):
    """The weights of one block, or of all blocks stacked."""

    norm_attention: Norm
    query_key_value: Linear
    project: Linear
    norm_ff: Norm
    inner: Linear
    outer: Linear


class Embedding(NamedTuple):
    """Embedding tables and how a position splits into coordinates."""

    tokens: Any
    """[257, width]: the bytes, then the start vector."""
    positions: Any
    """The position tables of all coordinates, concatenated: [sum of sizes, width]."""
    coordinates: Any
    """int32 [coordinates, 3]: the first row in `positions`, the stride (positions per step of the coordinate), the size."""


class Weights(NamedTuple):
    """All weights of a network."""

    embedding: Embedding
    blocks: BlockWeights
    norm: Norm
    """Before the output layer."""
    output: Any
    """The output layer's weight [256, width]."""


class Cache(NamedTuple):
    """Keys and values of all blocks, each block [batch, heads, slots, d_qk] or [..., d_v], one after the other."""

    k: Any
    v: Any
    starts: Any
    """int64 [layers]: the slots before each block."""
    slots: Any
    """int32 [layers]: the slots per head of each block."""


class BlockCache(NamedTuple):
    """Keys [batch, heads, slots, d_qk] and values [batch, heads, slots, d_v] of a block."""

    k: Any
    v: Any
    slots: Any
    """Slots per head."""


class VisibleSlots(NamedTuple):
    """The slots that queries attend to, as `list_seen` writes them: a row per position and head of the pattern cycle."""

    position: Any
    """int32 [1]: the first position that is listed; or that of each stream, [batch]."""
    slots: Any
    """int32 [rows, capacity]: without the query's own slot; -1 for those to skip."""
    counts: Any
    """int32 [rows]: the entries of `slots` in use."""
    own: Any
    """int32 [rows]: the slot of the query's own key and value, -1 if the query does not see them."""
    capacity: Any


class Streams(NamedTuple):
    """The bytes of the streams and what the choice of the next one needs."""

    tokens: Any
    """uint8 [batch, length]"""
    prompt_lengths: Any
    """int32 [batch]: bytes at earlier positions are given."""
    random_states: Any
    """int64 [batch]"""
    last_bytes: Any
    """int32 [readers, batch]: each reader's copy of the byte before the current position."""


class PlacedStreams(NamedTuple):
    """Streams at positions of their own, and what the choice of their next bytes needs."""

    active: Any
    """int32 [batch]: 1 if a stream goes on, 0 if it waits."""
    random_states: Any
    """int64 [batch]"""
    last_bytes: Any
    """int32 [batch]: the byte before the current position."""
    made: Any
    """uint8 [batch, size]: the newest bytes, that of position p at p % size."""
    broken: Any
    """int32 [batch]: 1 if logits were not finite."""


class NetworkSizes(NamedTuple):
    """Constants of the network; `block_*` are padded to powers of two."""

    layers: Any
    width: Any
    ff_width: Any
    heads: Any
    qkv_width: Any
    """Outputs of the layer that computes queries, keys and values."""
    coordinates: Any
    """Position tables."""
    cycle: Any
    """Blocks after which the patterns repeat."""
    block_width: Any
    block_ff: Any


class Partition(NamedTuple):
    """Constants: how workers share the work. Rows are those of a matrix that one worker computes, a power of two."""

    batch: Any
    workers: Any
    group: Any
    """Workers per head."""
    groups: Any
    head_turns: Any
    """Heads per group."""
    part_turns: Any
    """Parts of a head's keys, of all streams, per worker."""
    qkv_rows: Any
    project_rows: Any
    inner_rows: Any
    outer_rows: Any
    logit_rows: Any


class Workspace(NamedTuple):
    """Activations that programs exchange, float32, and the counters on which they synchronize."""

    embedding: Any
    """[workers, B, W]: each worker embeds the bytes for itself."""
    h: Any
    """[B, W]: the output of a block."""
    qkv: Any
    """[B, 2 * H * d_qk + H * d_v]; queries are scaled."""
    parts: Any
    """`SoftmaxState` of tensors [B, H, splits] (accumulator [..., d_v])."""
    projected: Any
    """[B, H, W]: each head's share of what attention adds to h, without the bias."""
    inner: Any
    """[B, F]"""
    logits: Any
    """[B, 256]"""
    counters: Any
    """int32: one for all workers, then one per head, each COUNTER_STRIDE long; 0 at launch."""


class Choice(NamedTuple):
    """How bytes are chosen, as tensors of one element, or one for each stream. A CUDA graph reads them anew in each step."""

    temperature: Any
    top_k: Any
    top_p: Any


class ProductSizes(NamedTuple):
    """Constants of a matrix product and of a program's tile of it."""

    inputs: Any
    outputs: Any
    terms: Any
    """Of x."""
    weight_terms: Any
    rows: Any
    columns: Any
    share: Any
    """Inputs that one program sums over."""
    block_in: Any
    """Inputs per iteration."""


class AttentionSizes(NamedTuple):
    """Constants of `attend_cached`."""

    shares: Any
    """Of the product that gives queries, keys and values."""
    terms: Any
    """Of the result."""
    splits: Any
    """Programs per head and stream."""
    tile: Any
    """Keys per tile."""
    stages: Any
    """Tiles that are loaded at once."""
    each: Any
    """Whether each stream has a position of its own, and so a list of visible slots."""
