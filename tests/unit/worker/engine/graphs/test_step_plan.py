"""Steps that no graph runs, by reason. docs/dev/gpu-engine.md lists the same reasons."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from specdecode_worker.engine import cuda_graphs as step_graphs
from specdecode_worker.engine import cuda_graphs as step_plan
from specdecode_worker.engine.cuda_graphs import EagerBackend, EagerReason, OutsideReason, StepPlanner
from specdecode_worker.sampling.params import NO_FEATURES, Features
from support.small_llama import engine_of, networks, plan_of, submit, texts

DOCS = Path(__file__).parents[5] / "docs" / "dev" / "gpu-engine.md"


def documented(title: str) -> list[str]:
    """Return the reasons of the first table after ``title``."""
    part = DOCS.read_text().partition(title)[2]
    table = part.partition("|---|---|\n")[2].partition("\n\n")[0]
    return re.findall(r"^\| `([a-z-]+)` \|", table, flags=re.MULTILINE)


def test_the_docs_list_every_reason() -> None:
    assert documented("**Steps without a graph**") == [reason.value for reason in EagerReason]
    assert documented("**Drafts before the graph**") == [reason.value for reason in OutsideReason]


def eager_steps(shape: str, requests: list[Any], **fields: Any) -> dict[str, int]:
    """Return the eager steps by reason, without those of the prompts."""
    engine = engine_of(networks(torch.float64), backend=EagerBackend(), **fields)
    engine.set_plan(plan_of(shape))
    texts(engine, requests)
    return {reason: count for reason, count in engine._graphs.eager.items() if reason != EagerReason.PREFILL}


FEATURES: dict[str, dict[str, Any]] = {
    "none": {},
    "penalties": {"presence_penalty": 0.5, "repetition_penalty": 1.2},
    "bias": {"logit_bias": ((3, 1.0), (5, -2.0))},
    "min_tokens": {"min_tokens": 6, "stop_token_ids": (1, 2)},
    "logprobs": {"logprobs": 20},
}


@pytest.mark.parametrize("feature", FEATURES)
def test_plain_and_drafted_steps_have_graphs(feature: str) -> None:
    for shape in ("none", "chain:3", "tree:2,2,1"):
        assert eager_steps(shape, [submit(0, sampled=True, tokens=12, **FEATURES[feature])]) == {}


def test_more_biased_tokens_than_the_tables_have_columns() -> None:
    bias = tuple((token, 0.1) for token in range(12))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_plan, "WIDTHS", (8,))
        reasons = eager_steps("none", [submit(0, sampled=False, tokens=12, logit_bias=bias)])
    assert set(reasons) == {EagerReason.BIAS}


def test_more_logprobs_than_the_tables_have_columns() -> None:
    reasons = eager_steps("none", [submit(0, sampled=False, tokens=12, logprobs=21)])
    assert set(reasons) == {EagerReason.LOGPROBS}


@pytest.mark.parametrize("shape", ["none", "chain:3"])
def test_multi_round_sampling_behind_drafts_before_the_graph(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft that runs before the graph keeps its probabilities there, so sampled steps that draft are eager."""
    monkeypatch.setattr(StepPlanner, "_outside", lambda *_: OutsideReason.METHOD)
    sampled, greedy = submit(0, sampled=True, tokens=14), submit(1, sampled=False, tokens=14)
    reasons = {EagerReason.SAMPLER} if shape != "none" else set()
    assert set(eager_steps(shape, [sampled], coupled=False)) == reasons
    assert eager_steps(shape, [greedy], coupled=False) == {}


def test_features_are_not_captured_before_they_are_needed() -> None:
    engine = engine_of(networks(torch.float64), backend=EagerBackend())
    engine.set_plan(plan_of("chain:3"))
    graphs = engine._graphs
    assert {key.features for key in graphs._graphs} == {NO_FEATURES}
    texts(engine, [submit(0, sampled=False, tokens=8, logprobs=1)])
    assert {key.features for key in graphs._graphs} == {NO_FEATURES, Features(logprobs=True)}


def test_a_longer_text_needs_a_longer_history(monkeypatch: pytest.MonkeyPatch) -> None:
    """Penalties count tokens in as many positions as the longest text has."""
    monkeypatch.setattr(step_plan, "HISTORIES", (16, 32, 4096))
    engine = engine_of(networks(torch.float64), backend=EagerBackend(), rows=(1,))
    texts(engine, [submit(0, sampled=False, tokens=40, presence_penalty=0.5)])
    assert {key.features.history for key in engine._graphs._graphs} - {0} == {16, 32, engine._state.scratch}


def test_more_packed_tokens_than_a_graph_may_have() -> None:
    """Three chains of four nodes fit the budget, but their graph has four rows."""
    rows = [submit(i, sampled=False, tokens=12) for i in range(3)]
    assert set(eager_steps("chain:3", rows, budget=15, rows=(4,))) == {EagerReason.SIZE}


def test_more_rows_than_any_bucket() -> None:
    rows = [submit(i, sampled=False, tokens=8) for i in range(3)]
    assert set(eager_steps("none", rows, rows=(1,))) == {EagerReason.SIZE}


def test_no_further_graph_is_captured_beyond_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_graphs, "MOST_GRAPHS", 1)
    reasons = eager_steps("chain:3", [submit(0, sampled=False, tokens=12)], rows=(1,))
    assert set(reasons) == {EagerReason.LIMIT}


def test_a_graph_that_is_needed_less_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is room for plain steps and for one key with draft passes. With a new plan, counting starts again."""
    monkeypatch.setattr(step_graphs, "MOST_GRAPHS", 3)
    engine = engine_of(networks(torch.float64), backend=EagerBackend(), rows=(1,))
    engine.set_plan(plan_of("chain:3"))
    graphs = engine._graphs
    greedy, truncated = submit(0, sampled=False, tokens=8), submit(1, sampled=True, tokens=40)
    cuts = []
    for request in (truncated, greedy):
        texts(engine, [request])
        cuts.append([key.cuts for key in graphs._graphs if key.passes])
    assert cuts == [[True], [True]], "more steps needed the one with top-p"
    assert graphs.eager[EagerReason.LIMIT] > 0
    engine.set_plan(plan_of("chain:3", version=2))
    texts(engine, [greedy])
    assert [key.cuts for key in graphs._graphs if key.passes] == [False]
    assert {key.cuts for key in graphs._graphs if key.is_plain} == {False, True}
