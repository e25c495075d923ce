"""Plans, requests and drafts of the lossless tests, and the acceptance that they compare."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import structs

from specdecode_worker.contract import Plan, PlanRow, Report, TaskMatch, TreeShape
from specdecode_worker.core.messages import Submit
from support import small_llama

DRAFTS = (
    "eagle3",
    "peagle",
    "dflash",
    "eagle",
    "medusa",
    "draft-model",
    "ngram",
    "ngram-blind",
    "suffix",
    "own-eagle3",
    "own-model",
)
"""Drafts of the small random model that every kind of request is tested with."""


def plan_of(shapes: Sequence[TreeShape], **fields: object) -> Plan:
    """Return a plan in which task ``t<i>`` runs the i-th shape at any load."""
    rows = tuple(
        PlanRow(concurrency=bucket, context=0, task=f"t{i}", shape=shape)
        for bucket in range(6)
        for i, shape in enumerate(shapes)
    )
    tasks = tuple(TaskMatch(name=f"t{i}") for i in range(len(shapes)))
    defaults = {"draft": "d", "version": 1, "rows": rows, "tasks": tasks, "explore": 0, "guard": False}
    return Plan.model_validate(defaults | fields)


def submit(index: int, *, sampled: bool, tokens: int, shapes: int = 1) -> Submit:
    """Return request ``index`` of the small Llama, with a prompt of one token or more, for one of these shapes."""
    made = small_llama.submit(index, sampled=sampled, tokens=tokens, least=1)
    return structs.replace(made, task=f"t{index % shapes}")


def acceptance(report: Report) -> Any:
    """Return the drafts, the accepted tokens, and the counts of ranks in an order of their own."""
    cells = sorted((cell.depth, cell.parent, cell.sampled, cell.ranks) for cell in report.acceptance)
    return report.drafts, report.accepted_tokens, cells
