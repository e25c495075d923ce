"""A draft swap keeps the graphs that it does not touch, and captures those of the plan before the next step."""

from __future__ import annotations

import time
from collections import Counter
from unittest.mock import Mock

import pytest
import torch

from specdecode_worker.contract import DraftState
from specdecode_worker.core.messages import Tokens
from specdecode_worker.drafts.base import LoadedDraft
from specdecode_worker.drafts.eagle import EagleDrafter
from specdecode_worker.drafts.lookup import NgramDrafter
from specdecode_worker.drafts.registry import paged_cache
from specdecode_worker.engine import cuda_graphs as step_graphs
from specdecode_worker.engine.cuda_graphs import Captured, CaptureFailed, EagerBackend, Work
from specdecode_worker.engine.engine import Engine
from specdecode_worker.engine.step_tables import GraphKey
from specdecode_worker.models.target_states import TargetStates
from support.small_llama import NoisedCopy, engine_of, networks, plan_of, submit, texts

ROWS, PLAIN_KEYS, PLAN_KEYS = (1, 2, 4), 6, 6
"""Buckets of rows, and the keys of plain steps and of the plan's shape: each with and without top-k, top-p or min-p."""


CATCH_UP_STEPS = 1
"""Steps after a swap in which the new draft catches up with texts that it has not seen, which no plan foresees."""


class OtherReads(NoisedCopy):
    """Draft that reads the states of one layer, not of two."""

    reads = TargetStates((1,))


class CountingBackend(EagerBackend):
    """Backend that keeps the keys of its captures and the number of its clears. A capture takes ``seconds``."""

    def __init__(self) -> None:
        self.keys: list[GraphKey] = []
        self.released: list[GraphKey] = []
        self.clears = 0
        self.seconds = 0.0

    def capture(self, work: Work) -> Captured:
        key = work.__self__.key  # type: ignore[attr-defined]
        self.keys.append(key)
        time.sleep(self.seconds)
        return Captured(work, release=lambda: self.released.append(key))

    def clear(self) -> None:
        self.clears += 1


def engine() -> tuple[Engine, CountingBackend]:
    backend = CountingBackend()
    made = engine_of(networks(torch.float64), backend=backend, rows=ROWS, pipelined=True)
    made.set_plan(plan_of("chain:2"))
    made._graphs._capture_after_steps = 3
    return made, backend


def other_draft(made: Engine, kind: type[NoisedCopy] = NoisedCopy) -> LoadedDraft:
    pair = networks(torch.float64)
    config = pair.target.config
    own = paged_cache(config, config.num_hidden_layers, 100, torch.float64, torch.device("cpu"))
    drafter = EagleDrafter(kind(pair.target, noise=0.1), None, own, made._state, config.max_position_embeddings)
    return LoadedDraft(drafter, DraftState(method="eagle3", hash="other"))


ASKED = [submit(index, sampled=index % 2 == 0, tokens=30 + 3 * index) for index in range(4)]


def serve_with_swap(made: Engine, loaded: LoadedDraft) -> dict[str, list[int]]:
    """Serve four requests, swap the draft after ten steps, and return all tokens."""

    def swap(steps: int) -> list[Tokens]:
        if steps != 10:
            return []
        emitted = made.set_draft("", loaded)
        made.set_plan(plan_of("chain:2", version=2).model_copy(update={"draft": loaded.state.hash}))
        return emitted

    return texts(made, ASKED, swap)


def waited(made: Engine) -> int:
    """Return the number of decode steps that ran eagerly because their graph was not captured yet."""
    assert set(made._graphs.eager) <= {"prefill", "new"}
    return made._graphs.eager["new"]  # type: ignore[index]


def plain_texts() -> dict[str, list[int]]:
    made = engine_of(networks(torch.float64))
    made.set_plan(plan_of("none"))
    return texts(made, ASKED)


def test_a_swap_keeps_plain_graphs_and_captures_those_of_the_plan_before_the_next_step() -> None:
    made, backend = engine()
    graphs = made._graphs
    assert len(graphs) == len(backend.keys) == PLAIN_KEYS + PLAN_KEYS
    first = dict(graphs._graphs)
    assert serve_with_swap(made, other_draft(made)) == plain_texts()
    again = backend.keys[PLAIN_KEYS + PLAN_KEYS :]
    assert len(again) == PLAN_KEYS
    assert {key.passes for key in again} == {2}
    assert set(backend.released) == set(again)
    assert backend.clears == 0, "the pool of memory stays, as graphs remain in it"
    for key, graph in graphs._graphs.items():
        assert (graph is first[key]) == (not key.passes)
    assert waited(made) <= CATCH_UP_STEPS
    assert {cell.draft for cell in made.report().acceptance} == {"d", "other"}


def test_a_draft_that_reads_other_states_touches_all_graphs() -> None:
    made, backend = engine()
    assert serve_with_swap(made, other_draft(made, OtherReads)) == plain_texts()
    again = backend.keys[PLAIN_KEYS + PLAN_KEYS :]
    assert Counter(key.passes for key in again) == {0: PLAIN_KEYS, 2: PLAN_KEYS}
    assert again[0].tokens == max(key.tokens for key in again), "the others reuse its memory"
    assert backend.clears == 1
    assert waited(made) <= CATCH_UP_STEPS


def test_a_draft_without_passes_needs_no_capture() -> None:
    made, backend = engine()
    drafter = NgramDrafter(made._state, 61, 1, 4, host_is_current=False)
    made.set_draft("", LoadedDraft(drafter, DraftState(method="ngram", hash="other")))
    assert len(backend.keys) == PLAIN_KEYS + PLAN_KEYS + (PLAIN_KEYS if backend.clears else 0)
    assert {key.passes for key in made._graphs._graphs} == {0}


def test_the_same_draft_once_more_keeps_all_graphs() -> None:
    """The blocks of a draft trial begin with a swap, also where the draft stays."""
    made, backend = engine()
    loaded = made.loaded_draft()
    assert loaded is not None
    assert serve_with_swap(made, loaded) == plain_texts()
    assert len(backend.keys) == PLAIN_KEYS + PLAN_KEYS


def test_a_further_draft_keeps_the_graphs_of_the_first() -> None:
    made, backend = engine()
    made.set_draft("second", other_draft(made))
    again = backend.keys[PLAIN_KEYS + PLAN_KEYS :]
    assert {key.drafts for key in again} == {("second",)}
    assert len(again) == PLAN_KEYS
    assert not backend.released


def test_captures_of_a_swap_are_bounded_and_begin_with_the_most_used(monkeypatch: pytest.MonkeyPatch) -> None:
    made, backend = engine()
    asked = [submit(index, sampled=False, tokens=40) for index in range(4)]
    texts(made, asked)
    backend.seconds = 0.02
    monkeypatch.setattr(step_graphs, "SWAP_SECONDS", 0.07)
    made.set_draft("", other_draft(made))
    again = backend.keys[PLAIN_KEYS + PLAN_KEYS :]
    assert 1 <= len(again) <= 3
    assert (again[0].rows, again[0].cuts) == (4, False)
    made.set_plan(plan_of("chain:2", version=2).model_copy(update={"draft": "other"}))
    texts(made, [submit(index, sampled=True, tokens=40) for index in range(4)])
    assert len(backend.keys) > PLAIN_KEYS + PLAN_KEYS + len(again), "the others are captured when they are needed"
    assert made._graphs.eager["failed"] == 0


def test_before_the_first_plan_nothing_is_captured() -> None:
    backend = CountingBackend()
    made = engine_of(networks(torch.float64), backend=backend, rows=ROWS)
    made.set_draft("", other_draft(made))
    assert not backend.keys


def test_a_draft_is_swapped_where_no_step_could_be_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EagerBackend, "capture", Mock(side_effect=CaptureFailed("out of memory")))
    made = engine_of(networks(torch.float64), backend=EagerBackend(), rows=ROWS)
    made.set_plan(plan_of("chain:2"))
    made.set_draft("", other_draft(made))
    made.set_plan(plan_of("chain:3", version=2).model_copy(update={"draft": "other"}))
    assert texts(made, ASKED) == plain_texts()


def test_graphs_are_gone_before_the_other_ranks_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL leaves no group whose collectives a graph still holds: the first rank would wait for ever."""
    made, _ = engine()
    assert len(made._graphs) > 0
    left: list[int] = []
    monkeypatch.setattr(made._target, "close", lambda: left.append(len(made._graphs)))
    made.close()
    assert left == [0]
