"""Fixtures for engines over a small random Llama in float64 with a noised copy of it as the draft.

The noised copy gives a realistic acceptance rate, and float64 makes every comparison exact.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor, nn

from specdecode_kernels.rope_cache.reference import Scales
from specdecode_worker.contract import DraftState, Plan, PlanRow, TaskMatch, TreeShape
from specdecode_worker.control.plan import Dispatcher
from specdecode_worker.core.device_state import DeviceState, PagedCache
from specdecode_worker.core.kv_cache import BlockPool
from specdecode_worker.core.messages import Submit
from specdecode_worker.core.request import ShapeSelector
from specdecode_worker.drafts.base import Drafter, LoadedDraft
from specdecode_worker.drafts.draft_model import ModelDrafter
from specdecode_worker.drafts.eagle import EagleDrafter
from specdecode_worker.drafts.lookup import NgramDrafter, SuffixDrafter, SuffixStore
from specdecode_worker.drafts.medusa import MedusaDrafter
from specdecode_worker.drafts.parallel import DFlashDrafter, PEagleDrafter
from specdecode_worker.drafts.registry import DraftRegistry, paged_cache
from specdecode_worker.engine.cuda_graphs import EagerBackend, StepGraphs
from specdecode_worker.engine.engine import Engine, EngineParts
from specdecode_worker.engine.scheduler import Limits, Scheduler
from specdecode_worker.engine.stats import WorkerIdentity
from specdecode_worker.engine.target import Target
from specdecode_worker.guided.grammars import GrammarCompiler
from specdecode_worker.models.arch import causal_lm_config
from specdecode_worker.models.causal_lm import Attend, CausalLM
from specdecode_worker.models.config import (
    CausalLMConfig,
    dflash_config,
    eagle3_config,
    eagle_config,
    medusa_config,
    peagle_config,
)
from specdecode_worker.models.dflash import DFlashHead
from specdecode_worker.models.eagle import Eagle3Head, EagleHead, PEagleHead
from specdecode_worker.models.medusa import MedusaHeads
from specdecode_worker.models.target_states import TargetStates
from specdecode_worker.sampling.params import Sampling

if TYPE_CHECKING:  # of the folder that is added to the path below
    from support.lossless.own_drafts import OwnDrafts


CPU = torch.device("cpu")
VOCABULARY = 61


class NoisedCopy(nn.Module):
    """Draft head that is the target with noise on its weights.

    It reads tokens and ignores hidden states.
    """

    def __init__(self, target: CausalLM, noise: float) -> None:
        super().__init__()
        self.llama = copy.deepcopy(target)
        generator = torch.Generator().manual_seed(7)
        for parameter in self.llama.parameters():
            spread = parameter.std() if parameter.numel() > 1 else parameter.abs()
            parameter.data += noise * spread * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)

    reads = TargetStates((0, 1, 2))

    def fuse(self, aux_TA: Tensor) -> Tensor:
        return aux_TA[:, : self.llama.config.hidden_size]

    def forward(self, hidden_TE: Tensor, tokens_T: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        return self.llama(tokens_T, positions_T, attend).hidden_TE

    def logits(self, hidden_TE: Tensor) -> Tensor:
        return self.llama.logits(hidden_TE)


@dataclass(frozen=True)
class Pair:
    """A target and its drafts."""

    config: CausalLMConfig
    target: CausalLM
    copy: NoisedCopy
    eagle: Eagle3Head
    steep: Eagle3Head
    """Head with large weights, whose proposals change with any key."""
    peagle: PEagleHead
    dflash: DFlashHead
    eagle1: EagleHead
    medusa: MedusaHeads
    own: OwnDrafts
    """Draft processes, which all engines share."""


@pytest.fixture(scope="session")
def pair() -> Iterator[Pair]:
    from support.lossless.own_drafts import OwnDrafts

    torch.set_num_threads(1)
    torch.manual_seed(3)
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
    }
    config = causal_lm_config(dict(shape, num_hidden_layers=3))
    target = CausalLM(config).double()
    for parameter in target.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.35)
    target.requires_grad_(False)
    head_shape = dict(shape, num_hidden_layers=1, draft_vocab_size=40, eagle_aux_hidden_state_layer_ids=[0, 1, 2])
    head_config = eagle3_config(head_shape, config)
    # A first layer id of 0 selects the inputs of the layers, so the inputs of all three layers are read.
    eagle = Eagle3Head(head_config, target.model.embed_tokens).double().requires_grad_(False)
    eagle.d2t += torch.arange(40) // 2  # maps to target ids 0, 1, 3, 4, 6, ...
    steep = copy.deepcopy(eagle)
    for parameter in steep.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.35, generator=torch.Generator().manual_seed(13))
    parallel_shape = peagle_config(dict(head_shape, num_hidden_layers=2, mask_token_id=60), config)
    peagle = PEagleHead(parallel_shape, target.model.embed_tokens).double().requires_grad_(False)
    peagle.d2t += torch.arange(40) // 2
    nn.init.normal_(peagle.mask_hidden)
    block_shape = dict(shape, num_hidden_layers=2, block_size=6, num_target_layers=3)
    block_shape["dflash_config"] = {"mask_token_id": 59, "target_layer_ids": [0, 1]}
    dflash = DFlashHead(dflash_config(block_shape, config), target).double().requires_grad_(False)
    for parameter in dflash.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.35)
    eagle1 = EagleHead(eagle_config(dict(shape, num_hidden_layers=1), config), target).double().requires_grad_(False)
    heads = medusa_config({"medusa_num_heads": 4, "medusa_num_layers": 1}, config)
    medusa = MedusaHeads(heads).double().requires_grad_(False)
    noised = NoisedCopy(target, noise=0.03)
    own = OwnDrafts()
    yield Pair(config, target, noised, eagle, steep, peagle, dflash, eagle1, medusa, own)
    own.close()


def drafter_of(pair: Pair, name: str, state: DeviceState, blocks: int) -> Drafter:
    """Return a drafter of the method with this name."""
    vocabulary, layers = pair.config.vocab_size, pair.config.num_hidden_layers

    def cache(depth: int) -> PagedCache:
        return paged_cache(pair.config, depth, blocks, torch.float64, CPU)

    match name:
        case "copy":
            return EagleDrafter(pair.copy, None, cache(layers), state, 512)
        case "eagle3":
            return EagleDrafter(pair.eagle, pair.eagle.target_ids, cache(1), state, 512)
        case "peagle":
            return PEagleDrafter(pair.peagle, pair.peagle.target_ids, cache(2), state, 512)
        case "dflash":
            return DFlashDrafter(pair.dflash, cache(2), state, 512)
        case "eagle3-steep":
            return EagleDrafter(pair.steep, pair.steep.target_ids, cache(1), state, 512)
        case "eagle":
            return EagleDrafter(pair.eagle1, None, cache(1), state, 512)
        case "medusa":
            return MedusaDrafter(pair.medusa, None, state)
        case "draft-model":
            return ModelDrafter(pair.copy.llama, vocabulary, cache(layers), state)
        case "own-eagle3":
            return pair.own.drafter(name, pair.steep, vocabulary, state)
        case "own-model":
            return pair.own.drafter(name, pair.copy.llama, vocabulary, state)
        case "ngram":
            return NgramDrafter(state, vocabulary, 1, 4, host_is_current=True)
        case "ngram-blind":
            return NgramDrafter(state, vocabulary, 1, 4, host_is_current=False)
        case "suffix":
            return SuffixDrafter(state, SuffixStore(), host_is_current=True)
        case "suffix-blind":
            return SuffixDrafter(state, SuffixStore(), host_is_current=False)
    raise ValueError(name)


EngineMaker = Callable[..., Engine]


@pytest.fixture
def make_engine(pair: Pair) -> EngineMaker:
    """Return a function that builds an engine.

    It is called as make_engine(draft=..., max_num_seqs=..., blocks=..., budget=...). ``draft`` is a name of DRAFTERS, a
    list of names (the second and later ones are drafts "d1", "d2", ...) or None. ``scales`` are those of a cache of the
    target in fp8. ``graphs`` are the row buckets of the
    steps that run through the graph capture backend.
    """

    def make(
        draft: str | list[str] | None = "copy",
        *,
        max_num_seqs: int = 8,
        blocks: int = 200,
        budget: int = 512,
        pipelined: bool = False,
        coupled: bool = True,
        prefix_caching: bool = True,
        chunked: bool = True,
        graphs: Sequence[int] = (),
        grammars: GrammarCompiler | None = None,
        eos_token_ids: tuple[int, ...] = (),
        scales: Sequence[Scales] = (),
    ) -> Engine:
        state = DeviceState(max_num_seqs, 256, torch.float64, CPU)
        layers = pair.config.num_hidden_layers
        names = [draft] if isinstance(draft, str) else draft or []
        drafts = {
            f"d{i}" if i else "": LoadedDraft(
                drafter_of(pair, name, state, blocks), DraftState(hash=f"{i}" if i else "d")
            )
            for i, name in enumerate(names)
        }
        registry = DraftRegistry(drafts, state, pair.config.hidden_size)
        target_cache = paged_cache(pair.config, layers, blocks, torch.float64, CPU, scales)
        target = Target(pair.target, target_cache, state)
        made = (
            StepGraphs(
                target,
                registry,
                state,
                EagerBackend(),
                rows=graphs,
                max_tokens=budget,
                capture_after_steps=1,
                coupled=coupled,
            )
            if graphs
            else None
        )
        parts = EngineParts(
            scheduler=Scheduler(
                Limits(max_num_seqs, budget, chunked),
                BlockPool(blocks, contiguous=not pipelined),
                prefix_caching=prefix_caching,
            ),
            target=target,
            drafts=registry,
            state=state,
            shape_selector=ShapeSelector(Dispatcher("", "d" if draft else ""), registry),
            coupled=coupled,
            graphs=made,
            grammars=grammars,
        )
        identity = WorkerIdentity(boot_id="b", worker="w", model="m", target="t", max_num_seqs=max_num_seqs)
        return Engine(parts, identity, max_model_len=256, eos_token_ids=eos_token_ids, pipelined=pipelined)

    return make


PLAIN: dict[tuple[CausalLM, tuple[Submit, ...]], dict[str, list[int]]] = {}


@pytest.fixture
def plain(make_engine: EngineMaker, pair: Pair) -> Callable[[Sequence[Submit]], dict[str, list[int]]]:
    """Return a function for the tokens by an engine without a draft, which test_engine compares with dense passes.

    A target decodes the same requests once for all tests.
    """

    def tokens(requests: Sequence[Submit]) -> dict[str, list[int]]:
        key = pair.target, tuple(requests)
        if key not in PLAIN:
            PLAIN[key] = texts(make_engine(None), requests)
        return PLAIN[key]

    return tokens


@pytest.fixture
def drafter(pair: Pair) -> Callable[[Engine, str], Drafter]:
    """Return a function that builds a further drafter, by name, for an engine of make_engine."""
    return lambda engine, name: drafter_of(pair, name, engine._state, 200)


def plan_of(shapes: Sequence[TreeShape], **fields: object) -> Plan:
    """Return a plan in which task ``t<i>`` runs the i-th shape at any load."""
    rows = tuple(
        PlanRow(concurrency=bucket, context=0, task=f"t{i}", shape=shape)
        for bucket in range(6)
        for i, shape in enumerate(shapes)
    )
    tasks = tuple(TaskMatch(name=f"t{i}") for i in range(len(shapes)))
    defaults: dict[str, object] = {
        "draft": "d",
        "version": 1,
        "rows": rows,
        "tasks": tasks,
        "explore": 0,
        "guard": False,
    }
    return Plan.model_validate(defaults | fields)


def submit(index: int, *, sampled: bool, tokens: int, shapes: int = 1) -> Submit:
    """Return request ``index``: a prompt, a seed and, if sampled, its own sampling parameters."""
    generator = torch.Generator().manual_seed(index)
    prompt = torch.randint(0, VOCABULARY, (1 + 7 * index % 40,), generator=generator).tolist()
    params = ((1.0, 1.0, 0), (0.7, 0.9, 0), (1.3, 1.0, 5), (0.9, 0.95, 20))[index % 4]
    sampling = Sampling(
        max_tokens=tokens,
        seed=1000 + index,
        temperature=params[0] if sampled else 0.0,
        top_p=params[1] if sampled else 1.0,
        top_k=params[2] if sampled else 0,
    )
    return Submit(request_id=str(index), prompt=tuple(prompt), sampling=sampling, task=f"t{index % shapes}")


def texts(engine: Engine, requests: Sequence[Submit], *, together: bool = True) -> dict[str, list[int]]:
    """Return the tokens of all requests, and check that the engine's accounting balances once it is idle.

    Only requests with stop tokens may end before their length.
    """
    tokens_by_request: dict[str, list[int]] = {request.request_id: [] for request in requests}
    stoppable = {request.request_id for request in requests if request.sampling.stop_token_ids}
    for group in [list(requests)] if together else [[request] for request in requests]:
        for request in group:
            engine.add(request)
        while not engine.idle:
            for new in engine.step():
                tokens_by_request[new.request_id] += new.tokens
                assert new.finish in (None, "length") or (new.finish == "stop" and new.request_id in stoppable)
    engine.check()
    return tokens_by_request


@pytest.fixture
def lossless() -> tuple[Callable[..., Plan], Callable[..., Submit], Callable[..., dict[str, list[int]]]]:
    """Return the functions (plan_of, submit, texts)."""
    return plan_of, submit, texts
