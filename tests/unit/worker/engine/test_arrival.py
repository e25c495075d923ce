"""Results start for the host as soon as they are there: before the draft follows a prompt, and never overwritten."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_llama import engine_of, networks, plan_of, submit

from specdecode_worker.engine import launcher
from specdecode_worker.engine.arrival import to_device, to_host


def test_a_first_token_leaves_before_the_draft_follows_its_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(networks(torch.float64))
    engine.set_plan(plan_of("chain:3"))
    order: list[str] = []
    follows, copied = engine._drafts.prefill, launcher.to_host

    def prefill(*args: Any) -> None:
        order.append("draft")
        follows(*args)

    def leaves(*args: Any, **named: Any) -> Any:
        order.append("token")
        return copied(*args, **named)

    monkeypatch.setattr(engine._drafts, "prefill", prefill)
    monkeypatch.setattr(launcher, "to_host", leaves)
    engine.add(submit(0, sampled=False, tokens=4))
    [first] = engine.step()
    assert len(first.tokens) == 1
    assert order == ["token", "draft"]


def test_what_will_be_overwritten_is_copied() -> None:
    static = torch.tensor([1, 2])
    [kept], arrival = to_host([static], overwritten=True)
    [same], _ = to_host([static])
    static.zero_()
    arrival.wait()
    assert kept.tolist() == [1, 2]
    assert same is static
    assert to_device([3, 4], torch.device("cpu")).tolist() == [3, 4]
