"""Reading back a launched step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from specdecode_worker.contract import TreeShape
from specdecode_worker.core.device_state import HostCopy
from specdecode_worker.core.request import Choice, Row
from specdecode_worker.engine.stats import step_size_of
from specdecode_worker.engine.target import LaunchedStep, QueuedRows, RowLogprobs
from specdecode_worker.sampling.trees import tree_of
from support.worker.small_engine import request

TREE = tree_of(TreeShape.chain(2))
ROWS = (Row(request("a"), 3, TREE), Row(request("b"), 4, start=0), Row(request("c"), 2, start=0, emits=False))
RANKED = torch.arange(2 * 3 * 2).view(2, 3, 2)


# emitted tokens, path, ranks and the number of accepted nodes
COLUMNS_BC = torch.tensor([[4, 5, -1, 1, -1, 0, 8, -1, 1], [0, -1, -1, -1, -1, -1, -1, -1, 0]])


def launched(*parts: QueuedRows, **change: Any) -> LaunchedStep:
    fields: dict[str, Any] = {
        "rows": ROWS,
        "parts": parts or (QueuedRows(rows=ROWS, outcome_BC=COLUMNS_BC, ranked_BNK=RANKED, draft_seconds=1.0),),
        "epochs": (0, 0, 0),
        "choice": Choice(),
        "size": step_size_of(ROWS, 2),
        "depth_limits": (2, 0),
        "began_seconds": 0.0,
    }
    return LaunchedStep(**{**fields, **change})


def test_emitting_rows_are_read_without_padding() -> None:
    row_results = launched().read()
    assert [(read.tokens, read.path, read.ranks, read.depth_limit) for read in row_results] == [
        ([4, 5], [1, -1], [0, 8, -1], 2),
        ([0], [-1, -1], [-1, -1, -1], 0),
    ]


def test_rankings_are_those_of_decoding_rows() -> None:
    assert [read.ranked_NK for read in launched().read()] == [RANKED[0].tolist(), None]
    part = QueuedRows(rows=ROWS, outcome_BC=COLUMNS_BC)
    assert [read.ranked_NK for read in launched(part).read()] == [None, None]


def logprobs_of(*rows: int) -> RowLogprobs:
    """Return logprobs of one token in each of the rows; the token is ten times the row."""
    tokens = 10 * torch.tensor(rows)
    own, top = torch.zeros(len(rows)), torch.zeros(len(rows), 1)
    tops, counts, ranks = dict.fromkeys(rows, 1), [1] * len(rows), torch.ones_like(tokens)
    return RowLogprobs(tops, counts, tokens, own, ranks, tokens[:, None], top, HostCopy())


def test_parts_of_a_step_are_read_in_the_order_of_its_rows() -> None:
    """The first part is the decoding row, the second part has the two chunks, one of which chose a token."""
    decoding = QueuedRows(rows=ROWS[:1], outcome_BC=COLUMNS_BC[:1], output_logprobs=logprobs_of(0), draft_seconds=0.5)
    chunks = QueuedRows(
        rows=ROWS[1:], outcome_BC=COLUMNS_BC[1:], output_logprobs=logprobs_of(0), prompt_logprobs=logprobs_of(0, 1)
    )
    step = launched(decoding, chunks, depth_limits=(2, 7), shadow_passes=1)
    assert [(read.tokens, read.depth_limit, len(read.logprobs)) for read in step.read()] == [
        ([4, 5], 2, 1),
        ([0], 7, 1),
    ]
    assert {row: [entry.token for entry in read] for row, read in step.read_prompts().items()} == {1: [0], 2: [10]}
    assert step.shadow_seconds == 0.25


@pytest.mark.parametrize(("passes", "shadow", "seconds"), [(5, 2, 0.4), (1, 0, 0.0), (1, 1, 1.0), (0, 0, 0.0)])
def test_shadow_passes_take_their_share_of_drafting(passes: int, shadow: int, seconds: float) -> None:
    step = launched(size=step_size_of(ROWS, passes), shadow_passes=3)
    assert replace(step, shadow_passes=shadow).shadow_seconds == pytest.approx(seconds)


def test_a_step_without_emitting_rows_has_no_results() -> None:
    assert launched(QueuedRows(rows=ROWS)).read() == []
