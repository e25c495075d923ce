"""What a worker's memory holds, as arithmetic: pure functions of shapes and bounds. Nothing is read or loaded here.

``inventory`` finds the figures, ``check`` prints them before anything is loaded, and the factory makes its caches of
the same ``kv_tokens``. Sizes are bytes on one device; with several devices, on each of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from specdecode_worker.contract import MAX_NODES
from specdecode_worker.engine.kv_cache.block_pool import BLOCK_SIZE

RING = 64
SLACK_TOKENS = 4 * BLOCK_SIZE
"""What a sequence may hold beyond its length: trees of the steps in flight, and the rest of its last block."""
ROWS_PER_SEQUENCE = 8
"""Rows of logits that a sequence is counted with: a tree of seven nodes. Larger ones at a full batch eat of the
reserve."""
SAMPLING_BYTES = 60
"""Per logit that is chosen from, at the peak: words of the noise (int64, many alive), sorts of top-p (measured: 46)."""
MASK_BYTES = 27
"""Per (token of a pass, key that it may see): indices and truth values of the attention's mask, as they are made."""
RUNTIME_BYTES = {"cpu": 384 * 2**20, "cuda": 640 * 2**20}
"""Python and torch of the engine and the server (measured, private pages alone), or a CUDA context."""
MOST_GRAPHS = 128
"""CUDA graphs that a worker captures."""
GRAPH_BYTES = 4 * 2**20
"""Of the driver's own for a graph of some thousand launches. An estimate: no GPU has been asked."""
GRAPH_TABLE_BYTES = 8 * 1024
"""Of the static tables of a graph, per sequence that it holds: trees of up to 64 nodes, and what a draft proposed."""
LARGE_DRAFT = 0.3
"""Share of the target beyond which a draft costs more than it brings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """A target or a draft, as it stands on one device. One without decoder blocks keeps no keys and values, and has
    zeros for their shape. ``tables`` are what it computes once for itself: cosines and sines of every position."""

    name: str
    weights: int
    tables: int
    hidden_size: int
    vocab_size: int
    intermediate_size: int = 0
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    kv_layers: int = 0

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        return 2 * self.kv_layers * self.kv_heads * self.head_dim * dtype_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """``limit`` is all that there is, in the words of ``source``; ``free`` is what nobody uses yet."""

    kind: Literal["cpu", "cuda"]
    limit: int
    free: int
    source: str
    count: int = 1
    """Devices that share the weights of a replica."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What a user may turn: names of EngineConfig, and the length that was asked for."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    dtype_bytes: int
    utilization: float
    kv_cache_tokens: int | None = None
    prefix_caching: bool = True
    graph_rows: int = 0
    """Sequences of the largest CUDA graph; 0 where none are captured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """All that competes for a device's memory, and what is left for keys and values."""

    device: Device
    bounds: Bounds
    target: Network
    drafts: tuple[Network, ...] = ()
    aux_size: int = 0
    """Width of the target's states that drafts read of every token."""

    @property
    def usable(self) -> int:
        """The limit less the reserve, and no more than nobody else uses."""
        return min(int(self.device.limit * self.bounds.utilization), self.device.free)

    @property
    def reserve(self) -> int:
        return self.device.limit - int(self.device.limit * self.bounds.utilization)

    @property
    def occupied(self) -> int:
        """What others use of the part that is not reserve."""
        return max(0, int(self.device.limit * self.bounds.utilization) - self.device.free)

    @property
    def runtime(self) -> int:
        return RUNTIME_BYTES[self.device.kind]

    @property
    def draft_weights(self) -> int:
        return sum(draft.weights for draft in self.drafts)

    @property
    def state(self) -> int:
        """Tables of positions, tokens and block tables of every slot (one is for padding), and the ring of states that
        drafts read."""
        bounds = self.bounds
        reach = bounds.max_model_len + MAX_NODES + 1
        slots = (bounds.max_num_seqs + 1) * 8 * (reach + 1 + 1 + -(-reach // BLOCK_SIZE))
        ring = (bounds.max_num_seqs + 1) * (RING + 1) * self.aux_size * bounds.dtype_bytes
        return slots + ring + sum(network.tables for network in (self.target, *self.drafts))

    @property
    def activations(self) -> int:
        """The peak of one step: the widest layer and the mask, or the choice of tokens from the logits."""
        bounds, tokens = self.bounds, self.bounds.max_num_batched_tokens
        rows = min(tokens, bounds.max_num_seqs * ROWS_PER_SEQUENCE)
        chosen = rows * self.target.vocab_size * (SAMPLING_BYTES + bounds.dtype_bytes)
        layer = max(tokens * bounds.dtype_bytes * _layer_width(network) for network in (self.target, *self.drafts))
        keys = min(bounds.max_model_len, bounds.kv_cache_tokens or bounds.max_model_len)
        mask = tokens * keys * (MASK_BYTES + bounds.dtype_bytes)
        return max(layer + mask, chosen) + tokens * self.aux_size * bounds.dtype_bytes

    @property
    def graphs(self) -> int:
        """They share one pool, which holds what the largest step leaves on its way: its widest layer, and logits of
        target and draft; besides, each has its tables, and the driver's own."""
        bounds = self.bounds
        if self.device.kind == "cpu" or not bounds.graph_rows:
            return 0
        tokens = min(bounds.max_num_batched_tokens, bounds.graph_rows * ROWS_PER_SEQUENCE)
        widest = max(_layer_width(network) for network in (self.target, *self.drafts))
        pool = tokens * bounds.dtype_bytes * (widest + 2 * self.target.vocab_size + self.aux_size)
        return pool + MOST_GRAPHS * (GRAPH_BYTES + bounds.graph_rows * GRAPH_TABLE_BYTES)

    @property
    def bytes_per_token(self) -> int:
        """Of keys and values, in the target's cache and in every draft's."""
        return sum(network.kv_bytes_per_token(self.bounds.dtype_bytes) for network in (self.target, *self.drafts))

    @property
    def bytes_per_block(self) -> int:
        """A block's keys and values, and what drafts read of its last token, so that they can go on behind it."""
        states = self.aux_size * self.bounds.dtype_bytes if self.bounds.prefix_caching else 0
        return BLOCK_SIZE * self.bytes_per_token + states

    @property
    def spent(self) -> int:
        """All but keys and values."""
        return self.runtime + self.target.weights + self.draft_weights + self.state + self.activations + self.graphs

    @property
    def left(self) -> int:
        """For keys and values; negative when not even the rest fits."""
        return self.usable - self.spent

    @property
    def room_tokens(self) -> int:
        """Tokens of keys and values that what is left holds: whole blocks, beside the one that absorbs padding."""
        return max(0, self.left // self.bytes_per_block - 1) * BLOCK_SIZE

    @property
    def least_tokens(self) -> int:
        """Without so many it is no use to start: one sequence of full length, or what was asked for."""
        return self.bounds.kv_cache_tokens or self.bounds.max_model_len + SLACK_TOKENS

    @property
    def fits(self) -> bool:
        return self.room_tokens >= self.least_tokens

    @property
    def longest(self) -> int:
        """The max_model_len that would fit with all else as it is; 0 when none does."""
        low, high = 0, self.bounds.max_model_len
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._fits_length(middle) else (low, middle - 1)
        return low if low >= BLOCK_SIZE else 0

    @property
    def sequences(self) -> int:
        """Sequences of full length that run at once."""
        if not self.fits:
            return 0
        held = kv_tokens(self)
        return min(self.bounds.max_num_seqs, held // min(held, self.bounds.max_model_len + SLACK_TOKENS))

    def _fits_length(self, length: int) -> bool:
        return replace(self, bounds=replace(self.bounds, max_model_len=length)).fits


def kv_tokens(budget: Budget) -> int:
    """Tokens of the caches that the engine makes, a multiple of the block, beside the padding block.

    What was asked for, else what is left. A CPU's memory has other uses: there no more than the batch could ever need.
    """
    bounds = budget.bounds
    if bounds.kv_cache_tokens:
        return _whole(bounds.kv_cache_tokens)
    ever = _whole(bounds.max_num_seqs * (bounds.max_model_len + SLACK_TOKENS))
    return min(budget.room_tokens, ever) if budget.device.kind == "cpu" else budget.room_tokens


def kv_cache_bytes(budget: Budget, tokens: int) -> int:
    """Of the caches of ``tokens``, padding block included."""
    return (tokens // BLOCK_SIZE + 1) * budget.bytes_per_block


def _whole(tokens: int) -> int:
    return -(-tokens // BLOCK_SIZE) * BLOCK_SIZE


def _layer_width(network: Network) -> int:
    """Numbers per token that are alive at once in a layer: residual and norm beside projections or the MLP."""
    attention = 4 * (network.heads + 2 * network.kv_heads) * network.head_dim
    return 4 * network.hidden_size + max(attention, 4 * network.intermediate_size)
