"""Captured steps could be CUDA graphs: no synchronisation, no data-dependent sizes, and the same calls again."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from specdecode_worker.engine.captured_step import CapturedStep
from specdecode_worker.engine.engine import Engine
from specdecode_worker.guided.grammars import GrammarCompiler, regex_grammar
from specdecode_worker.sampling.params import NO_FEATURES
from support.char_tokenizer import END, tokenizer_json
from support.small_llama import engine_of, networks, plan_of, submit, texts
from support.worker.watched_steps import WatchingBackend


def run(
    shape: str, *, pipelined: bool = False, grammar: str = "", coupled: bool = True, **fields: Any
) -> tuple[Engine, WatchingBackend]:
    """Serve four requests. Two of them have a grammar and the other sampling fields."""
    backend = WatchingBackend()
    engine = engine_of(
        networks(torch.float64),
        backend=backend,
        rows=(2, 4),
        pipelined=pipelined,
        grammars=GrammarCompiler(tokenizer_json, 61, (END,)) if grammar else None,
        eos_token_ids=(END,) if grammar else (),
        coupled=coupled,
    )
    engine.set_plan(plan_of(shape))
    asked: dict[str, Any] = {**fields, "grammar": grammar}
    texts(engine, [submit(i, sampled=i % 2 == 0, tokens=6 + 3 * i, **(asked if i > 1 else {})) for i in range(4)])
    return engine, backend


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "pipelined"), [("none", False), ("chain:3", True), ("tree:2,2,1", False)])
def test_two_steps_of_one_key_make_the_same_calls(shape: str, pipelined: bool) -> None:
    engine, backend = run(shape, pipelined=pipelined)
    assert engine._graphs.replayed > 5
    assert max(map(len, backend.traces)) > 3, "steps with more and fewer rows, and other sampling parameters"
    backend.check()


FEATURES: dict[str, dict[str, Any]] = {
    "penalties": {"frequency_penalty": 0.5, "repetition_penalty": 1.2, "logit_bias": ((3, 1.0),)},
    "allowed": {"allowed_token_ids": (3, 5, 9), "repetition_penalty": 1.2},
    "min_tokens": {"min_tokens": 9, "stop_token_ids": (1, 2)},
    "logprobs": {"logprobs": 3},
    "grammar": {"grammar": regex_grammar("[a-f]{3,9}(-[0-9]{2})+"), "presence_penalty": 0.3},
}


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["none", "tree:2,2,1"])
@pytest.mark.parametrize("feature", FEATURES)
def test_two_steps_with_a_feature_make_the_same_calls(feature: str, shape: str) -> None:
    engine, backend = run(shape, **FEATURES[feature])
    assert set(engine._graphs.eager) == {"prefill"}
    assert any(key.features != NO_FEATURES for key in engine._graphs._graphs)
    backend.check()


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["none", "chain:3", "tree:2,2,1"])
def test_two_steps_of_multi_round_sampling_make_the_same_calls(shape: str) -> None:
    engine, backend = run(shape, coupled=False, presence_penalty=0.3)
    assert set(engine._graphs.eager) == {"prefill"}
    assert any(key.features.rounds for key in engine._graphs._graphs)
    backend.check()


SIZES = itertools.cycle((1, 2))
BUGS: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "item": (lambda roots: roots[0].item(), "waits"),
    "tolist": (lambda roots: roots.tolist(), "waits"),
    "a mask": (lambda roots: roots[roots > 0], "waits|by a mask"),
    "a condition": (lambda roots: bool(roots.sum() > 0), "waits"),
    "the host's numbers": (lambda roots: torch.tensor([1, 2]), "waits"),
    "a size of the host's": (lambda roots: torch.zeros(next(SIZES)), "the same calls"),
}


@pytest.mark.parametrize(("bug", "words"), BUGS.values(), ids=BUGS)
def test_a_planted_bug_is_detected(bug: Callable[[Tensor], Any], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = CapturedStep._verified
    monkeypatch.setattr(CapturedStep, "_verified", lambda self, rows: (bug(rows.roots_B1), right(self, rows))[1])
    with pytest.raises(AssertionError, match=words):
        run("chain:2")[1].check()
