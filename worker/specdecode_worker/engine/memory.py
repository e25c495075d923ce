"""Memory of a worker: what its models, caches and graphs need, what its device has, and the verdict in words."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from specdecode_kernels.tree_attention.op import MOST_HEAD_DIM
from specdecode_worker.contract import (
    CheckVerdict,
    DraftConfig,
    DraftQuantization,
    EngineConfig,
    MemoryState,
    Method,
    WorkerConfig,
)
from specdecode_worker.core.device_state import SPARE_POSITIONS, STATE_RING_POSITIONS
from specdecode_worker.core.kv_cache import BLOCK_SIZE, blocks_for
from specdecode_worker.drafts.base import DEFAULT_DRAFT, LoadedDraft, union_reads
from specdecode_worker.drafts.own_device import PlacedDraftLoader
from specdecode_worker.drafts.registry import CachedConfig, Resolve
from specdecode_worker.drafts.swap import describe_failure
from specdecode_worker.engine.step_tables import MOST_GRAPHS, row_buckets
from specdecode_worker.models.causal_lm import CausalLM
from specdecode_worker.models.config import CausalLMConfig, MedusaConfig
from specdecode_worker.models.drafts import HEADS, Draft, build_meta_draft
from specdecode_worker.models.eagle import Eagle3Head, EagleHead
from specdecode_worker.models.errors import CannotServe, ConfigMismatch, ModelError
from specdecode_worker.models.linear import Shard
from specdecode_worker.models.optimize import added_bytes, should_pack
from specdecode_worker.models.tensor_parallel import split_network
from specdecode_worker.models.weights import prepare_causal_lm
from specdecode_worker.sampling.sampler import ADJUSTED_AT_ONCE

log = logging.getLogger(__name__)

# Memory budget of a worker: arithmetic over model shapes and configured bounds, without reading or loading anything.
#
# `take_inventory` collects the figures, the ``check`` command prints the budget before anything is loaded, and
# ``factory.py`` sizes its caches with the same ``kv_tokens``. Sizes are bytes on one device; with several devices, on
# each of them.

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
TILE_ROWS = 128
"""Most rows (a query and a head) of a tile of the attention kernel, whose partial sums are fp32."""
SPARE_PIECES = 4 * 160
"""Pieces that the attention kernel cuts tiles into: four for each multiprocessor; the largest GPUs have 160."""
RUNTIME_BYTES = {"cpu": 384 * 2**20, "cuda": 640 * 2**20}
"""Fixed bytes of the process: Python and torch of engine and server (measured, private pages only), or the CUDA
context."""
DRAFT_PROCESS_BYTES = 320 * 2**20
"""Bytes of Python and torch of a draft process (measured on a CPU, private pages only: 305 MiB)."""
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
class Budget:
    """Uses of a device's memory, and what is left for keys and values. Sizes are bytes."""

    device: Device
    engine: EngineConfig
    """Settings of the user that affect memory."""
    max_model_len: int
    """Effective length, at most the model's number of positions."""
    dtype_bytes: int
    """Bytes of a number of activations."""
    target: Network
    drafts: tuple[Network, ...] = ()
    aux_size: int = 0
    """Width of the target's hidden states that drafts read for each token."""
    draft_processes: int = 0
    """Fixed bytes of draft processes that share this memory, which those on a CPU do.

    They include copies of the target's matrices that their drafts read.
    """
    own: Budget | None = None
    """Budget of the GPU that drafts have to themselves, one of them in place of the target. None if none has one.

    All caches have the same blocks, so they are as large as the smaller room.
    """

    @property
    def usable(self) -> int:
        """Memory that the worker may use: the limit minus the reserve, capped at the free memory."""
        return min(int(self.device.limit * self.engine.gpu_memory_utilization), self.device.free)

    @property
    def reserve(self) -> int:
        """Memory that ``gpu_memory_utilization`` leaves unused."""
        return self.device.limit - int(self.device.limit * self.engine.gpu_memory_utilization)

    @property
    def occupied(self) -> int:
        """Memory outside of the reserve that other processes use."""
        return max(0, int(self.device.limit * self.engine.gpu_memory_utilization) - self.device.free)

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
        rows, reach = self.engine.max_num_seqs + 1, self.max_model_len + SPARE_POSITIONS
        slots = rows * 8 * (reach + 1 + 1 + -(-reach // BLOCK_SIZE))
        ring = rows * (STATE_RING_POSITIONS + 1) * self.aux_size * self.dtype_bytes
        return slots + ring + sum(network.tables for network in (self.target, *self.drafts))

    @property
    def activations(self) -> int:
        """Peak activations of one step: the larger of the widest layer with its attention, and sampling."""
        tokens = self.engine.max_num_batched_tokens
        rows = min(tokens, self.engine.max_num_seqs * ROWS_PER_SEQUENCE)
        in_registers = self.device.kind == "cuda" and self.engine.sampler == "coupled"
        sampling = GPU_SAMPLING_BYTES if in_registers else SAMPLING_BYTES
        chosen = rows * self.target.vocab_size * (sampling + self.dtype_bytes)
        layer = max(tokens * self.dtype_bytes * _layer_width(network) for network in (self.target, *self.drafts))
        return max(layer + self._attention, chosen) + tokens * self.aux_size * self.dtype_bytes

    @property
    def _attention(self) -> int:
        """Bytes of attention without its input and output: the mask on a CPU, partial sums of tiles on a GPU."""
        engine, tokens, target = self.engine, self.engine.max_num_batched_tokens, self.target
        if self.device.kind == "cpu":
            keys = min(self.max_model_len, engine.kv_cache_tokens or self.max_model_len)
            return tokens * keys * (MASK_BYTES + self.dtype_bytes)
        tiles = (engine.max_num_seqs + 1) * target.kv_heads + SPARE_PIECES
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
        rows, most_tokens, vocab_size = self.graph_rows, self.engine.max_num_batched_tokens, self.target.vocab_size
        if self.device.kind == "cpu" or not rows:
            return 0
        tokens = min(most_tokens, rows * ROWS_PER_SEQUENCE)
        widest = max(_layer_width(network) for network in (self.target, *self.drafts))
        logits = 2 * vocab_size
        if (ranks := self.device.count) > 1:
            logits += vocab_size + -(-vocab_size // ranks)
        pool = tokens * self.dtype_bytes * (widest + logits + self.aux_size)
        pool += min(tokens, ADJUSTED_AT_ONCE) * vocab_size * GPU_SAMPLING_BYTES
        pool += (rows + 1) * vocab_size * COUNT_BYTES
        if self.engine.sampler != "coupled":
            pool += tokens * vocab_size * SAMPLING_BYTES
        pool += (most_tokens + 1) * -(-vocab_size // 8)
        return pool + MOST_GRAPHS * (GRAPH_BYTES + rows * GRAPH_TABLE_BYTES)

    @property
    def graph_rows(self) -> int:
        """Number of sequences of the largest CUDA graph; 0 if none are captured."""
        return max(graph_rows(self.engine), default=0)

    @property
    def bytes_per_token(self) -> int:
        """Keys and values of one token in the caches of the target and all drafts."""
        return sum(self.kv_bytes(network) for network in (self.target, *self.drafts))

    def kv_bytes(self, network: Network) -> int:
        """Return the bytes of one token's keys and values of a network; those of drafts are as activations."""
        is_fp8 = network is self.target and self.engine.kv_cache_dtype == "fp8"
        return network.kv_bytes_per_token(1 if is_fp8 else self.dtype_bytes)

    @property
    def bytes_per_block(self) -> int:
        """Keys and values of one block, and the hidden states of its last token that drafts need to continue after it.

        The hidden states are stored only with prefix caching.
        """
        states = self.aux_size * self.dtype_bytes if self.engine.enable_prefix_caching else 0
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
        room = max(0, self.kv_bytes_left // self.bytes_per_block - 1) * BLOCK_SIZE
        return room if self.own is None else min(room, self.own.room_tokens)

    @property
    def min_tokens(self) -> int:
        """Minimum cache size in tokens: ``kv_cache_tokens`` if set, else one sequence of full length."""
        return self.engine.kv_cache_tokens or self.max_model_len + SLACK_TOKENS

    @property
    def fits(self) -> bool:
        """True if the minimum cache size fits."""
        return self.room_tokens >= self.min_tokens

    @property
    def max_fitting_model_len(self) -> int:
        """Largest ``max_model_len`` that fits with all other settings unchanged; 0 if none does."""
        low, high = 0, self.max_model_len
        while low < high:
            middle = (low + high + 1) // 2
            shorter = replace(self, max_model_len=middle)
            low, high = (middle, high) if shorter.fits else (low, middle - 1)
        return low if low >= BLOCK_SIZE else 0

    @property
    def sequences(self) -> int:
        """Number of sequences of full length that can run at once."""
        if not self.fits:
            return 0
        held = kv_tokens(self)
        return min(self.engine.max_num_seqs, held // min(held, self.max_model_len + SLACK_TOKENS))


def kv_tokens(budget: Budget) -> int:
    """Return the size of the caches in tokens, a multiple of the block size, without the padding block.

    This is ``kv_cache_tokens`` if set, else all memory that is left. On a CPU it is capped at the need of a full
    batch of sequences of full length, since the machine's memory has other uses.
    """
    if budget.engine.kv_cache_tokens:
        return blocks_for(budget.engine.kv_cache_tokens) * BLOCK_SIZE
    ever = blocks_for(budget.engine.max_num_seqs * (budget.max_model_len + SLACK_TOKENS)) * BLOCK_SIZE
    return min(budget.room_tokens, ever) if budget.device.kind == "cpu" else budget.room_tokens


def kv_cache_bytes(budget: Budget, tokens: int) -> int:
    """Return the bytes of caches of ``tokens`` tokens, including the padding block."""
    return (tokens // BLOCK_SIZE + 1) * budget.bytes_per_block


def _layer_width(network: Network) -> int:
    """Return the number of values per token alive at once in a layer: residual and norm, plus projections or MLP."""
    attention = 4 * (network.heads + 2 * network.kv_heads) * network.head_dim
    return 4 * network.hidden_size + max(attention, 4 * network.intermediate_size)


# Memory limits and free memory of the GPU, the container or the machine.

CGROUP = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")


def device_memory(device: torch.device, count: int = 1) -> Device:
    """Return the memory of ``device``; with ``count`` GPUs, the smallest limit and free memory among them.

    Raises:
        ModelError: There are fewer than ``count`` GPUs.
    """
    return _cuda(count) if device.type == "cuda" else _cpu(count)


def free_bytes(device: torch.device, step_bytes: int) -> int:
    """Return the bytes that the running process can still allocate, unused memory of torch's allocator included.

    On a GPU, ``step_bytes`` stay free for a step, and unused memory of the CUDA graphs' pool does not count.
    """
    if device.type == "cuda":
        segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        here = [one for one in segments if one["device"] == device.index and one["segment_pool_id"] == (0, 0)]
        unused = sum(one["total_size"] - one["allocated_size"] for one in here)
        return int(torch.cuda.mem_get_info(device)[0] + unused - step_bytes)
    _, free = _machine()
    limit, used = _container_limit(), _container_usage()
    return free if limit is None or used is None else min(free, limit - used)


def _cuda(count: int) -> Device:
    available = torch.cuda.device_count()
    if available < count:
        raise ModelError(f"tensor_parallel_size is {count}, but torch sees {available} GPUs here; lower it or add GPUs")
    memory = [torch.cuda.mem_get_info(index) for index in range(count)]
    free, limit = min(free for free, _ in memory), min(total for _, total in memory)
    return Device(kind="cuda", limit=limit, free=free, source="GPU memory", count=count)


def _gpu_beside(count: int, memory: Device | None) -> Device | None:
    """Return the memory of the next GPU after those of the target, or None if there is none that works.

    Args:
        count: Number of GPUs of the target.
        memory: Memory to assume for every GPU; None asks the GPU. Why one does not work, the load of the draft says.
    """
    if memory is None and torch.cuda.device_count() <= count:
        return None
    try:
        free, limit = (memory.free, memory.limit) if memory is not None else torch.cuda.mem_get_info(count)
    except RuntimeError:
        return None
    return Device(kind="cuda", limit=limit, free=free, source="memory of the draft's GPU")


def _cpu(count: int) -> Device:
    """Return the memory of the machine or the container, divided by the ranks that share it.

    The page cache counts as free.
    """
    machine, free = _machine()
    limit = _container_limit()
    if limit is None or limit >= machine:
        return Device(kind="cpu", limit=machine // count, free=free // count, source="machine's memory", count=count)
    free = min(limit, free)
    return Device(kind="cpu", limit=limit // count, free=free // count, source="container's memory limit", count=count)


def _machine() -> tuple[int, int]:
    """Return the machine's total and available memory in bytes."""
    try:
        meminfo = dict(line.split(":", 1) for line in MEMINFO.read_text().splitlines())
        return tuple(int(meminfo[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))  # type: ignore[return-value]
    except (OSError, KeyError, ValueError):
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return total, total


def _container_usage() -> int | None:
    """Return the memory that the container uses in bytes, without inactive page cache; None outside of a cgroup."""
    for folder, usage in ((CGROUP, "memory.current"), (CGROUP / "memory", "memory.usage_in_bytes")):
        try:
            words = (folder / "memory.stat").read_text().split()
            stat = dict(zip(words[::2], words[1::2], strict=True))
            idle = stat.get("total_inactive_file", stat.get("inactive_file", "0"))
            return int((folder / usage).read_text()) - int(idle)
        except (OSError, ValueError):
            continue
    return None


def _container_limit() -> int | None:
    """Return the container's memory limit in bytes from cgroup v2 or v1; None if there is none."""
    for path in (CGROUP / "memory.max", CGROUP / "memory" / "memory.limit_in_bytes"):
        try:
            return int(path.read_text())
        except (OSError, ValueError):  # cgroup v2 writes "max" for no limit.
            continue
    return None


# Sizes of the models of a worker, read from config.json and the headers of the weights only, for the memory budget.
#
# The networks are the ones that the loaders later fill, still on the meta device. Their sizes are therefore exact, and
# a mismatch of target and draft raises the same error as loading them.


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """Memory budget of a worker and the problems of its drafts."""

    budget: Budget
    draft_problem: str | None = None
    """Reason why a configured draft is not part of the budget."""
    draft_required: bool = False
    """True if such a draft is required."""


def take_inventory(
    config: WorkerConfig, resolve: Resolve, device: torch.device, memory: Device | None = None
) -> Inventory:
    """Collect the sizes of the target and the drafts without loading their weights.

    Args:
        config: Configuration of the worker.
        resolve: Function that maps a model URI to a local folder.
        device: Device that the models will run on.
        memory: Memory to budget for instead of that of ``device``.

    Raises:
        ModelError: The target cannot be served.
    """
    dtype, ranks = getattr(torch, config.model.dtype), config.engine.tensor_parallel_size
    folder = resolve(config.model.target)
    prepared = prepare_causal_lm(folder, max_model_len=config.model.max_model_len)
    prepared.check()
    target = prepared.network
    if config.engine.kv_cache_dtype == "fp8" and not all(
        0 < one < math.inf for both in target.kv_scales for one in both
    ):
        raise ModelError(
            f"{folder}: a scale of keys or values is not one positive number a layer; leave kv_cache_dtype auto"
        )
    positions = target.config.max_position_embeddings
    part = target if ranks == 1 else split_network(target, Shard(0, ranks))
    models, misfits = _drafts(config, resolve, target, folder, device)
    own = [one for one in models if one[2].placement == "own"]
    copied = sum(_copied_bytes(model, target, dtype) for _, model, _ in own)
    # The processes of drafts on a CPU share its memory with the target.
    here = [one for one in models if device.type == "cpu" or one[2].placement == "shared"]
    budget = Budget(
        device=memory or device_memory(device, ranks),
        engine=config.engine,
        max_model_len=min(config.model.max_model_len or positions, positions),
        dtype_bytes=dtype.itemsize,
        target=network_of("target", part, dtype, device, config.model.quantization, draft=False),
        drafts=tuple(sizes for sizes, _, _ in here),
        aux_size=union_reads(model.reads for _, model, _ in models if not isinstance(model, CausalLM)).width(
            target.config.hidden_size
        ),
        draft_processes=copied + len(own) * DRAFT_PROCESS_BYTES if device.type == "cpu" else 0,
    )
    if own and device.type == "cuda" and (gpu := _gpu_beside(ranks, memory)) is not None:
        apart = replace(
            budget,
            device=gpu,
            engine=config.engine.model_copy(
                update={"enforce_eager": True, "enable_prefix_caching": False, "kv_cache_dtype": "auto"}
            ),
            target=own[0][0],
            drafts=tuple(sizes for sizes, _, _ in own[1:]),
            draft_processes=copied + (len(own) - 1) * RUNTIME_BYTES["cuda"],
        )
        if apart.fits:
            budget = replace(budget, own=apart)
        else:
            misfits += [(shortfall(apart), draft) for _, _, draft in own]
    return Inventory(
        budget=budget,
        draft_problem="; ".join(problem for problem, _ in misfits) or None,
        draft_required=any(draft.required for _, draft in misfits),
    )


def _drafts(
    config: WorkerConfig, resolve: Resolve, target: CausalLM, folder: Path, device: torch.device
) -> tuple[list[tuple[Network, Draft, DraftConfig]], list[tuple[str, DraftConfig]]]:
    """Return (sizes, network, configuration) of every draft with weights, and (problem, configuration) of misfits."""
    models, misfits, dtype = [], [], getattr(torch, config.model.dtype)
    for name, draft in [("draft", config.draft), *((f"draft {draft.name}", draft) for draft in config.drafts)]:
        if draft.uri is None:
            continue
        where, length = draft.uri, config.model.max_model_len
        try:
            expect_own_logits(draft, config.engine.tensor_parallel_size)
            model = build_meta_draft(draft.method, resolve(where), target, target_folder=folder, max_model_len=length)
            models.append((network_of(name, model, dtype, device, draft.quantization), model, draft))
        except BaseException as error:  # a panic of a Rust library is not an Exception
            reason = describe_failure(error, where)
            misfits.append((reason if name == "draft" else f"{name}: {reason}", draft))
    return models, misfits


def _copied_bytes(draft: Draft, target: CausalLM, dtype: torch.dtype) -> int:
    """Return the bytes of the target's matrices that a draft process copies, because the draft has none itself."""
    copied = []
    if isinstance(draft, Eagle3Head | EagleHead) and draft.embed_tokens is None:
        copied.append(target.model.embed_tokens.weight)
    if (isinstance(draft, EagleHead) and draft.lm_head is None) or (
        isinstance(draft, Eagle3Head) and draft.shares_output
    ):
        copied.append(target.lm_head.weight)
    return sum(one.numel() * dtype.itemsize for one in {id(one): one for one in copied}.values())


def expect_own_logits(draft: DraftConfig, ranks: int) -> None:
    """Raise ModelError for a head that computes logits with the target's matrix while it is split over ranks.

    One in a process of its own has a whole copy of the matrix.
    """
    head = HEADS.get(draft.method)
    if head is not None and head.uses_target_output and ranks > 1 and draft.placement == "shared":
        raise ModelError(
            f"{draft.uri}: a head of method {draft.method} makes logits with the target's matrix, which is split over"
            f" {ranks} devices; take an eagle3 head, or one device"
        )


def graph_rows(engine: EngineConfig) -> tuple[int, ...]:
    """Return the batch sizes that CUDA graphs are captured for; empty if none are."""
    if engine.enforce_eager:
        return ()
    return row_buckets(engine.max_num_seqs, engine.cuda_graph_sizes)


def network_of(
    name: str,
    model: Draft,
    dtype: torch.dtype,
    device: torch.device,
    quantization: DraftQuantization | None = None,
    *,
    draft: bool = True,
) -> Network:
    """Return the sizes of a network after loading.

    Args:
        name: Name of the network in messages.
        model: Network on the meta device, before ``fuse``.
        dtype: Data type of the loaded weights.
        device: Device that the network will run on.
        quantization: Quantization of the weights, if any.
        draft: Whether the network is a draft.

    Raises:
        ConfigMismatch: The device cannot run the network, or its weights are quantized already.
    """
    shape = model.config
    blocks = {} if isinstance(shape, MedusaConfig) else _blocks(shape)
    if device.type == "cuda" and blocks.get("head_dim", 0) > MOST_HEAD_DIM:
        raise ConfigMismatch(
            f"head_dim {blocks['head_dim']} of the {name} is not served on a GPU, whose attention takes up to "
            f"{MOST_HEAD_DIM}; take workers without GPUs, or another model"
        )
    weights = _weights(model, dtype) + added_bytes(model, quantization, dtype, device, draft=draft)
    unties = quantization is not None and draft
    if not unties and isinstance(model, CausalLM) and model.config.tie_word_embeddings and should_pack(dtype, device):
        weights += model.lm_head.weight.numel() * dtype.itemsize  # Packing makes a copy of the tied matrix.
    return Network(
        name=name,
        weights=weights,
        tables=_tables(model),
        hidden_size=shape.hidden_size,
        vocab_size=shape.vocab_size,
        separate_draft_parameters=_parameters(model) if draft and isinstance(model, CausalLM) else None,
        **blocks,
    )


def _blocks(shape: CachedConfig) -> dict[str, int]:
    return {
        "intermediate_size": shape.widest_mlp if isinstance(shape, CausalLMConfig) else shape.intermediate_size,
        "heads": shape.num_attention_heads,
        "kv_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "kv_layers": shape.num_hidden_layers,
    }


def _weights(model: nn.Module, dtype: torch.dtype) -> int:
    """Return the bytes of the loaded weights; a matrix with two names counts once."""
    return sum(
        tensor.numel() * (dtype.itemsize if tensor.is_floating_point() else tensor.itemsize)
        for tensor in _stored_tensors(model)
    )


def _parameters(model: nn.Module) -> int:
    """Return the number of weights; a matrix with two names counts once."""
    return sum(tensor.numel() for tensor in _stored_tensors(model))


def _stored_tensors(model: nn.Module) -> Collection[Tensor]:
    return {id(tensor): tensor for tensor in model.state_dict(keep_vars=True).values()}.values()


def _tables(model: nn.Module) -> int:
    """Return the bytes of the buffers that a network computes and that checkpoints do not contain."""
    stored_ids = {id(tensor) for tensor in model.state_dict(keep_vars=True).values()}
    return sum(buffer.nbytes for buffer in model.buffers() if id(buffer) not in stored_ids)


# Verdict on a memory budget for users: the arithmetic line by line, what does not fit, and what to change.

MAX_WARNINGS = 8
"""Most warnings of a verdict; its contract takes no more."""
_GIB = 2**30


def make_verdict(inventory: Inventory) -> CheckVerdict:
    """Return the verdict on a worker's configuration. Problems are part of the verdict and never raised."""
    budget = inventory.budget
    return CheckVerdict(
        serves=budget.fits and not (inventory.draft_problem and inventory.draft_required),
        fits=budget.fits,
        problem="" if budget.fits else f"{shortfall(budget)}; {remedies(budget)}"[:1000],
        arithmetic=tuple(arithmetic(budget)),
        memory=memory_state(budget),
        kv_tokens=kv_tokens(budget) if budget.fits else budget.room_tokens,
        max_model_len=budget.max_model_len,
        sequences=budget.sequences,
        draft_problem=inventory.draft_problem and inventory.draft_problem[:1000],
        warnings=tuple(warnings(budget)[:MAX_WARNINGS]),
    )


def require_servable(inventory: Inventory) -> None:
    """Check that the configuration can be served, and log warnings.

    Raises:
        CannotServe: The memory does not suffice, or a required draft does not fit the target.
    """
    verdict = make_verdict(inventory)
    if not verdict.serves:
        raise CannotServe(verdict)
    for warning in verdict.warnings:
        log.warning(warning)


def memory_state(budget: Budget) -> MemoryState:
    """Return the main figures of the budget for the report, in bytes."""
    return MemoryState(
        limit=budget.device.limit,
        weights=budget.target.weights,
        drafts=budget.draft_weights,
        kv_cache=kv_cache_bytes(budget, kv_tokens(budget)) if budget.fits else 0,
        reserve=budget.reserve,
    )


def arithmetic(budget: Budget) -> list[str]:
    """Return the calculation from the memory limit down to tokens of cache, one line per term."""
    lines = [_line(budget.device.source, budget.device.limit)]
    lines += [_line(f"- {what}", -size) for what, size in _terms(budget)]
    lines.append(_line("= for keys and values", budget.kv_bytes_left))
    lines.append(f"{'/ bytes per block of 16 tokens ' + _per_token(budget):62}{budget.bytes_per_block:>13,} B")
    lines.append(f"{'= tokens of keys and values that there is room for':62}{budget.room_tokens:>13,}")
    length = budget.max_model_len
    lines.append(f"{f'  one sequence of {length:,} tokens needs':62}{length + SLACK_TOKENS:>13,}")
    return lines


def shortfall(budget: Budget) -> str:
    """Return one sentence on what does not fit."""
    what, asked = budget.device.source, budget.engine.kv_cache_tokens
    if budget.kv_bytes_left <= 0:
        short = _gib(-budget.kv_bytes_left)
        return f"the {what} of {_gib(budget.device.limit)} leaves no room for keys and values: {short} short"
    room = f"the {what} of {_gib(budget.device.limit)} leaves room for {budget.room_tokens:,} tokens of keys and values"
    if asked:
        return f"{room}, kv_cache_tokens asks for {asked:,}"
    return f"{room}, one sequence of max_model_len {budget.max_model_len:,} needs {budget.min_tokens:,}"


def remedies(budget: Budget) -> str:
    """Return the changes that a user can make, the least costly first, named as in flags and the resource."""
    engine, changes = budget.engine, []
    if engine.kv_cache_tokens and budget.room_tokens:
        changes.append(f"set kv_cache_tokens to at most {budget.room_tokens}")
    elif budget.max_fitting_model_len:
        changes.append(f"set max_model_len to at most {budget.max_fitting_model_len}")
    if budget.occupied:
        changes.append(f"free the {_gib(budget.occupied)} that others use")
    if engine.max_num_seqs > 1:
        changes.append(f"lower max_num_seqs ({engine.max_num_seqs})")
    if budget.drafts:
        changes.append(f"serve without the draft ({_gib(budget.draft_weights)})")
    if budget.dtype_bytes > 2:
        changes.append("set dtype to bfloat16")
    changes.append("give it more memory" if budget.device.kind == "cpu" else "take a larger GPU, or more of them")
    return ", or ".join(changes)


def warnings(budget: Budget) -> list[str]:
    """Return warnings about configurations that fit but are unlikely to perform well."""
    messages = []
    if budget.own is not None and (alone := replace(budget, own=None).room_tokens) > budget.room_tokens:
        messages.append(
            f"the draft's GPU has room for {budget.room_tokens:,} tokens of keys and values, that of the target for"
            f" {alone:,}; with a smaller draft, or placement shared, more requests can run at once"
        )
    for draft in budget.drafts:
        share = draft.weights / max(budget.target.weights, 1)
        if share > LARGE_DRAFT:
            messages.append(
                f"the {draft.name}'s weights are {share:.0%} of the target's; beyond {LARGE_DRAFT:.0%} a draft usually"
                " costs more than it brings"
            )
        parameters = draft.separate_draft_parameters
        if parameters is not None and parameters < SMALL_DRAFT_PARAMETERS:
            messages.append(
                f"the {draft.name} is a model of its own with {parameters / 1e6:.1f}M parameters; below"
                f" {SMALL_DRAFT_PARAMETERS / 1e6:.0f}M such a draft usually does not pay, so measure it with"
                " `specdecode-worker bench`, or train an EAGLE-3 head"
            )
    return messages


def _terms(budget: Budget) -> list[tuple[str, int]]:
    """Return the (name, bytes) of everything that is subtracted from the limit."""
    reserve = f"reserve of {1 - budget.engine.gpu_memory_utilization:.0%}"
    terms = [(reserve, budget.reserve)]
    if budget.occupied:
        terms.append(("in use by others", budget.occupied))
    terms.append(("Python and torch" if budget.device.kind == "cpu" else "CUDA context", budget.runtime))
    terms.append((_shared("weights of the target", budget.device.count), budget.target.weights))
    terms += [(f"weights of the {draft.name}", draft.weights) for draft in budget.drafts]
    terms.append((f"tables and state of {budget.engine.max_num_seqs} sequences", budget.state))
    terms.append((f"activations of a step of {budget.engine.max_num_batched_tokens} tokens", budget.activations))
    if budget.device.kind == "cuda":
        captured = f"of up to {budget.graph_rows} sequences" if budget.graphs else "(none are captured)"
        terms.append((f"CUDA graphs {captured}", budget.graphs))
    return terms


def _shared(what: str, count: int) -> str:
    return what if count == 1 else f"{what}, its share of {count} devices"


def _per_token(budget: Budget) -> str:
    parts = [f"{network.name} {budget.kv_bytes(network):,}" for network in (budget.target, *budget.drafts)]
    return f"({', '.join(parts)} a token)"


def _line(what: str, size: int) -> str:
    return f"{what:62}{size / _GIB:>11.2f} GiB"


def _gib(size: int) -> str:
    return f"{size / _GIB:.2f} GiB"


# Memory check of a draft that is loaded while the engine runs, based on the headers of its weights.


@dataclass(frozen=True, slots=True)
class CheckedDraftLoader:
    """``LoadDraft`` for a running worker: checks that the draft fits into free memory before it is loaded."""

    loader: PlacedDraftLoader
    ranks: int
    """Number of devices that share the target."""
    free_bytes: Callable[[], int]
    """Function that measures the free memory in bytes, called for every draft."""

    def __call__(self, config: DraftConfig, name: str = DEFAULT_DRAFT) -> LoadedDraft:
        """Load a draft.

        Raises:
            ModelError: The draft does not fit the target, or not into memory together with the running draft.
        """
        if config.uri is None or self.loader.leaves_memory_of_target(config):
            return self.loader(config, name)
        expect_own_logits(config, self.ranks)
        process = DRAFT_PROCESS_BYTES if config.placement == "own" else 0
        needed, free = self._needed_bytes(config.method, config.uri) + process, max(self.free_bytes(), 0)
        if needed > free:
            raise ModelError(
                f"{config.uri} needs {needed / _GIB:.2f} GiB beside the draft that runs until it is ready, and "
                f"{free / _GIB:.2f} GiB are free; give the worker more memory, or change the draft in the spec, "
                "which restarts workers one by one"
            )
        return self.loader(config, name)

    def _needed_bytes(self, method: Method, uri: str) -> int:
        """Return the peak bytes of loading: weights, twice while they are packed, tables, and the draft's cache.

        The draft's cache has as many blocks as the target's.
        """
        loader = self.loader.local
        weight = loader.target.model.embed_tokens.weight
        draft = build_meta_draft(
            method,
            loader.resolve(uri),
            loader.target,
            target_folder=loader.target_folder,
            max_model_len=loader.max_model_len,
        )
        network = network_of("draft", draft, weight.dtype, weight.device)
        copies = 2 if should_pack(weight.dtype, weight.device) else 1
        cache = loader.blocks * BLOCK_SIZE * network.kv_bytes_per_token(weight.dtype.itemsize)
        return copies * network.weights + network.tables + cache
