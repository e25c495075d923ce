"""Steps that no graph runs, by reason. docs/gpu.md lists the same reasons."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from small_llama import engine_of, networks, plan_of, submit, texts

from specdecode_worker.engine.graphs import step_graphs
from specdecode_worker.engine.graphs.capture_backends import EagerBackend
from specdecode_worker.engine.graphs.step_plan import EagerReason

DOCS = Path(__file__).parents[5] / "docs" / "gpu.md"


def documented(title: str) -> list[str]:
    """Return the reasons of the first table after ``title``."""
    part = DOCS.read_text().partition(title)[2]
    table = part.partition("|---|---|\n")[2].partition("\n\n")[0]
    return re.findall(r"^\| `([a-z-]+)` \|", table, flags=re.MULTILINE)


def test_the_docs_list_every_reason() -> None:
    assert documented("**Steps without a graph**") == [reason.value for reason in EagerReason]


def eager_steps(shape: str, requests: list[Any], **fields: Any) -> dict[str, int]:
    """Return the eager steps by reason, without those of the prompts."""
    engine = engine_of(networks(torch.float64), backend=EagerBackend(), **fields)
    engine.set_plan(plan_of(shape))
    texts(engine, requests)
    assert engine._graphs is not None
    return {reason: count for reason, count in engine._graphs.eager.items() if reason != EagerReason.PREFILL}


def test_plain_and_drafted_steps_have_graphs() -> None:
    for shape in ("none", "chain:3", "tree:2,2,1"):
        assert eager_steps(shape, [submit(0, sampled=True, tokens=12)]) == {}


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
