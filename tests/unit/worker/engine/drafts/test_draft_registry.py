"""Registry of drafts: replacement, and the states that the report shows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from specdecode_worker.contract import DraftState, PendingDraft, TaskMatch
from specdecode_worker.core.device_state import DeviceState
from specdecode_worker.core.request import DraftProgress, Request
from specdecode_worker.drafts.base import LoadedDraft
from specdecode_worker.drafts.registry import DraftRegistry
from specdecode_worker.drafts.swap import SwapStatus
from specdecode_worker.models.target_states import TargetStates
from support.worker.small_engine import small_engine, submit


def loaded(draft_hash: str, name: str = "") -> LoadedDraft:
    drafter: Any = SimpleNamespace(reads=TargetStates(), columns=None, problem="")
    return LoadedDraft(drafter, DraftState(name=name, method="eagle3", hash=draft_hash))


def device_state() -> DeviceState:
    return DeviceState(2, 64, torch.float32, torch.device("cpu"))


def test_requests_restart_with_a_draft_of_the_same_hash() -> None:
    registry = DraftRegistry({"": loaded("h")}, device_state(), 8)
    requests: list[Any] = [SimpleNamespace(draft=DraftProgress(name), merged={}, cached=5) for name in ("h", "other")]
    registry.replace("", loaded("h"), requests)
    assert [request.draft.draft for request in requests] == ["", "other"]


def test_the_report_shows_swaps_of_known_and_new_drafts() -> None:
    registry = DraftRegistry({"": loaded("h"), "code": loaded("c", name="code")}, device_state(), 8)
    swaps = {
        "": SwapStatus(pending=PendingDraft(method="ngram", hash="ngram-2-5", since_seconds=3)),
        "new": SwapStatus(problem="fc.weight is missing"),
    }
    first = registry.reported("", swaps)
    assert (first.hash, first.pending and first.pending.hash) == ("h", "ngram-2-5")
    named = [(draft.name, draft.method, draft.swap_problem) for draft in registry.named(swaps)]
    assert named == [("code", "eagle3", None), ("new", "none", "fc.weight is missing")]
    assert registry.reported() == registry.state()


def test_each_plan_sets_the_requests_that_a_draft_serves() -> None:
    engine = small_engine()
    registry = engine._drafts
    drafter: Any = registry.paged[""]
    registry.replace("code", loaded("c", name="code"), ())
    chat, code = (Request.of(submit(task=task), (), arrived_seconds=0.0) for task in ("chat", "code"))
    own = (TaskMatch(name="code", draft="code"),)
    for tasks, served in (((), [True, True]), (own, [True, False]), ((), [True, True])):
        registry.set_tasks(tasks)
        assert [drafter.serves(one) for one in (chat, code)] == served
        assert drafter.progress(chat) is chat.draft
