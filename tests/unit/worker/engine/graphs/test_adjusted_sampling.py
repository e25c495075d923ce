"""A calibrated draft proposes the same from adjusted logits in graphs as in eager steps."""

from __future__ import annotations

from typing import Any

import torch

from specdecode_worker.engine.cuda_graphs import EagerBackend
from support.small_llama import engine_of, networks, plan_of, submit, texts

SHARPNESS = (3.0, 0.25)


def served(*, graphs: bool) -> tuple[Any, int, int]:
    """Return the texts of greedy and sampled requests with a bias, and the counts of drafts and accepted tokens."""
    engine = engine_of(networks(torch.float64), backend=EagerBackend() if graphs else None)
    drafter: Any = engine._drafts.paged()[""]
    drafter._ranking._sharpness = SHARPNESS
    engine.set_plan(plan_of("chain:3"))
    requests = [submit(i, sampled=i % 2 == 0, tokens=40, logit_bias=((5, 4.0), (9, 3.0))) for i in range(4)]
    answers = texts(engine, requests)
    assert engine._graphs is None or set(engine._graphs.eager) == {"prefill"}
    report = engine.report()
    return answers, report.drafts, report.accepted_tokens


def test_proposals_are_those_of_eager_steps() -> None:
    assert served(graphs=True) == served(graphs=False)
