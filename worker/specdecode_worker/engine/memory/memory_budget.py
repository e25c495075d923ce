"""Memory budget of a worker: arithmetic over model shapes and configured bounds, without reading or loading anything.

``model_inventory.py`` collects the figures, the ``check`` command prints the budget before anything is loaded, and
``factory.py`` sizes its caches with the same ``kv_tokens``. Sizes are bytes on one device; with several devices, on
each of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from specdecode_worker.contract import MAX_NODES
from specdecode_worker.engine.graphs.adjustment import ROWS_AT_ONCE
from specdecode_worker.engine.kv_cache.block_pool import BLOCK_SIZE
from specdecode_worker.engine.step.device_state import STATE_RING_POSITIONS

SLACK_TOKENS = 4 * BLOCK_SIZE
"""Tokens of cache that a sequence may hold beyond its length: trees of steps in flight and its last, partial block."""
ROWS_PER_SEQUENCE = 8
"""Rows of logits budgeted per sequence: the root and a tree of seven nodes. Larger trees at a full batch use memory of
the reserve."""
SAMPLING_BYTES = 60
"""Peak bytes per logit during sampling: int64 words of the noise, many of them alive at once, and the sorts of top-p
(measured: 46)."""
GPU_SAMPLING_BYTES = 24
"""Peak bytes per logit on a GPU, where noise stays in registers: adjusted logits in fp32, a temporary of them, and the
counts and masks of penalties. Multi-round sampling holds probabilities and takes ``SAMPLING_BYTES``."""
COUNT_BYTES = 9
"""Peak bytes per token of the vocabulary while a graph counts the tokens of a text: two fp32 tables and a mask."""
MASK_BYTES = 27
"""Peak bytes per (token of a pass, visible key) while the attention mask is built on a CPU: indices and booleans. The
kernel of a GPU builds none."""
TILE_ROWS = 64
"""Most rows (a query and a head) of a tile of the attention kernel, whose partial sums are fp32."""
SPARE_PIECES = 2 * 160
"""Pieces that the attention kernel cuts tiles into: two for each multiprocessor; the largest GPUs have 160."""
RUNTIME_BYTES = {"cpu": 384 * 2**20, "cuda": 640 * 2**20}
"""Fixed bytes of the process: Python and torch of engine and server (measured, private pages only), or the CUDA
context."""
DRAFT_PROCESS_BYTES = 320 * 2**20
"""Bytes of Python and torch of a draft process (measured on a CPU, private pages only: 305 MiB)."""
MOST_GRAPHS = 128
"""Upper bound of the CUDA graphs that a worker captures."""
GRAPH_BYTES = 4 * 2**20
"""Bytes that the driver needs for a CUDA graph of some thousand launches. An estimate, not measured on a GPU."""
GRAPH_TABLE_BYTES = 8 * 1024
"""Bytes of a CUDA graph's static tables per sequence: trees of up to 64 nodes and the draft's proposals."""
LARGE_DRAFT = 0.3
"""Weights of a draft relative to the target's above which drafting usually costs more than it saves."""
SMALL_DRAFT_PARAMETERS = 50_000_000
"""Weights of a separate draft model below which it is rarely accepted often enough to pay for its passes. An estimate,
so the warning asks for a measurement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Sizes of a target or a draft on one device; ``weights`` and ``tables`` are bytes.

    ``tables`` are buffers computed once, such as the cosines and sines of every position. A network without decoder
    blocks has no keys and values, and zeros for their shape.
    """

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
    own_vocab_size: int = 0
    """Number of logits of a draft with a vocabulary of its own, of which it copies those of the target's tokens."""
    separate_draft_parameters: int | None = None
    """Number of weights of a draft that is a model of its own (method draft-model); None for other networks."""

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """Return the bytes of one token's keys and values in all layers."""
        return 2 * self.kv_layers * self.kv_heads * self.head_dim * dtype_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Memory of one device, in bytes."""

    kind: Literal["cpu", "cuda"]
    limit: int
    """Total memory."""
    free: int
    """Memory that no process uses yet."""
    source: str
    """Name of the limit for messages, e.g. "GPU memory"."""
    count: int = 1
    """Number of devices that share the weights of a replica."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """User settings that affect memory, named as in ``EngineConfig``; ``max_model_len`` is the effective length."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    dtype_bytes: int
    utilization: float
    kv_cache_tokens: int | None = None
    prefix_caching: bool = True
    coupled: bool = True
    """False for a sampler that holds the probabilities of every node."""
    graph_rows: int = 0
    """Number of sequences of the largest CUDA graph; 0 if none are captured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Uses of a device's memory, and what is left for keys and values. Sizes are bytes."""

    device: Device
    bounds: Bounds
    target: Network
    drafts: tuple[Network, ...] = ()
    aux_size: int = 0
    """Width of the target's hidden states that drafts read for each token."""
    draft_processes: int = 0
    """Fixed bytes of draft processes that share this memory, which those on a CPU do.

    They include copies of the target's matrices that their drafts read.
    """

    @property
    def usable(self) -> int:
        """Memory that the worker may use: the limit minus the reserve, capped at the free memory."""
        return min(int(self.device.limit * self.bounds.utilization), self.device.free)

    @property
    def reserve(self) -> int:
        """Memory that ``gpu_memory_utilization`` leaves unused."""
        return self.device.limit - int(self.device.limit * self.bounds.utilization)

    @property
    def occupied(self) -> int:
        """Memory outside of the reserve that other processes use."""
        return max(0, int(self.device.limit * self.bounds.utilization) - self.device.free)

    @property
    def runtime(self) -> int:
        """Fixed memory of Python and torch, or of the CUDA context."""
        return RUNTIME_BYTES[self.device.kind] + self.draft_processes

    @property
    def draft_weights(self) -> int:
        """Weights of all drafts."""
        return sum(draft.weights for draft in self.drafts)

    @property
    def state(self) -> int:
        """Buffers of the networks, tokens and block tables of every slot, and the ring of states that drafts read.

        One slot more than ``max_num_seqs`` is for padding.
        """
        bounds = self.bounds
        reach = bounds.max_model_len + MAX_NODES + 1
        slots = (bounds.max_num_seqs + 1) * 8 * (reach + 1 + 1 + -(-reach // BLOCK_SIZE))
        ring = (bounds.max_num_seqs + 1) * (STATE_RING_POSITIONS + 1) * self.aux_size * bounds.dtype_bytes
        return slots + ring + sum(network.tables for network in (self.target, *self.drafts))

    @property
    def activations(self) -> int:
        """Peak activations of one step: the larger of the widest layer with its attention, and sampling."""
        bounds, tokens = self.bounds, self.bounds.max_num_batched_tokens
        rows = min(tokens, bounds.max_num_seqs * ROWS_PER_SEQUENCE)
        in_registers = self.device.kind == "cuda" and bounds.coupled
        sampling = GPU_SAMPLING_BYTES if in_registers else SAMPLING_BYTES
        logits = self.target.vocab_size + self._own_logits
        chosen = rows * (self.target.vocab_size * sampling + logits * bounds.dtype_bytes)
        layer = max(tokens * bounds.dtype_bytes * _layer_width(network) for network in (self.target, *self.drafts))
        return max(layer + self._attention, chosen) + tokens * self.aux_size * bounds.dtype_bytes

    @property
    def _own_logits(self) -> int:
        return max((draft.own_vocab_size for draft in self.drafts), default=0)

    @property
    def _attention(self) -> int:
        """Bytes of attention without its input and output: the mask on a CPU, partial sums of tiles on a GPU."""
        bounds, tokens, target = self.bounds, self.bounds.max_num_batched_tokens, self.target
        if self.device.kind == "cpu":
            keys = min(bounds.max_model_len, bounds.kv_cache_tokens or bounds.max_model_len)
            return tokens * keys * (MASK_BYTES + bounds.dtype_bytes)
        tiles = (bounds.max_num_seqs + 1) * target.kv_heads + SPARE_PIECES
        return (tokens * target.heads + tiles * TILE_ROWS) * (target.head_dim + 1) * 4

    @property
    def graphs(self) -> int:
        """Memory of the CUDA graphs, 0 if none are captured.

        All graphs share one pool of the size that the largest step needs: its widest layer and the logits of target and
        draft. Steps with penalties adjust a piece of the logits at a time and count the tokens of every text. Steps of
        multi-round sampling hold probabilities. A table holds the grammar masks of a step. With several devices, the
        first one also holds its own part of the logits and the gathered parts; the others have as much room, since all
        caches are of one size. In addition, each graph has static tables and memory of the driver.
        """
        bounds, vocab_size = self.bounds, self.target.vocab_size
        if self.device.kind == "cpu" or not bounds.graph_rows:
            return 0
        tokens = min(bounds.max_num_batched_tokens, bounds.graph_rows * ROWS_PER_SEQUENCE)
        widest = max(_layer_width(network) for network in (self.target, *self.drafts))
        logits = 2 * vocab_size + self._own_logits
        if (ranks := self.device.count) > 1:
            logits += vocab_size + -(-vocab_size // ranks)
        pool = tokens * bounds.dtype_bytes * (widest + logits + self.aux_size)
        pool += min(tokens, ROWS_AT_ONCE) * vocab_size * GPU_SAMPLING_BYTES
        pool += (bounds.graph_rows + 1) * vocab_size * COUNT_BYTES
        if not bounds.coupled:
            pool += tokens * vocab_size * SAMPLING_BYTES
        pool += (bounds.max_num_batched_tokens + 1) * -(-vocab_size // 8)
        return pool + MOST_GRAPHS * (GRAPH_BYTES + bounds.graph_rows * GRAPH_TABLE_BYTES)

    @property
    def bytes_per_token(self) -> int:
        """Keys and values of one token in the caches of the target and all drafts."""
        return sum(network.kv_bytes_per_token(self.bounds.dtype_bytes) for network in (self.target, *self.drafts))

    @property
    def bytes_per_block(self) -> int:
        """Keys and values of one block, and the hidden states of its last token that drafts need to continue after it.

        The hidden states are stored only with prefix caching.
        """
        states = self.aux_size * self.bounds.dtype_bytes if self.bounds.prefix_caching else 0
        return BLOCK_SIZE * self.bytes_per_token + states

    @property
    def spent(self) -> int:
        """Memory used by everything except keys and values."""
        return self.runtime + self.target.weights + self.draft_weights + self.state + self.activations + self.graphs

    @property
    def kv_bytes_left(self) -> int:
        """Memory left for keys and values; negative if the rest alone does not fit."""
        return self.usable - self.spent

    @property
    def room_tokens(self) -> int:
        """Tokens of keys and values that fit into ``kv_bytes_left``: whole blocks, not counting the padding block."""
        return max(0, self.kv_bytes_left // self.bytes_per_block - 1) * BLOCK_SIZE

    @property
    def min_tokens(self) -> int:
        """Minimum cache size in tokens: ``kv_cache_tokens`` if set, else one sequence of full length."""
        return self.bounds.kv_cache_tokens or self.bounds.max_model_len + SLACK_TOKENS

    @property
    def fits(self) -> bool:
        """True if the minimum cache size fits."""
        return self.room_tokens >= self.min_tokens

    @property
    def max_fitting_model_len(self) -> int:
        """Largest ``max_model_len`` that fits with all other settings unchanged; 0 if none does."""
        low, high = 0, self.bounds.max_model_len
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._fits_length(middle) else (low, middle - 1)
        return low if low >= BLOCK_SIZE else 0

    @property
    def sequences(self) -> int:
        """Number of sequences of full length that can run at once."""
        if not self.fits:
            return 0
        held = kv_tokens(self)
        return min(self.bounds.max_num_seqs, held // min(held, self.bounds.max_model_len + SLACK_TOKENS))

    def _fits_length(self, length: int) -> bool:
        return replace(self, bounds=replace(self.bounds, max_model_len=length)).fits


def kv_tokens(budget: Budget) -> int:
    """Return the size of the caches in tokens, a multiple of the block size, without the padding block.

    This is ``kv_cache_tokens`` if set, else all memory that is left. On a CPU it is capped at the need of a full
    batch of sequences of full length, since the machine's memory has other uses.
    """
    bounds = budget.bounds
    if bounds.kv_cache_tokens:
        return _whole(bounds.kv_cache_tokens)
    ever = _whole(bounds.max_num_seqs * (bounds.max_model_len + SLACK_TOKENS))
    return min(budget.room_tokens, ever) if budget.device.kind == "cpu" else budget.room_tokens


def kv_cache_bytes(budget: Budget, tokens: int) -> int:
    """Return the bytes of caches of ``tokens`` tokens, including the padding block."""
    return (tokens // BLOCK_SIZE + 1) * budget.bytes_per_block


def _whole(tokens: int) -> int:
    """Round up to whole blocks."""
    return -(-tokens // BLOCK_SIZE) * BLOCK_SIZE


def _layer_width(network: Network) -> int:
    """Return the number of values per token alive at once in a layer: residual and norm, plus projections or MLP."""
    attention = 4 * (network.heads + 2 * network.kv_heads) * network.head_dim
    return 4 * network.hidden_size + max(attention, 4 * network.intermediate_size)
