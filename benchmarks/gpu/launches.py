"""Table of the launches of captured steps of Llama-3.1-8B with an EAGLE-3 head: `launches.py [--write]`.

The table is in launches.json. `--write` replaces it; without it, the command prints the table as JSON. No GPU is used.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from launch_counter import counting, fake_gpu
from shapes import LLAMA_8B, Shapes
from torch import nn

from specdecode_worker.contract import TreeShape
from specdecode_worker.core.device_state import DeviceState
from specdecode_worker.drafts.eagle import EagleDrafter
from specdecode_worker.drafts.registry import paged_cache
from specdecode_worker.engine.captured_step import CapturedStep, StepParts
from specdecode_worker.engine.step_tables import GraphKey, MaskTable, key_of, key_outside
from specdecode_worker.engine.target import Target
from specdecode_worker.engine.tensor_parallel import LeaderTarget, RankGroup, RankStep, StepShape
from specdecode_worker.models.arch import causal_lm_config
from specdecode_worker.models.causal_lm import CausalLM
from specdecode_worker.models.config import eagle3_config, split_config
from specdecode_worker.models.eagle import Eagle3Head
from specdecode_worker.models.linear import Linear, Shard, Split
from specdecode_worker.models.optimize import fuse
from specdecode_worker.models.target_states import NO_STATES
from specdecode_worker.sampling.params import NO_FEATURES, Features
from specdecode_worker.sampling.trees import tree_of

TABLE = Path(__file__).with_name("launches.json")
CUDA = torch.device("cuda")
BLOCKS, LENGTH = 1025, 8192
RANKS = 2
"""Devices of the cases of ranks."""
TRACED_LAYERS = 7
"""The fewest layers of a target with three distinct layers for an EAGLE-3 head to read, plus some."""


@dataclass(frozen=True, slots=True)
class Case:
    """A step to count.

    ``loaded``: a draft is loaded, whose states even a plain step must store. ``outside``: the draft runs before the
    graph, whose launches alone are counted. ``rank``: the step is that of one of two ranks; None for a single device.
    """

    name: str
    shape: str = "none"
    rows: int = 1
    loaded: bool = False
    cuts: bool = False
    outside: bool = False
    features: Features = NO_FEATURES
    rank: int | None = None


CASES = (
    Case("plain"),
    Case("plain, 128 rows", rows=128),
    Case("plain, a draft is loaded", loaded=True),
    Case("plain, top-p", cuts=True),
    Case("chain:3", "chain:3", loaded=True),
    Case("chain:5", "chain:5", loaded=True),
    Case("chain:5, 16 rows", "chain:5", rows=16, loaded=True),
    Case("chain:5, top-p", "chain:5", loaded=True, cuts=True),
    Case("tree:4,2,1", "tree:4,2,1", loaded=True),
    Case("chain:5, drafted before the graph", "chain:5", loaded=True, outside=True),
    Case("plain, logprobs", features=Features(logprobs=True)),
    Case("plain, bias", features=Features(adjusts=8)),
    Case("plain, penalties", features=Features(adjusts=8, history=1024)),
    Case("plain, grammar", features=Features(masks=True)),
    Case("chain:5, penalties", "chain:5", loaded=True, features=Features(adjusts=8, history=1024)),
    Case("plain, multi-round", features=Features(rounds=1)),
    Case("chain:5, multi-round", "chain:5", loaded=True, features=Features(rounds=1)),
    *(Case(f"plain, rank {rank} of 2", rank=rank) for rank in (0, 1)),
    *(Case(f"chain:5, rank {rank} of 2", "chain:5", loaded=True, rank=rank) for rank in (0, 1)),
)


@dataclass(frozen=True, slots=True)
class Networks:
    """A target and its head, of fake weights on a GPU."""

    target: CausalLM
    head: Eagle3Head


def networks(shapes: Shapes, layers: int, *, dtype: torch.dtype = torch.bfloat16, rank: int | None = None) -> Networks:
    """Return fused networks with ``layers`` layers in the target; call inside of `fake_gpu`.

    ``rank`` is that of the target's part on one of two devices; None for the whole target.
    """
    config = causal_lm_config({**shapes.target, "num_hidden_layers": layers})
    target = CausalLM(config if rank is None else split_config(config, RANKS))
    head = Eagle3Head(eagle3_config(shapes.head, config), target.model.embed_tokens)
    if rank is not None:
        target.lm_head = Linear(config.hidden_size, config.vocab_size // RANKS, split=Split.VOCABULARY)
    for network in (target, head):
        _move(network, dtype)
        if network is target and rank is not None:
            for module in target.modules():
                if isinstance(module, Linear):
                    module.share(Shard(rank, RANKS), config.vocab_size)
        fuse(network)
    return Networks(target, head)


def step_of(pair: Networks, case: Case) -> CapturedStep | RankStep:
    """Return the step that serves ``case``; call inside of `fake_gpu`."""
    config, dtype = pair.target.config, pair.target.model.embed_tokens.weight.dtype
    state = DeviceState(case.rows, LENGTH, dtype, CUDA)
    cache = paged_cache(config, config.num_hidden_layers, BLOCKS, dtype, CUDA)
    key = _key(case)
    if case.rank:
        return RankStep(StepShape(key.rows, key.tokens, key.depth), pair.target, cache, state.block_table_SM)
    drafters: tuple[EagleDrafter, ...] = ()
    if case.loaded:
        own = paged_cache(pair.head.config, 1, BLOCKS, dtype, CUDA)
        drafter = EagleDrafter(pair.head, pair.head.target_ids, own, state, config.max_position_embeddings)
        drafters = (drafter,)
        state.allocate_states(drafter.reads.width(config.hidden_size))
        state.allocate_block_states(BLOCKS)
    reads = drafters[0].reads if drafters else NO_STATES
    masks_NW = MaskTable(key.tokens + 1, config.vocab_size, CUDA).view() if key.features.masks else None
    group = cast(RankGroup, None)  # captured steps send no messages
    target = Target(pair.target, cache, state) if case.rank is None else LeaderTarget(pair.target, cache, state, group)
    return CapturedStep(key, StepParts(target, drafters if key.passes else (), state, reads, masks_NW))


def _key(case: Case) -> GraphKey:
    tree = tree_of(TreeShape.parse(case.shape))
    if case.outside:
        return key_outside(case.rows, [tree], cuts=case.cuts, features=case.features)
    key = key_of(case.rows, [tree], tree.verified, cuts=case.cuts, features=case.features)
    assert key is not None, "the case is too large for a graph"
    return key


def count(case: Case, shapes: Shapes = LLAMA_8B) -> dict[str, Any]:
    """Return the launches of a step: all, per layer of the target, per draft pass, and by name.

    Two short targets are traced and the difference is multiplied, because all layers launch the same.
    """
    layers = shapes.target["num_hidden_layers"]
    short = _launches(case, shapes, TRACED_LAYERS)
    layer = _launches(case, shapes, TRACED_LAYERS + 1) - short
    whole = short + Counter({name: number * (layers - TRACED_LAYERS) for name, number in layer.items()})
    counts: dict[str, Any] = {
        "launches": whole.total(),
        "per_layer": layer.total(),
        "outside_of_layers": whole.total() - layers * layer.total(),
        "by_name": dict(sorted(whole.items(), key=lambda item: (-item[1], item[0]))),
    }
    if case.shape.startswith("chain:") and not case.outside and not case.rank:
        longer = replace(case, shape=f"chain:{int(case.shape[6:]) + 1}")
        counts["per_draft_pass"] = _launches(longer, shapes, TRACED_LAYERS).total() - short.total()
    return counts


def _launches(case: Case, shapes: Shapes, layers: int) -> Counter[str]:
    with fake_gpu():
        step = step_of(networks(shapes, layers, rank=case.rank), case)
        with counting() as launches:
            step.run()
    return launches


def _move(network: nn.Module, dtype: torch.dtype) -> None:
    """Put a network on the GPU and cast its parameters. Rotary tables are buffers and keep their type."""
    for module in network.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                moved = parameter.detach().to(CUDA, dtype)
                module._parameters[name] = nn.Parameter(moved, requires_grad=False)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(CUDA)


def table() -> dict[str, Any]:
    """Return the counts of all cases, by name."""
    return {case.name: count(case) for case in CASES}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"replace {TABLE.name}")
    args = parser.parse_args()
    text = json.dumps(table(), indent=1) + "\n"
    if args.write:
        TABLE.write_text(text)
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
