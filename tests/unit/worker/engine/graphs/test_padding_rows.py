"""Padding rows of a graph have a slot and a block of their own, and the contents are never read."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specdecode_worker.core.kv_cache import PADDING_BLOCK
from specdecode_worker.engine.cuda_graphs import EagerBackend
from specdecode_worker.engine.engine import Engine
from support.small_llama import engine_of, networks, plan_of, submit, texts


def poison(engine: Engine) -> None:
    """Fill the padding slot and block with NaN, and integer fields with values that would cause visible errors."""
    state = engine._state
    drafter: Any = engine._drafts.paged()[""]
    for cache in (engine._target.cache, drafter._cache):
        cache.data[:, :, PADDING_BLOCK] = torch.nan
    state.ring_SRA[state.padding_slot] = torch.nan
    state.block_aux_NA[PADDING_BLOCK] = torch.nan
    state.tokens_SP[state.padding_slot] = 7
    state.length_S[state.padding_slot] = 10**9


ADJUSTED = {"presence_penalty": 0.5, "repetition_penalty": 1.2, "logit_bias": ((3, 1.0),), "logprobs": 2}


@pytest.mark.parametrize(
    ("shape", "sampled", "fields"),
    [
        ("none", True, {}),
        ("chain:3", False, {}),
        ("tree:2,2,1", True, {}),
        ("none", False, ADJUSTED),
        ("tree:2,2,1", True, ADJUSTED),
    ],
    ids=["plain", "chain", "tree", "plain-adjusted", "tree-adjusted"],
)
def test_poison_in_padding_changes_nothing(shape: str, sampled: bool, fields: dict[str, Any]) -> None:
    requests = [submit(i, sampled=sampled, tokens=14 + i, **fields) for i in range(3)]
    outputs = []
    for poisoned in (False, True):
        engine = engine_of(networks(torch.float64), backend=EagerBackend(), rows=(4,))
        engine.set_plan(plan_of(shape))
        if poisoned:
            _before_every_step(engine)
        text = texts(engine, requests)
        assert engine._graphs.replayed > 3, "three rows or fewer in a bucket of four"
        report = engine.report()
        outputs.append((text, report.drafts, report.accepted_tokens))
    assert outputs[0] == outputs[1]
    eager = engine_of(networks(torch.float64))
    eager.set_plan(plan_of(shape))
    assert texts(eager, requests) == outputs[0][0]


def _before_every_step(engine: Engine) -> None:
    """Patch the engine so that its padding is poisoned before every step."""
    right = engine.step

    def step() -> Any:
        poison(engine)
        return right()

    engine.step = step  # type: ignore[method-assign]
