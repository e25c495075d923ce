"""Builds an Engine from model folders: loads target and draft, sizes the caches, checks that the two fit."""

from __future__ import annotations

import json
import logging
import os
import socket
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from specdecode_worker.contract import DraftState, EngineConfig, Env, WorkerConfig
from specdecode_worker.engine.blocks import BLOCK_SIZE, BlockPool
from specdecode_worker.engine.cache import PagedCache
from specdecode_worker.engine.drafting import Drafter
from specdecode_worker.engine.engine import Engine, Parts
from specdecode_worker.engine.pilot import Pilot
from specdecode_worker.engine.report import Identity
from specdecode_worker.engine.scheduler import Limits, Scheduler
from specdecode_worker.engine.state import DeviceState
from specdecode_worker.engine.target import Target
from specdecode_worker.models.config import Eagle3Config, LlamaConfig
from specdecode_worker.models.eagle3 import Eagle3Head
from specdecode_worker.models.errors import ModelError
from specdecode_worker.models.fusing import fuse
from specdecode_worker.models.llama import Llama
from specdecode_worker.models.reads import NOTHING
from specdecode_worker.models.weights import load_eagle3, load_llama, weights_hash
from specdecode_worker.speculation.dispatch import Dispatcher

log = logging.getLogger(__name__)

Resolve = Callable[[str], Path]
"""Model URI -> folder."""


@dataclass(frozen=True, slots=True)
class Networks:
    """What was loaded. ``problem`` says why there is no head although one was asked for."""

    target: Llama
    target_hash: str
    head: Eagle3Head | None
    draft: DraftState
    sharpness: tuple[float, ...]


def load_engine(config: WorkerConfig, resolve: Resolve) -> Engine:
    """The engine of a worker. Raises ModelError when the target, or a required draft, cannot be served."""
    device = device_of(config.engine.device)
    if config.engine.tensor_parallel_size > 1:
        raise ModelError(
            f"workers.tensorParallelSize is {config.engine.tensor_parallel_size}, but this version runs a replica on"
            " one device; set it to 1 and serve a model that fits there"
        )
    if device.type == "cpu":
        torch.set_num_threads(config.engine.threads or cpu_limit())
    networks = load_networks(config, resolve, device)
    return assemble(networks, config, device)


def load_networks(config: WorkerConfig, resolve: Resolve, device: torch.device) -> Networks:
    dtype = getattr(torch, config.model.dtype)
    folder = resolve(config.model.uri)
    target = load_llama(folder, dtype=dtype, device=device)
    fuse(target)
    found = Networks(target, weights_hash(folder), None, DraftState(), ())
    if config.draft.uri is None:
        return found
    try:
        draft_folder = resolve(config.draft.uri)
        head = load_eagle3(draft_folder, target, dtype=dtype, device=device)
        fuse(head)
        sharpness = _sharpness(draft_folder)
        draft = DraftState(method=config.draft.method, hash=weights_hash(draft_folder))
    except ModelError as error:
        if config.draft.required:
            raise
        log.warning("serving plainly: %s", error)
        return Networks(target, found.target_hash, None, DraftState(problem=str(error)), ())
    return Networks(target, found.target_hash, head, draft, sharpness)


def assemble(networks: Networks, worker: WorkerConfig, device: torch.device) -> Engine:
    """Caches and parts around loaded networks."""
    target, head, config, max_model_len = networks.target, networks.head, worker.engine, worker.model.max_model_len
    dtype = target.model.embed_tokens.weight.dtype
    limit = target.config.max_position_embeddings
    length = min(max_model_len or limit, limit)
    blocks = -(-(config.kv_cache_tokens or _cache_tokens(networks, config, length, device)) // BLOCK_SIZE) + 1
    reads = NOTHING if head is None else head.reads
    state = DeviceState(
        config.max_num_seqs,
        length,
        reads.width(target.config.hidden_size),
        dtype,
        device,
    )
    drafter = None
    if head is not None:
        cache = paged_cache(head.config, 1, blocks, dtype, device)
        same = head.config.draft_vocab_size == target.config.vocab_size
        drafter = Drafter(head, None if same else head.target_ids, cache, state, limit, networks.sharpness)
    layers = target.config.num_hidden_layers
    pilot = Pilot(Dispatcher(worker.deployment_uid, networks.draft.hash), has_draft=head is not None)
    parts = Parts(
        scheduler=Scheduler(Limits(config.max_num_seqs, config.max_num_batched_tokens), BlockPool(blocks)),
        target=Target(target, paged_cache(target.config, layers, blocks, dtype, device), state, reads),
        drafter=drafter,
        state=state,
        pilot=pilot,
    )
    return Engine(
        parts,
        _identity(networks, worker),
        max_model_len=length,
        eos_token_ids=target.config.eos_token_ids,
        pipelined=device.type != "cpu",
    )


def _identity(networks: Networks, worker: WorkerConfig) -> Identity:
    return Identity(
        boot_id=uuid.uuid4().hex,
        worker=os.environ.get(Env.pod_name) or socket.gethostname(),
        model=worker.model.served_name,
        target=networks.target_hash,
        draft=networks.draft,
        max_num_seqs=worker.engine.max_num_seqs,
    )


def paged_cache(
    config: LlamaConfig | Eagle3Config, layers: int, blocks: int, dtype: torch.dtype, device: torch.device
) -> PagedCache:
    return PagedCache(
        layers=layers,
        blocks=blocks,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        dtype=dtype,
        device=device,
    )


def device_of(name: str) -> torch.device:
    """``auto`` takes a GPU when there is one. Raises ModelError for a GPU that is not there."""
    has_gpu = torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        raise ModelError("workers.gpu is true, but torch sees no GPU here; set it to false, or see to the driver")
    if name == "auto":
        return torch.device("cuda" if has_gpu else "cpu")
    return torch.device(name)


def cpu_limit() -> int:
    """Whole cores that this process may use: its affinity, and the container's quota where one is set."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):
        return cores


def _sharpness(folder: Path) -> tuple[float, ...]:
    """Factors on the draft's logits by depth, from ``calibration.json`` beside the weights; absent means none."""
    path = folder / "calibration.json"
    if not path.exists():
        return ()
    try:
        return tuple(float(factor) for factor in json.loads(path.read_text())["sharpness"])
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f'{path} should hold {{"sharpness": [factor of depth 1, ...]}}: {error}') from None


def _cache_tokens(networks: Networks, config: EngineConfig, length: int, device: torch.device) -> int:
    """As many tokens as the batch could ever need, or as half of the free memory holds."""
    target = networks.target.config
    layers = target.num_hidden_layers + (networks.head is not None)
    size = networks.target.model.embed_tokens.weight.element_size()
    per_token = 2 * layers * target.num_key_value_heads * target.head_dim * size
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else _free_memory()
    wanted = config.max_num_seqs * (length + 4 * BLOCK_SIZE)
    return max(min(wanted, free // 2 // per_token), length + 4 * BLOCK_SIZE)


def _free_memory() -> int:
    """Bytes that the machine, or the container's limit, still gives."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        return free if limit == "max" else max(0, min(free, int(limit) - used))
    except (OSError, ValueError):
        return free
