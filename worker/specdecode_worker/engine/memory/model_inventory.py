"""Sizes of the models of a worker, read from config.json and the headers of the weights only, for the memory budget.

The networks are the ones that the loaders later fill, still on the meta device. Their sizes are therefore exact, and a
mismatch of target and draft raises the same error as loading them.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from specdecode_worker.contract import DraftConfig, DraftQuantization, EngineConfig, WorkerConfig
from specdecode_worker.engine.drafts.aux_hidden_states import union_reads
from specdecode_worker.engine.drafts.draft_loader import CachedConfig, Resolve
from specdecode_worker.engine.drafts.draft_problem import describe_failure
from specdecode_worker.engine.graphs.graph_key import row_buckets
from specdecode_worker.engine.memory.device_memory import device_memory
from specdecode_worker.engine.memory.memory_budget import DRAFT_PROCESS_BYTES, Bounds, Budget, Device, Network
from specdecode_worker.models.checkpoints.draft_weights import Draft, build_meta_draft
from specdecode_worker.models.checkpoints.weights import prepare_llama
from specdecode_worker.models.configs.draft_config import MedusaConfig
from specdecode_worker.models.errors import ModelError
from specdecode_worker.models.linear import Shard
from specdecode_worker.models.networks.eagle import EagleHead
from specdecode_worker.models.networks.eagle3 import Eagle3Head
from specdecode_worker.models.networks.llama import Llama
from specdecode_worker.models.networks.tensor_parallel import split_network
from specdecode_worker.models.optimize import added_bytes, should_pack


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
    folder = resolve(config.model.uri)
    prepared = prepare_llama(folder, max_model_len=config.model.max_model_len)
    prepared.check()
    target = prepared.network
    part = target if ranks == 1 else split_network(target.config, Shard(0, ranks))
    drafts = _drafts(config, resolve, target, folder)
    models = [(name, one, draft) for name, one, draft in drafts if not isinstance(one, DraftMismatch)]
    misfits = [one for _, one, _ in drafts if isinstance(one, DraftMismatch)]
    own = [model for _, model, draft in models if draft.placement == "own"]
    # The processes of drafts on a CPU share its memory with the target.
    here = [one for one in models if device.type == "cpu" or one[2].placement == "shared"]
    budget = Budget(
        device=memory or device_memory(device, ranks),
        bounds=bounds_of(config, target.config.max_position_embeddings),
        target=network_of("target", part, dtype, device, config.model.quantization, draft=False),
        drafts=tuple(network_of(name, model, dtype, device, draft.quantization) for name, model, draft in here),
        aux_size=union_reads(model.reads for _, model, _ in models if not isinstance(model, Llama)).width(
            target.config.hidden_size
        ),
        draft_processes=sum(_process_bytes(model, target, dtype) for model in own) if device.type == "cpu" else 0,
    )
    return Inventory(
        budget=budget,
        draft_problem="; ".join(misfit.problem for misfit in misfits) or None,
        draft_required=any(misfit.required for misfit in misfits),
    )


@dataclass(frozen=True, slots=True)
class DraftMismatch:
    """Draft that does not fit the target, with the reason."""

    problem: str
    required: bool


def _drafts(
    config: WorkerConfig, resolve: Resolve, target: Llama, folder: Path
) -> list[tuple[str, Draft | DraftMismatch, DraftConfig]]:
    """Return (name, network or misfit, configuration) of every configured draft that has weights."""
    drafts: list[tuple[str, Draft | DraftMismatch, DraftConfig]] = []
    for name, draft in [("draft", config.draft), *((f"draft {draft.name}", draft) for draft in config.drafts)]:
        if draft.uri is None or draft.method == "ngram" or draft.method == "suffix" or draft.method == "none":
            continue
        where, length = draft.uri, config.model.max_model_len
        try:
            expect_own_logits(draft, config.engine.tensor_parallel_size)
            model = build_meta_draft(draft.method, resolve(where), target, target_folder=folder, max_model_len=length)
            drafts.append((name, model, draft))
        except BaseException as error:  # a panic of a Rust library is not an Exception
            reason = describe_failure(error, where)
            problem = reason if name == "draft" else f"{name}: {reason}"
            drafts.append((name, DraftMismatch(problem, draft.required), draft))
    return drafts


def _process_bytes(draft: Draft, target: Llama, dtype: torch.dtype) -> int:
    """Return the fixed bytes of a draft process, with copies of the target's matrices that the draft has not itself."""
    copied = []
    if isinstance(draft, Eagle3Head | EagleHead) and draft.embed_tokens is None:
        copied.append(target.model.embed_tokens.weight)
    if (isinstance(draft, EagleHead) and draft.lm_head is None) or (
        isinstance(draft, Eagle3Head) and draft.shares_output
    ):
        copied.append(target.lm_head.weight)
    return DRAFT_PROCESS_BYTES + sum(one.numel() * dtype.itemsize for one in {id(one): one for one in copied}.values())


def expect_own_logits(draft: DraftConfig, ranks: int) -> None:
    """Raise ModelError for a head that computes logits with the target's matrix while it is split over ranks."""
    if draft.method in ("eagle", "dflash") and ranks > 1:
        raise ModelError(
            f"{draft.uri}: a head of method {draft.method} makes logits with the target's matrix, which is split over"
            f" {ranks} devices; take an eagle3 head, or one device"
        )


def bounds_of(config: WorkerConfig, positions: int) -> Bounds:
    """Return the bounds of the configuration. ``positions`` is the model's maximum number of positions."""
    engine = config.engine
    return Bounds(
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        max_model_len=min(config.model.max_model_len or positions, positions),
        dtype_bytes=getattr(torch, config.model.dtype).itemsize,
        utilization=engine.gpu_memory_utilization,
        kv_cache_tokens=engine.kv_cache_tokens,
        prefix_caching=engine.enable_prefix_caching,
        coupled=engine.sampler == "coupled",
        graph_rows=max(graph_rows(engine), default=0),
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
    """
    shape = model.config
    weights = _weights(model, dtype) + added_bytes(model, quantization, dtype, device, draft=draft)
    unties = quantization is not None and draft
    if not unties and isinstance(model, Llama) and model.config.tie_word_embeddings and should_pack(dtype, device):
        weights += model.lm_head.weight.numel() * dtype.itemsize  # Packing makes a copy of the tied matrix.
    return Network(
        name=name,
        weights=weights,
        tables=_tables(model),
        hidden_size=shape.hidden_size,
        vocab_size=shape.vocab_size,
        own_vocab_size=shape.vocab_size if isinstance(model, Llama) and model.vocabulary is not None else 0,
        separate_draft_parameters=_parameters(model) if draft and isinstance(model, Llama) else None,
        **({} if isinstance(shape, MedusaConfig) else _blocks(shape)),
    )


def _blocks(shape: CachedConfig) -> dict[str, int]:
    return {
        "intermediate_size": shape.intermediate_size,
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
