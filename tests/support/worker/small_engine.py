"""Requests, and an engine over a Llama of two tiny layers with a noised copy of it as the draft."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from specdecode_worker.contract import DraftState, Plan, PlanRow, TaskMatch, TreeShape
from specdecode_worker.control.plan import Dispatcher
from specdecode_worker.core.device_state import DeviceState
from specdecode_worker.core.kv_cache import BlockPool
from specdecode_worker.core.messages import Submit, Tokens
from specdecode_worker.core.request import Request, ShapeSelector
from specdecode_worker.drafts.base import LoadedDraft
from specdecode_worker.drafts.eagle import EagleDrafter
from specdecode_worker.drafts.registry import DraftRegistry, paged_cache
from specdecode_worker.engine.engine import Engine, EngineParts
from specdecode_worker.engine.remote_prefill import BlockExchange, BlockParts
from specdecode_worker.engine.scheduler import Limits, Scheduler
from specdecode_worker.engine.stats import WorkerIdentity
from specdecode_worker.engine.target import Target
from specdecode_worker.engine.transfer import TransferAccess
from specdecode_worker.models.arch import causal_lm_config
from specdecode_worker.models.causal_lm import Attend, CausalLM
from specdecode_worker.models.target_states import TargetStates
from specdecode_worker.sampling.params import Sampling

CPU = torch.device("cpu")
VOCABULARY = 41
HIDDEN = 16
ACCESS = TransferAccess("key", lambda: ("token",))


class NoisedCopy(nn.Module):
    """Draft that reads tokens and no hidden states. About half of its tokens are accepted."""

    def __init__(self, target: CausalLM) -> None:
        super().__init__()
        self.llama = copy.deepcopy(target)
        generator = torch.Generator().manual_seed(7)
        for weight in self.llama.parameters():
            weight.data += 0.06 * weight.abs().mean() * torch.randn(weight.shape, generator=generator).double()

    reads = TargetStates((0,))

    def fuse(self, aux_TA: Tensor) -> Tensor:
        return aux_TA

    def forward(self, hidden_TE: Tensor, tokens_T: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        return self.llama(tokens_T, positions_T, attend).hidden_TE

    def logits(self, hidden_TE: Tensor) -> Tensor:
        return self.llama.logits(hidden_TE)


@lru_cache(maxsize=1)
def networks() -> tuple[CausalLM, NoisedCopy]:
    torch.set_num_threads(1)
    config = causal_lm_config(
        {
            "vocab_size": VOCABULARY,
            "hidden_size": HIDDEN,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 512,
        }
    )
    target = CausalLM(config).double().requires_grad_(False)
    generator = torch.Generator().manual_seed(3)
    for weight in target.parameters():
        if weight.dim() > 1:
            weight.data.normal_(std=0.4, generator=generator)
    return target, NoisedCopy(target)


def small_engine(
    *,
    draft: bool = True,
    max_num_seqs: int = 4,
    blocks: int = 80,
    budget: int = 128,
    max_model_len: int = 200,
    eos: tuple[int, ...] = (),
    pipelined: bool = False,
    exchange: str = "",
    access: TransferAccess = ACCESS,
) -> Engine:
    """Return an engine; ``exchange`` is the role of one that exchanges blocks with others."""
    target, head = networks()
    layers, dtype = target.config.num_hidden_layers, torch.float64
    state = DeviceState(max_num_seqs, max_model_len, dtype, CPU)
    drafts = {}
    if draft:
        drafter = EagleDrafter(head, None, paged_cache(target.config, layers, blocks, dtype, CPU), state, 512)  # type: ignore[arg-type]
        drafts[""] = LoadedDraft(drafter, DraftState(method="eagle3", hash="d"))
    registry = DraftRegistry(drafts, state, HIDDEN)
    cache = paged_cache(target.config, layers, blocks, dtype, CPU)
    scheduler = Scheduler(Limits(max_num_seqs, budget), BlockPool(blocks, contiguous=not pipelined))
    whole = Target(target, cache, state)
    block_parts = BlockParts(whole, registry, state)
    parts = EngineParts(
        exchange=BlockExchange(block_parts, scheduler, access, computes=exchange == "prefill") if exchange else None,
        scheduler=scheduler,
        target=whole,
        drafts=registry,
        state=state,
        shape_selector=ShapeSelector(Dispatcher("", "d" if draft else ""), registry),
    )
    return Engine(parts, identity(max_num_seqs), max_model_len=max_model_len, eos_token_ids=eos, pipelined=pipelined)


def identity(max_num_seqs: int = 4) -> WorkerIdentity:
    return WorkerIdentity(boot_id="b", worker="w", model="m", target="t", max_num_seqs=max_num_seqs)


def plan_of(*shapes: str, **fields: Any) -> Plan:
    """Return a plan with the first shape for ``other`` and the next ones for t1, t2, ..., at any load."""
    names = ["other", *(f"t{i}" for i in range(1, len(shapes)))]
    rows = tuple(
        PlanRow(concurrency=bucket, context=0, task=name, shape=TreeShape.parse(shape))
        for bucket in range(6)
        for name, shape in zip(names, shapes, strict=True)
    )
    tasks = tuple(TaskMatch(name=name) for name in names[1:])
    return Plan(**{"draft": "d", "version": 1, "rows": rows, "tasks": tasks, "explore": 0, "guard": False, **fields})


def submit(
    name: str = "r", prompt: Sequence[int] = (1, 2, 3), *, task: str = "other", cache_salt: str = "", **sampling: Any
) -> Submit:
    wanted = Sampling(**{"max_tokens": 20, "seed": 1, "temperature": 0.0, **sampling})
    return Submit(
        request_id=name, prompt=tuple(prompt), sampling=wanted, task=task, arrival_seconds=5.0, cache_salt=cache_salt
    )


def request(name: str = "r", prompt: Sequence[int] = (1, 2, 3), **sampling: Any) -> Request:
    return Request.of(submit(name, prompt, **sampling), (), arrived_seconds=5.0)


def drain(engine: Engine, most: int = 2000) -> list[Tokens]:
    """Run steps until the engine is idle and return everything that it emitted."""
    outputs: list[Tokens] = []
    while not engine.idle:
        assert most > 0, "the engine does not come to an end"
        most -= 1
        outputs += engine.step()
    engine.check()
    return outputs


def texts(outputs: Iterable[Tokens]) -> dict[str, list[int]]:
    by_request: dict[str, list[int]] = {}
    for new in outputs:
        by_request.setdefault(new.request_id, []).extend(new.tokens)
    return by_request
