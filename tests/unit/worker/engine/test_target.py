"""Queueing of a step, reading it back, copies between device and host, which do not block, and synthetic knobs."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import specdecode_worker
from specdecode_worker.contract import StepTime, SyntheticKnobs, TreeShape
from specdecode_worker.core import device_state
from specdecode_worker.core.device_state import DeviceState, HostCopy
from specdecode_worker.core.request import Choice, Request, Row
from specdecode_worker.engine import engine as step_launcher
from specdecode_worker.engine.stats import step_size_of
from specdecode_worker.engine.target import LaunchedStep, QueuedRows, RowLogprobs, Synthetic, upload_rows
from specdecode_worker.sampling.trees import tree_of
from support.small_llama import engine_of, networks, plan_of, submit
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


CPU = torch.device("cpu")


def running(slot: int, blocks: list[int]) -> Request:
    request = Request.of(submit(slot, sampled=False, tokens=9), (), arrived_seconds=0.0)
    request.slot, request.blocks = slot, blocks
    return request


def test_new_blocks_are_appended_to_the_tables_of_their_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []
    right = device_state.to_device
    monkeypatch.setattr(device_state, "to_device", lambda *args: (sent.append(args[0]), right(*args))[1])
    state, requests = DeviceState(3, 256, torch.float32, CPU), [running(2, [5]), running(0, [7, 8]), running(1, [3])]
    rows = [Row(request, 1) for request in requests]
    upload_rows(state, rows)
    requests[0].blocks += [9, 4]
    requests[2].blocks += [6]
    upload_rows(state, rows)
    upload_rows(state, rows)
    assert [state.block_table_SM[slot, :4].tolist() for slot in range(3)] == [[7, 8, 0, 0], [3, 6, 0, 0], [5, 9, 4, 0]]
    assert sent == [[[2, 0, 0, 1], [0, 0, 1, 0], [5, 7, 8, 3]], [[2, 2, 1], [1, 2, 1], [9, 4, 6]]]


def test_the_first_token_is_copied_before_the_draft_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(networks(torch.float64))
    engine.set_plan(plan_of("chain:3"))
    order: list[str] = []
    follows, copied = engine._drafts.prefill, step_launcher.to_host

    def prefill(*args: Any) -> None:
        order.append("draft")
        follows(*args)

    def leaves(*args: Any, **named: Any) -> Any:
        order.append("token")
        return copied(*args, **named)

    monkeypatch.setattr(engine._drafts, "prefill", prefill)
    monkeypatch.setattr(step_launcher, "to_host", leaves)
    engine.add(submit(0, sampled=False, tokens=4))
    [first] = engine.step()
    assert len(first.tokens) == 1
    assert order == ["token", "draft"]


STEPS = ("engine", "drafts", "core", "sampling")
"""Packages with code that runs in every step."""


def waiting_copies(source: str) -> list[int]:
    """Return the lines that create a tensor from host values directly on a device.

    Such a copy waits for all queued work.
    """
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    makers = {"torch.tensor", "torch.as_tensor"}
    return [
        call.lineno
        for call in calls
        if ast.unparse(call.func) in makers and any(keyword.arg == "device" for keyword in call.keywords)
    ]


TENSOR_NAME = re.compile(r".*_[A-Z0-9]+$")
"""Names of tensors end in the letters of their dimensions."""


def assigned_numbers(source: str) -> list[int]:
    """Return the lines that assign a number of the host to elements of a tensor.

    Before torch 2.15 such an assignment to one element copies from pageable memory; ``fill_`` never does.
    """
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Assign) and _is_tensor(node.targets[0]) and _is_number(node.value)
    ]


def _is_tensor(target: ast.expr) -> bool:
    return isinstance(target, ast.Subscript) and TENSOR_NAME.match(ast.unparse(target.value)) is not None


def _is_number(value: ast.expr) -> bool:
    """Return whether the value is a constant or has a name that is not a tensor's."""
    named = isinstance(value, (ast.Name, ast.Attribute)) and not TENSOR_NAME.match(ast.unparse(value))
    return named or (
        isinstance(value, (ast.Constant, ast.BinOp, ast.UnaryOp)) and not TENSOR_NAME.search(ast.unparse(value))
    )


def test_steps_copy_only_from_pinned_memory() -> None:
    assert waiting_copies("def f(d):\n  return torch.tensor([1], device=d)") == [2], "the search finds what it is for"
    assert assigned_numbers("a_S[1] = end\na_S[1] = 3\na_S[0] = b_S\nself.a_S[s] = -1\na[1] = 1") == [1, 2, 4]
    package = Path(specdecode_worker.__file__).parent
    sources = [path for name in STEPS for path in (package / name).rglob("*.py")]
    assert len(sources) > 35
    assert {str(path): lines for path in sources if (lines := waiting_copies(path.read_text()))} == {}
    assert {str(path): lines for path in sources if (lines := assigned_numbers(path.read_text()))} == {}


@pytest.mark.parametrize(
    "knobs", [None, SyntheticKnobs(), SyntheticKnobs(acceptance=()), SyntheticKnobs(acceptance=(1,))]
)
def test_nothing_is_cut_without_an_acceptance_below_one(knobs: SyntheticKnobs | None) -> None:
    assert all(Synthetic(knobs).draw_depth_limit(depth) == depth for depth in range(17))


def test_each_depth_has_its_acceptance_and_the_last_entry_repeats() -> None:
    synthetic = Synthetic(SyntheticKnobs(acceptance=(0.9, 0.5)), seed=5)
    depths = [synthetic.draw_depth_limit(4) for _ in range(20_000)]
    reached = [sum(depth >= level for depth in depths) for level in range(5)]
    chances = [after / before for before, after in pairwise(reached)]
    assert chances == pytest.approx([0.9, 0.5, 0.5, 0.5], abs=0.02)


def test_a_task_has_a_profile_of_its_own() -> None:
    synthetic = Synthetic(SyntheticKnobs(acceptance=(1.0, 0.0, 1.0), task_acceptance={"prose": (0.0,), "code": ()}))
    assert synthetic.cuts
    assert (
        synthetic.draw_depth_limit(4),
        synthetic.draw_depth_limit(4, "prose"),
        synthetic.draw_depth_limit(4, "code"),
    ) == (1, 0, 4)
    alone = Synthetic(SyntheticKnobs(task_acceptance={"prose": (0.0,)}))
    assert alone.cuts
    assert (alone.draw_depth_limit(4), alone.draw_depth_limit(4, "prose")) == (4, 0)


STEP_TIMES = (
    StepTime(max_sequences=1, max_nodes=0, seconds=0.1),
    StepTime(max_sequences=4, max_context=100, seconds=0.2),
    StepTime(seconds=0.3),
)


@pytest.mark.parametrize(
    ("size", "seconds"),
    [((1, 0, 5000), 0.1), ((1, 1, 100), 0.2), ((4, 9, 100), 0.2), ((4, 9, 101), 0.3), ((5, 0, 1), 0.3)],
)
def test_a_step_is_padded_by_the_first_matching_row(size: tuple[int, int, int], seconds: float) -> None:
    assert Synthetic(SyntheticKnobs(step_time=STEP_TIMES)).least_seconds(*size) == seconds


def test_a_step_without_a_matching_row_is_not_padded() -> None:
    assert Synthetic(SyntheticKnobs(step_time=STEP_TIMES[:2])).least_seconds(9, 9, 9) == 0
    assert Synthetic().least_seconds(9, 9, 9) == 0


def test_knobs_of_a_draft_replace_the_others_while_it_runs() -> None:
    slow = SyntheticKnobs(step_time=(StepTime(seconds=0.5),), task_acceptance={"prose": (0.0,)})
    synthetic = Synthetic(SyntheticKnobs(step_time=STEP_TIMES, by_draft={"new": slow}))
    assert synthetic.cuts
    assert (synthetic.draw_depth_limit(4, "prose", "new"), synthetic.draw_depth_limit(4, "prose", "old")) == (0, 4)
    assert synthetic.least_seconds(1, 0, 1, ["old", "old"]) == 0.1
    assert synthetic.least_seconds(1, 0, 1, ["old", "new"]) == 0.5
