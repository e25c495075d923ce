"""Fixtures for engines over a small random Llama in float64 with a noised copy of it as the draft.

The noised copy gives a realistic acceptance rate, and float64 makes every comparison exact.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from specdecode_kernels.rope_cache.reference import Scales
from specdecode_worker.contract import DraftState, Plan
from specdecode_worker.core.device_state import DeviceState, PagedCache
from specdecode_worker.core.kv_cache import BlockPool
from specdecode_worker.core.messages import Submit
from specdecode_worker.drafts.base import Drafter, LoadedDraft
from specdecode_worker.drafts.draft_model import ModelDrafter
from specdecode_worker.drafts.eagle import EagleDrafter
from specdecode_worker.drafts.lookup import NgramDrafter, SuffixDrafter, SuffixStore
from specdecode_worker.drafts.medusa import MedusaDrafter
from specdecode_worker.drafts.parallel import DFlashDrafter, PEagleDrafter
from specdecode_worker.drafts.registry import DraftRegistry, paged_cache
from specdecode_worker.engine.cuda_graphs import EagerBackend
from specdecode_worker.engine.engine import Engine
from specdecode_worker.engine.scheduler import Limits
from specdecode_worker.engine.target import Target
from specdecode_worker.models.arch import causal_lm_config
from specdecode_worker.models.causal_lm import CausalLM
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
from specdecode_worker.sampling.params import Sampling
from support.lossless.own_drafts import OwnDrafts
from support.lossless.plain_decoding import PlainDecoding
from support.small_llama import SHAPE, NoisedCopy, assembled, texts

CPU = torch.device("cpu")


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
    torch.set_num_threads(1)
    torch.manual_seed(3)
    shape = SHAPE | {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = causal_lm_config(dict(shape, num_hidden_layers=3))
    target = CausalLM(config).double().requires_grad_(False)
    spread(target)
    head_shape = dict(shape, num_hidden_layers=1, draft_vocab_size=40, eagle_aux_hidden_state_layer_ids=[0, 1, 2])
    head_config = eagle3_config(head_shape, config)
    # A first layer id of 0 selects the inputs of the layers, so the inputs of all three layers are read.
    eagle = Eagle3Head(head_config, target.model.embed_tokens).double().requires_grad_(False)
    eagle.d2t += torch.arange(40) // 2  # maps to target ids 0, 1, 3, 4, 6, ...
    steep = copy.deepcopy(eagle)
    spread(steep, seed=13)
    parallel_shape = peagle_config(dict(head_shape, num_hidden_layers=2, mask_token_id=60), config)
    peagle = PEagleHead(parallel_shape, target.model.embed_tokens).double().requires_grad_(False)
    peagle.d2t += torch.arange(40) // 2
    nn.init.normal_(peagle.mask_hidden)
    block_shape = dict(shape, num_hidden_layers=2, block_size=6, num_target_layers=3)
    block_shape["dflash_config"] = {"mask_token_id": 59, "target_layer_ids": [0, 1]}
    dflash = DFlashHead(dflash_config(block_shape, config), target).double().requires_grad_(False)
    spread(dflash)
    eagle1 = EagleHead(eagle_config(dict(shape, num_hidden_layers=1), config), target).double().requires_grad_(False)
    heads = medusa_config({"medusa_num_heads": 4, "medusa_num_layers": 1}, config)
    medusa = MedusaHeads(heads).double().requires_grad_(False)
    noised = NoisedCopy(target)
    own = OwnDrafts()
    yield Pair(config, target, noised, eagle, steep, peagle, dflash, eagle1, medusa, own)
    own.close()


def spread(network: nn.Module, seed: int | None = None) -> None:
    """Draw the matrices of a network with large weights; with a seed, equal ones for equal sizes."""
    for parameter in network.parameters():
        if parameter.dim() > 1:
            generator = None if seed is None else torch.Generator().manual_seed(seed)
            nn.init.normal_(parameter, std=0.35, generator=generator)


def drafter_of(pair: Pair, name: str, state: DeviceState, blocks: int) -> Drafter:
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
            return DFlashDrafter(pair.dflash, pair.dflash.target_ids, cache(2), state, 512)
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
    """Return a function that builds an engine, with further options of ``assembled``.

    ``draft`` is a name of ``drafter_of``, a list of names (the second and later ones are drafts "d1", "d2", ...) or
    None. ``scales`` are those of a cache of the target in fp8. ``graphs`` are the row buckets of the steps that run
    through the graph capture backend.
    """

    def make(
        draft: str | list[str] | None = "copy",
        *,
        max_num_seqs: int = 8,
        blocks: int = 200,
        budget: int = 512,
        pipelined: bool = False,
        chunked: bool = True,
        graphs: Sequence[int] = (),
        scales: Sequence[Scales] = (),
        plan: Plan | None = None,
        **options: Any,
    ) -> Engine:
        state = DeviceState(max_num_seqs, 256, torch.float64, CPU)
        names = [draft] if isinstance(draft, str) else draft or []
        drafts = {
            f"d{i}" if i else "": LoadedDraft(
                drafter_of(pair, name, state, blocks), DraftState(hash=f"{i}" if i else "d")
            )
            for i, name in enumerate(names)
        }
        registry = DraftRegistry(drafts, state, pair.config.hidden_size)
        cache = paged_cache(pair.config, pair.config.num_hidden_layers, blocks, torch.float64, CPU, scales)
        engine = assembled(
            Target(pair.target, cache, state),
            registry,
            state,
            limits=Limits(max_num_seqs, budget, chunked),
            blocks=BlockPool(blocks, contiguous=not pipelined),
            backend=EagerBackend() if graphs else None,
            rows=graphs,
            pipelined=pipelined,
            **options,
        )
        if plan is not None:
            engine.set_plan(plan)
        return engine

    return make


PLAIN: dict[tuple[CausalLM, tuple[int, ...], Sampling], list[int]] = {}


@pytest.fixture
def plain(make_engine: EngineMaker, pair: Pair) -> Callable[[Sequence[Submit]], dict[str, list[int]]]:
    """Return a function for the tokens by an engine without draft, reuse, chunks or preemption.

    test_engine compares an engine with dense passes. A target decodes the same request once for all tests.
    """

    def key(request: Submit) -> tuple[CausalLM, tuple[int, ...], Sampling]:
        return pair.target, request.prompt, request.sampling

    def tokens(requests: Sequence[Submit]) -> dict[str, list[int]]:
        missing = [one for one in requests if key(one) not in PLAIN]
        if missing:
            engine = make_engine(None, blocks=1000, budget=4096, prefix_caching=False, chunked=False)
            found, report = texts(engine, missing), engine.report()
            assert (report.preemptions, report.prefix_hit_tokens, report.prefill_chunks) == (0, 0, len(missing))
            PLAIN.update({key(one): found[one.request_id] for one in missing})
        return {one.request_id: PLAIN[key(one)] for one in requests}

    return tokens


@pytest.fixture(scope="session")
def reference(pair: Pair) -> PlainDecoding:
    """Return the decoder of dense passes, without any engine."""
    return PlainDecoding(pair.target)


@pytest.fixture
def drafter(pair: Pair) -> Callable[[Engine, str], Drafter]:
    """Return a function that builds a further drafter, by name, for an engine of make_engine."""
    return lambda engine, name: drafter_of(pair, name, engine._state, 200)
