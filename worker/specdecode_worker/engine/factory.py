"""Construction of an Engine from model folders: memory check, loading of target and drafts, allocation of caches."""

from __future__ import annotations

import json
import logging
import os
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path

import torch

from specdecode_worker.contract import DraftConfig, DraftState, EngineConfig, Env, WorkerConfig
from specdecode_worker.control.plan import Dispatcher
from specdecode_worker.core.device_state import DeviceState, PagedCache
from specdecode_worker.core.kv_cache import BLOCK_SIZE, BlockPool
from specdecode_worker.drafts.base import DEFAULT_DRAFT, LoadDraft, LoadedDraft
from specdecode_worker.drafts.own_device import PlacedDraftLoader
from specdecode_worker.drafts.registry import DraftLoader, DraftRegistry, Resolve, paged_cache
from specdecode_worker.drafts.swap import describe_failure, worker_name
from specdecode_worker.engine.cuda_graphs import CaptureBackend, StagedBackend, StepGraphs, capture_backend
from specdecode_worker.engine.engine import Engine, EngineParts, ShapeSelector
from specdecode_worker.engine.kernel_class import (
    kernel_class,
    use_compiled_kernels,
    use_kernel_timings,
    warm_up_prefill,
)
from specdecode_worker.engine.memory import (
    Budget,
    CheckedDraftLoader,
    free_bytes,
    graph_rows,
    kv_tokens,
    memory_state,
    require_servable,
    take_inventory,
)
from specdecode_worker.engine.remote_prefill import BlockExchange, BlockParts
from specdecode_worker.engine.scheduler import Limits, Scheduler
from specdecode_worker.engine.stats import WorkerIdentity
from specdecode_worker.engine.target import Target
from specdecode_worker.engine.tensor_parallel import Assignment, LeaderBackend, LeaderState, LeaderTarget, RankGroup
from specdecode_worker.engine.transfer import TransferAccess
from specdecode_worker.guided.grammars import GrammarCompiler
from specdecode_worker.models.causal_lm import CausalLM
from specdecode_worker.models.errors import ModelError
from specdecode_worker.models.fetch import model_hash
from specdecode_worker.models.optimize import fuse, quantise_target
from specdecode_worker.models.vocabulary import open_tokenizer
from specdecode_worker.models.weights import load_causal_lm
from specdecode_worker.stages import stage
from specdecode_worker.version import VERSION

log = logging.getLogger(__name__)


def load_engine(config: WorkerConfig, resolve: Resolve) -> Engine:
    """Build the engine of a worker.

    Args:
        config: Configuration of the worker.
        resolve: Function that maps a model URI to a local folder.

    Raises:
        ModelError: The target or a required draft cannot be loaded or does not fit into memory.
    """

    def located(uri: str) -> Path:
        with stage("pull"):
            return resolve(uri)

    device = device_of(config.engine.device)
    threads = max(1, (config.engine.threads or cpu_limit()) // config.engine.tensor_parallel_size)
    torch.set_num_threads(threads)  # beside a GPU too, where torch would take one for each core of the node
    if device.type != "cpu":
        use_compiled_kernels()
    use_kernel_timings(config.engine, device)
    inventory = take_inventory(config, located, device)
    require_servable(inventory)
    folder = located(config.model.target)
    # Files of which no download knows the digest are hashed while they load.
    hashing = ThreadPoolExecutor(1, "hash").submit(model_hash, folder)
    if config.engine.tensor_parallel_size > 1:
        group = RankGroup(_assignment(config, folder, device, inventory.budget, threads))
        target, device = group.load()
        return assemble(target, folder, config, located, inventory.budget, hashing.result, group)
    dtype, length = getattr(torch, config.model.dtype), config.model.max_model_len
    # A target that fits only after quantization must not be moved to the device before it.
    first = torch.device("cpu") if config.model.quantization else device
    target = load_causal_lm(folder, dtype=dtype, device=first, max_model_len=length)
    with stage("fuse"):
        quantise_target(target, config.model.quantization, device)
        fuse(target)
    return assemble(target, folder, config, located, inventory.budget, hashing.result)


def _assignment(config: WorkerConfig, folder: Path, device: torch.device, budget: Budget, threads: int) -> Assignment:
    """Build the assignment of rank 0; those of the other ranks differ only in ``rank``."""
    return Assignment(
        rank=0,
        size=config.engine.tensor_parallel_size,
        meeting="",
        folder=str(folder),
        dtype=config.model.dtype,
        quantization=config.model.quantization,
        kv_cache_dtype=config.engine.kv_cache_dtype,
        device=device.type,
        max_model_len=config.model.max_model_len,
        blocks=kv_tokens(budget) // BLOCK_SIZE + 1,
        threads=threads,
    )


def assemble(
    target: CausalLM,
    folder: Path,
    worker: WorkerConfig,
    resolve: Resolve,
    budget: Budget,
    target_hash: Callable[[], str],
    group: RankGroup | None = None,
) -> Engine:
    """Build the caches, the drafts and the engine around a loaded target.

    Args:
        target: Target network, loaded and fused.
        folder: Folder that the target was loaded from.
        worker: Configuration of the worker.
        resolve: Function that maps a model URI to a local folder.
        budget: Memory budget, which sets the number of cache blocks.
        target_hash: Function that returns the hash of the target's files.
        group: Ranks of a replica on several devices; None on one device.

    Raises:
        ModelError: A required draft does not fit the target.
    """
    config, weight = worker.engine, target.model.embed_tokens.weight
    length, blocks = budget.max_model_len, kv_tokens(budget) // BLOCK_SIZE + 1
    backend = capture_backend(weight.device) if graph_rows(config) else None
    shape = config.max_num_seqs, length, weight.dtype, weight.device
    state = DeviceState(*shape) if group is None or backend is None else LeaderState(*shape, group)
    with stage("compile"):
        warm_up_prefill(target.config, weight.dtype, weight.device)
    pipelined = weight.device.type != "cpu"
    loader = DraftLoader(
        target=target,
        target_folder=folder,
        max_model_len=length,
        state=state,
        blocks=blocks,
        resolve=resolve,
        host_is_current=not pipelined,
    )
    load = _placed(worker, loader, weight.device)
    coupled = config.sampler == "coupled"
    drafts = DraftRegistry(load_drafts(worker, load), state, target.config.hidden_size, merges=coupled)
    identity = WorkerIdentity(
        boot_id=uuid.uuid4().hex,
        worker=worker_name(),
        model=worker.model.served_name,
        target=target_hash(),
        max_num_seqs=config.max_num_seqs,
        memory=memory_state(budget),
    )
    scales = target.kv_scales if config.kv_cache_dtype == "fp8" else ()
    cache = paged_cache(target.config, target.config.num_hidden_layers, blocks, weight.dtype, weight.device, scales)
    passes, captures = _passes(target, cache, state, group, backend)
    graphs = None
    if captures is not None:  # the graphs themselves are captured when the first plan is set
        rows, tokens = graph_rows(config), config.max_num_batched_tokens
        graphs = StepGraphs(passes, drafts, state, captures, rows=rows, max_tokens=tokens, coupled=coupled)
    scheduler = _scheduler(config, target.config.attention_chunk_size, blocks, identity.target, weight.device)
    exchange = BlockExchange(
        BlockParts(passes, drafts, state),
        scheduler,
        _transfer_access(worker, identity.target, weight.device),
        computes=config.role == "prefill",
    )
    parts = EngineParts(
        scheduler=scheduler,
        target=passes,
        drafts=drafts,
        state=state,
        shape_selector=ShapeSelector(Dispatcher(worker.deployment_uid, drafts.state().hash), drafts),
        coupled=coupled,
        graphs=graphs,
        grammars=_grammars(folder, target),
        exchange=exchange,
    )
    return Engine(
        parts,
        identity,
        max_model_len=length,
        eos_token_ids=target.config.eos_token_ids,
        pipelined=pipelined,
        load_draft=CheckedDraftLoader(
            load, config.tensor_parallel_size, lambda: free_bytes(weight.device, budget.activations)
        ),
    )


def _transfer_access(worker: WorkerConfig, target: str, device: torch.device) -> TransferAccess:
    """Return what this worker has in common with those that it exchanges cache blocks with."""
    model, engine = worker.model, worker.engine
    ranks = engine.tensor_parallel_size
    of_blocks = (target, model.dtype, model.quantization, engine.kv_cache_dtype, kernel_class(device), ranks, VERSION)
    folder = worker.server.admin_tokens_path

    def read_tokens() -> Sequence[str]:
        text = os.environ.get(Env.admin_token, "") if folder is None else Path(folder, "operator").read_text()
        if not (tokens := text.split()):
            raise ValueError(f"workers exchange no blocks without the deployment's token; set {Env.admin_token}")
        return tokens

    compatibility = blake2b(json.dumps(of_blocks).encode(), digest_size=16).hexdigest()
    return TransferAccess(compatibility, read_tokens, worker.server.tls_cert_file, worker.server.tls_key_file)


def _placed(worker: WorkerConfig, local: DraftLoader, device: torch.device) -> PlacedDraftLoader:
    """Return the loader of drafts. One on a device of its own gets that after those of the ranks, or the CPU."""
    config = worker.engine
    return PlacedDraftLoader(
        local=local,
        device=torch.device("cuda", config.tensor_parallel_size) if device.type == "cuda" else device,
        threads=torch.get_num_threads(),
        max_num_batched_tokens=max(config.max_num_batched_tokens, worker.model.max_model_len or 0),
        reply_seconds=worker.server.step_timeout_seconds / 2,
    )


def _grammars(folder: Path, target: CausalLM) -> GrammarCompiler | None:
    """Return the compiler of grammars; None if the model folder has no tokenizer, as in some tests."""
    path, size = folder / "tokenizer.json", target.config.vocab_size
    if not path.is_file():
        return None

    def tokenizer_json() -> str:
        return str(open_tokenizer(folder).to_str())

    return GrammarCompiler(tokenizer_json, size, target.config.eos_token_ids)


def _scheduler(config: EngineConfig, chunk: int, blocks: int, target: str, device: torch.device) -> Scheduler:
    limits = Limits(config.max_num_seqs, config.max_num_batched_tokens, config.enable_chunked_prefill, chunk)
    pool = BlockPool(blocks, contiguous=device.type == "cpu")
    return Scheduler(limits, pool, prefix_caching=config.enable_prefix_caching, salt=target,
                     timed=True)  # fmt: skip


def _passes(
    model: CausalLM, cache: PagedCache, state: DeviceState, group: RankGroup | None, own: StagedBackend | None
) -> tuple[Target, CaptureBackend | None]:
    """Return the target and the backend that captures its steps, on all ranks of a group; None if none are captured.

    ``own`` captures on this rank.
    """
    if group is None:
        return Target(model, cache, state), own
    leader = LeaderTarget(model, cache, state, group)
    return leader, None if own is None else LeaderBackend(own, leader, group)


def load_drafts(worker: WorkerConfig, load: LoadDraft) -> dict[str, LoadedDraft | DraftState]:
    """Load all drafts of a worker, by name.

    An optional draft that fails to load, for any reason, becomes its state with the reason.

    Raises:
        ModelError: A required draft cannot be loaded.
    """
    drafts: dict[str, LoadedDraft | DraftState] = {}
    wanted: list[tuple[str, DraftConfig]] = [
        (DEFAULT_DRAFT, worker.draft),
        *((draft.name, draft) for draft in worker.drafts),
    ]
    for name, config in wanted:
        if config.method == "none":
            continue
        try:
            drafts[name] = load(config, name)
        except BaseException as error:  # a panic of a Rust library is not an Exception
            problem = describe_failure(error, config.uri or config.method)
            if config.required:
                raise ModelError(problem) from error
            log.warning("serving plainly: %s", problem)
            drafts[name] = DraftState(name=name, uri=config.uri or "", problem=problem)
    return drafts


def device_of(name: str) -> torch.device:
    """Return the device called ``name``; ``auto`` is a GPU if torch sees one, else the CPU.

    Raises:
        ModelError: ``cuda`` was requested and torch sees no GPU.
    """
    has_gpu = torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        raise ModelError(
            "workers.accelerator asks for a GPU, but torch sees none here; set its count to 0, or check the driver"
        )
    if name == "auto":
        return torch.device("cuda" if has_gpu else "cpu")
    return torch.device(name)


def cpu_limit() -> int:
    """Return the number of whole cores of this process: its affinity, capped by the container's CPU quota if set."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):
        return cores
