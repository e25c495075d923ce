"""Checks that captured steps could be CUDA graphs: no synchronisation and no data-dependent sizes.

Two steps of one key must also make exactly the same calls over the same static tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from specdecode_worker.engine.captured_step import CapturedStep, LogprobOutputs
from specdecode_worker.engine.engine import Engine
from specdecode_worker.guided.grammars import GrammarCompiler, regex_grammar
from specdecode_worker.sampling.params import NO_FEATURES
from specdecode_worker.sampling.sampler import StepSampler
from support.char_tokenizer import END, tokenizer_json
from support.small_llama import NoisedCopy, engine_of, networks, plan_of, submit, texts
from support.worker.watched_steps import WatchingBackend


def run(
    shape: str, *, pipelined: bool = False, grammar: str = "", coupled: bool = True, **fields: Any
) -> tuple[Engine, WatchingBackend]:
    """Serve four requests. Two of them have a grammar and the other sampling fields."""
    backend = WatchingBackend()
    compiler = GrammarCompiler(tokenizer_json, 61, (END,)) if grammar else None
    eos = (END,) if grammar else ()
    pair = networks(torch.float64)
    engine = engine_of(
        pair,
        backend=backend,
        rows=(2, 4),
        pipelined=pipelined,
        grammars=compiler,
        eos_token_ids=eos,
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


@contextmanager
def planted(kind: type, method: str, bug: Callable[..., Any]) -> Iterator[None]:
    """Patch the method so that it calls ``bug`` with the same arguments first."""
    right = getattr(kind, method)

    def wrong(self: Any, *args: Any) -> Any:
        bug(self, *args)
        return right(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, method, wrong)
        yield


calls = 0


def _by_the_host(self: Any, *_: Any) -> None:
    """Create a tensor with a size that depends on a counter of the host."""
    global calls
    calls += 1
    torch.zeros(1 + calls % 2)


BUGS: dict[str, tuple[type, str, Callable[..., Any], str]] = {
    "item": (CapturedStep, "_verified", lambda self, rows: rows.roots_B1[0].item(), "waits"),
    "tolist": (CapturedStep, "_commit", lambda self, rows, *_: rows.roots_B1.tolist(), "waits"),
    "a mask": (
        CapturedStep,
        "_verified",
        lambda self, rows: rows.roots_B1[rows.roots_B1 > 0],
        "waits|by a mask",
    ),
    "the host's numbers": (CapturedStep, "_verified", lambda self, rows: torch.tensor([1, 2]), "waits"),
    "in the penalties": (StepSampler, "_counted", lambda self, counts, rows: counts.answer_BV.max().item(), "waits"),
    "in the logprobs": (LogprobOutputs, "write", lambda self, logits, *_: logits[logits > 0], "waits|by a mask"),
    "in the draft": (NoisedCopy, "logits", lambda self, hidden_TE: bool(hidden_TE.sum() > 0), "waits"),
    "a size of the host's": (CapturedStep, "_verified", _by_the_host, "the same calls"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_detected(bug: str) -> None:
    kind, method, code, words = BUGS[bug]
    fields: dict[str, Any] = {"presence_penalty": 0.5, "logprobs": 1} if kind in (StepSampler, LogprobOutputs) else {}
    with planted(kind, method, code), pytest.raises(AssertionError, match=words):
        run("chain:2", **fields)[1].check()
