"""Graphs of steps: the reasons for steps without one, failed captures, padding rows, and calibrated drafts."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from specdecode_worker.core.errors import RankLost
from specdecode_worker.core.kv_cache import PADDING_BLOCK
from specdecode_worker.engine import cuda_graphs
from specdecode_worker.engine.cuda_graphs import (
    Captured,
    CaptureFailed,
    CudaGraphBackend,
    EagerBackend,
    EagerReason,
    OutsideReason,
    StepPlanner,
    Work,
)
from specdecode_worker.engine.engine import Engine
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


def test_more_biased_tokens_than_the_tables_have_columns() -> None:
    bias = tuple((token, 0.1) for token in range(12))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_graphs, "WIDTHS", (8,))
        reasons = eager_steps("none", [submit(0, sampled=False, tokens=12, logit_bias=bias)])
    assert set(reasons) == {EagerReason.BIAS}


def test_more_logprobs_than_the_tables_have_columns() -> None:
    for count, reasons in ((20, set()), (21, {EagerReason.LOGPROBS})):
        assert set(eager_steps("none", [submit(0, sampled=False, tokens=12, logprobs=count)])) == reasons


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
    monkeypatch.setattr(cuda_graphs, "HISTORIES", (16, 32, 4096))
    engine = engine_of(networks(torch.float64), backend=EagerBackend(), rows=(1,))
    texts(engine, [submit(0, sampled=False, tokens=40, presence_penalty=0.5)])
    assert {key.features.history for key in engine._graphs._graphs} - {0} == {16, 32, engine._state.scratch}


@pytest.mark.parametrize(
    ("shape", "fields"), [("chain:3", {"budget": 15, "rows": (4,)}), ("none", {"rows": (1,)})], ids=["tokens", "rows"]
)
def test_more_rows_or_packed_tokens_than_any_graph_has(shape: str, fields: dict[str, Any]) -> None:
    """Three chains of four nodes fit the budget, but their graph has four rows."""
    asked = [submit(i, sampled=False, tokens=12) for i in range(3)]
    assert set(eager_steps(shape, asked, **fields)) == {EagerReason.SIZE}


def test_no_further_graph_is_captured_beyond_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "MOST_GRAPHS", 1)
    reasons = eager_steps("chain:3", [submit(0, sampled=False, tokens=12)], rows=(1,))
    assert set(reasons) == {EagerReason.LIMIT}


def test_a_graph_that_is_needed_less_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is room for plain steps and for one key with draft passes. With a new plan, counting starts again."""
    monkeypatch.setattr(cuda_graphs, "MOST_GRAPHS", 3)
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


class FailingBackend(EagerBackend):
    """Backend whose captures number ``failing`` (from 0) fail."""

    def __init__(self, *failing: int) -> None:
        self._failing, self.captures = failing, 0

    def capture(self, work: Work) -> Captured:
        self.captures += 1
        if self.captures - 1 in self._failing:
            raise CaptureFailed("out of memory")
        return super().capture(work)


def engine(*failing: int) -> tuple[Engine, FailingBackend]:
    backend = FailingBackend(*failing)
    made = engine_of(networks(torch.float64), backend=backend, rows=(1, 2, 4))
    made.set_plan(plan_of("chain:2"))
    return made, backend


def test_only_the_steps_of_a_failed_capture_run_without_a_graph() -> None:
    asked = [submit(index, sampled=True, tokens=12 + 4 * index) for index in range(4)]
    whole, _ = engine()
    wanted = texts(whole, asked)
    made, backend = engine(0)  # the largest graph is captured first
    assert whole._graphs is not None
    assert len(made._graphs) == len(whole._graphs) - 1
    captures = backend.captures
    assert texts(made, asked) == wanted
    assert made._graphs.eager["failed"] > 3
    assert made._graphs.replayed > 3
    assert backend.captures == captures, "a failed capture is not tried again at every step"
    made.set_plan(plan_of("chain:2"))
    assert backend.captures == captures


class OutOfResources(Exception):
    """Error of Triton for a kernel that needs more shared memory than a GPU has. It is no RuntimeError."""


class BrokenOff(CudaGraphBackend):
    """Backend whose runs before a capture end with an error. It needs no GPU."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def warm_up(self, work: Work) -> None:
        raise self._error

    def clear(self) -> None:
        pass


def test_a_kernel_that_does_not_fit_the_device_leaves_its_steps_without_a_graph() -> None:
    asked = [submit(index, sampled=False, tokens=8) for index in range(2)]
    whole, _ = engine()
    made = engine_of(networks(torch.float64), backend=BrokenOff(OutOfResources("shared memory")), rows=(1, 2, 4))
    made.set_plan(plan_of("chain:2"))
    assert texts(made, asked) == texts(whole, asked)
    assert made._graphs.eager["failed"] > 0


def test_the_loss_of_a_rank_is_no_failed_capture() -> None:
    """The signal of the loss is sent once, and a capture during which it arrives must not swallow it."""
    with pytest.raises(RankLost):
        BrokenOff(RankLost("rank 1: ended")).capture(lambda: None)


def poison(engine: Engine, steps: int) -> None:
    """Fill the padding slot and block with NaN, and integer fields with values that would cause visible errors."""
    state = engine._state
    drafter: Any = engine._drafts.paged[""]
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
        text = texts(engine, requests, partial(poison, engine)) if poisoned else texts(engine, requests)
        assert engine._graphs.replayed > 3, "three rows or fewer in a bucket of four"
        report = engine.report()
        outputs.append((text, report.drafts, report.accepted_tokens))
    assert outputs[0] == outputs[1]
    eager = engine_of(networks(torch.float64))
    eager.set_plan(plan_of(shape))
    assert texts(eager, requests) == outputs[0][0]


SHARPNESS = (3.0, 0.25)


def served(*, graphs: bool) -> tuple[Any, int, int]:
    """Return the texts of greedy and sampled requests with a bias, and the counts of drafts and accepted tokens."""
    engine = engine_of(networks(torch.float64), backend=EagerBackend() if graphs else None)
    drafter: Any = engine._drafts.paged[""]
    drafter._ranking._sharpness = SHARPNESS
    engine.set_plan(plan_of("chain:3"))
    requests = [submit(i, sampled=i % 2 == 0, tokens=40, logit_bias=((5, 4.0), (9, 3.0))) for i in range(4)]
    answers = texts(engine, requests)
    assert engine._graphs is None or set(engine._graphs.eager) == {"prefill"}
    report = engine.report()
    return answers, report.drafts, report.accepted_tokens


def test_proposals_are_those_of_eager_steps() -> None:
    assert served(graphs=True) == served(graphs=False)
