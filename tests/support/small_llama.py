"""Engines over a small random Llama on any device. The draft is a noised copy of it, so acceptance is real.

The networks are fused as those of a serving worker are, so the engine runs the same operations as in production.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from specdecode_worker.contract import DraftState, Plan, TreeShape
from specdecode_worker.control.plan import Dispatcher
from specdecode_worker.core.device_state import DeviceState
from specdecode_worker.core.kv_cache import BlockPool
from specdecode_worker.core.messages import Submit, Tokens
from specdecode_worker.drafts.base import LoadedDraft
from specdecode_worker.drafts.eagle import EagleDrafter
from specdecode_worker.drafts.registry import DraftRegistry, paged_cache
from specdecode_worker.engine.cuda_graphs import CaptureBackend, StepGraphs
from specdecode_worker.engine.engine import Engine, EngineParts, ShapeSelector
from specdecode_worker.engine.remote_prefill import BlockExchange, BlockParts
from specdecode_worker.engine.scheduler import Limits, Scheduler
from specdecode_worker.engine.stats import WorkerIdentity
from specdecode_worker.engine.target import Target
from specdecode_worker.engine.transfer import TransferAccess
from specdecode_worker.guided.grammars import GrammarCompiler
from specdecode_worker.models.arch import causal_lm_config
from specdecode_worker.models.causal_lm import Attend, CausalLM
from specdecode_worker.models.eagle import Eagle3Head
from specdecode_worker.models.optimize import fuse
from specdecode_worker.models.target_states import TargetStates
from specdecode_worker.sampling.params import Sampling
from support.worker.accounts import check_engine

VOCABULARY = 61
ACCESS = TransferAccess("key", lambda: ("token",))
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
}


class NoisedCopy(nn.Module):
    """Draft head that is a copy of the target with noise on its weights. It reads tokens and ignores hidden states."""

    def __init__(self, target: CausalLM, noise: float = 0.03) -> None:
        super().__init__()
        self.llama = copy.deepcopy(target)
        generator = torch.Generator().manual_seed(7)
        for parameter in self.llama.parameters():
            spread = parameter.std() if parameter.numel() > 1 else parameter.abs()
            parameter.data += (
                noise * spread * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype).to(parameter)
            )

    @property
    def reads(self) -> TargetStates:
        return TargetStates(tuple(range(min(3, self.llama.config.num_hidden_layers))))

    def fuse(self, aux_TA: Tensor) -> Tensor:
        return aux_TA[:, : self.llama.config.hidden_size]

    def forward(self, hidden_TE: Tensor, tokens_T: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        return self.llama(tokens_T, positions_T, attend).hidden_TE

    def logits(self, hidden_TE: Tensor) -> Tensor:
        return self.llama.logits(hidden_TE)


@dataclass(frozen=True)
class Networks:
    """A target and its draft."""

    target: CausalLM
    head: NoisedCopy | Eagle3Head


def networks(dtype: torch.dtype, device: str = "cpu", **changed: Any) -> Networks:
    """Return a random target and its draft; ``changed`` overrides fields of SHAPE."""
    target = CausalLM(causal_lm_config(SHAPE | changed)).requires_grad_(False)
    generator = torch.Generator().manual_seed(3)
    for parameter in target.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(std=0.35, generator=generator)
    head = NoisedCopy(target)
    for network in (target, head):
        network.to(device)
        for parameter in network.parameters():
            parameter.data = parameter.data.to(dtype)  # rotary tables are buffers and keep their type
        fuse(network)
    return Networks(target, head)


def engine_of(
    pair: Networks,
    *,
    max_num_seqs: int = 4,
    blocks: int = 100,
    budget: int = 256,
    chunked: bool = True,
    max_model_len: int = 256,
    draft: bool = True,
    pipelined: bool = False,
    **options: Any,
) -> Engine:
    """Return an engine over the pair, with further options of ``assembled``."""
    config, weight = pair.target.config, pair.target.model.embed_tokens.weight
    state = DeviceState(max_num_seqs, max_model_len, weight.dtype, weight.device)
    shapes = config, getattr(pair.head, "config", config)
    cache, own = (paged_cache(one, one.num_hidden_layers, blocks, weight.dtype, weight.device) for one in shapes)
    drafter = EagleDrafter(pair.head, None, own, state, config.max_position_embeddings)
    drafts = {"": LoadedDraft(drafter, DraftState(method="eagle3", hash="d"))} if draft else {}
    registry = DraftRegistry(drafts, state, config.hidden_size)
    scheduler_limits = Limits(max_num_seqs, budget, chunked, config.attention_chunk_size)
    return assembled(
        Target(pair.target, cache, state),
        registry,
        state,
        limits=scheduler_limits,
        blocks=BlockPool(blocks, contiguous=not pipelined),
        max_model_len=max_model_len,
        pipelined=pipelined,
        **options,
    )


def assembled(
    target: Target,
    registry: DraftRegistry,
    state: DeviceState,
    *,
    limits: Limits,
    blocks: BlockPool,
    prefix_caching: bool = True,
    max_model_len: int = 256,
    pipelined: bool = False,
    backend: CaptureBackend | None = None,
    rows: Sequence[int] = (1, 2, 4),
    grammars: GrammarCompiler | None = None,
    eos_token_ids: tuple[int, ...] = (),
    coupled: bool = True,
    exchange: str = "",
    access: TransferAccess = ACCESS,
) -> Engine:
    """Return an engine of these parts.

    ``backend`` captures graphs of steps, for buckets of ``rows``. ``grammars`` compiles the grammars of requests, whose
    answers end with one of ``eos_token_ids``. ``exchange`` is the role of an engine that exchanges blocks with others.
    """
    sizes = {"rows": rows, "max_tokens": limits.max_num_batched_tokens, "capture_after_steps": 1}
    scheduler = Scheduler(limits, blocks, prefix_caching=prefix_caching)
    moved = BlockParts(target, registry, state)
    parts = EngineParts(
        exchange=BlockExchange(moved, scheduler, access, computes=exchange == "prefill") if exchange else None,
        scheduler=scheduler,
        target=target,
        drafts=registry,
        state=state,
        shape_selector=ShapeSelector(Dispatcher("", "d" if "" in registry.names else ""), registry),
        coupled=coupled,
        graphs=None if backend is None else StepGraphs(target, registry, state, backend, coupled=coupled, **sizes),
        grammars=grammars,
    )
    worker = identity(limits.max_num_seqs)
    return Engine(parts, worker, max_model_len=max_model_len, eos_token_ids=eos_token_ids, pipelined=pipelined)


def identity(max_num_seqs: int = 4) -> WorkerIdentity:
    return WorkerIdentity(boot_id="b", worker="w", model="m", target="t", max_num_seqs=max_num_seqs)


def plan_of(shape: str, version: int = 1) -> Plan:
    """Return a plan with a fixed draft shape, without exploration and guard."""
    return Plan(draft="d", version=version, initial=TreeShape.parse(shape), explore=0, guard=False)


def submit(
    index: int, *, sampled: bool, tokens: int, vocabulary: int = VOCABULARY, least: int = 3, **sampling: Any
) -> Submit:
    """Return request ``index``: a random prompt of at least some tokens, a seed and, if sampled, its own parameters."""
    generator = torch.Generator().manual_seed(index)
    prompt = torch.randint(0, vocabulary, (least + 7 * index % 40,), generator=generator).tolist()
    params = ((1.0, 1.0, 0), (0.7, 0.9, 0), (1.3, 1.0, 5), (0.9, 0.95, 20))[index % 4] if sampled else (0.0, 1.0, 0)
    wanted = {"temperature": params[0], "top_p": params[1], "top_k": params[2], **sampling}
    return Submit(
        request_id=str(index), prompt=tuple(prompt), sampling=Sampling(max_tokens=tokens, seed=1000 + index, **wanted)
    )


Between = Callable[[int], Iterable[Tokens] | None]
"""Function that is called before each step with the number of steps so far. It may return what the engine emitted."""


def emitted(
    engine: Engine, requests: Sequence[Submit], between: Between = lambda steps: None, *, every: int = 0
) -> dict[str, list[Tokens]]:
    """Run the requests to their ends, and return what the engine emitted for each.

    One request more arrives every ``every`` steps; 0 adds all at once. Only requests with stop tokens may end before
    their length, and the idle engine must account for all slots and blocks.
    """
    stoppable = {request.request_id for request in requests if engine.eos_token_ids or request.sampling.stop_token_ids}
    by_request: dict[str, list[Tokens]] = {request.request_id: [] for request in requests}
    coming, steps = list(requests), 0
    while coming or not engine.idle:
        arriving = int(steps % every == 0) if every else len(coming)
        for request in coming[:arriving]:
            engine.add(request)
        del coming[:arriving]
        for new in (*(between(steps) or ()), *engine.step()):
            ends = new.finish in (None, "length") or (new.finish == "stop" and new.request_id in stoppable)
            assert ends, new.error or new.finish
            by_request[new.request_id].append(new)
        steps += 1
    check_engine(engine)
    return by_request


def texts(
    engine: Engine, requests: Sequence[Submit], between: Between = lambda steps: None, *, every: int = 0
) -> dict[str, list[int]]:
    """Run the requests as `emitted` does, and return their tokens."""
    by_request = emitted(engine, requests, between, every=every)
    return {name: [token for new in parts for token in new.tokens] for name, parts in by_request.items()}
