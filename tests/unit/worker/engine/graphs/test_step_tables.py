"""Keys of graphs, and static inputs of a step: tables are those of the last step, and little is copied."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from specdecode_worker.contract import EngineConfig, TreeShape
from specdecode_worker.core.request import Request
from specdecode_worker.engine.cuda_graphs import EagerBackend
from specdecode_worker.engine.memory import graph_rows
from specdecode_worker.engine.step_tables import (
    NO_DRAFTS,
    CatchUp,
    DraftInputs,
    GraphKey,
    StagedTensor,
    StepInputs,
    key_of,
    key_outside,
    row_buckets,
)
from specdecode_worker.sampling.params import Features
from specdecode_worker.sampling.sampler import HostMasks
from specdecode_worker.sampling.trees import PLAIN, given_chain, tree_of
from support.small_llama import engine_of, networks, plan_of, submit, texts

OWN = ("",)
CHAIN, TREE = tree_of(TreeShape.chain(3)), tree_of(TreeShape.parse("tree:3,2,1"))


def test_row_buckets_reach_the_most_rows() -> None:
    assert row_buckets(16) == (1, 2, 4, 8, 16)
    assert row_buckets(21) == (1, 2, 4, 8, 16, 21)
    assert row_buckets(3) == (1, 2, 3)
    assert row_buckets(16, (16, 4, 40)) == (4, 16)


@pytest.mark.parametrize(
    ("changed", "some"),
    [({}, True), ({"enforce_eager": True}, False), ({"sampler": "mss"}, True), ({"tensor_parallel_size": 2}, True)],
)
def test_which_configs_capture_graphs(changed: dict[str, object], some: bool) -> None:
    assert bool(graph_rows(EngineConfig.model_validate(changed))) == some


def test_key_depends_on_buckets_and_not_on_trees() -> None:
    assert key_of(4, [CHAIN] * 3, 1, cuts=False) == GraphKey(4, 4, 3, 1, drafts=OWN)
    assert key_of(4, [PLAIN, CHAIN, CHAIN, CHAIN], 4, cuts=False) == GraphKey(4, 4, 3, 1, drafts=OWN)
    assert key_of(4, [PLAIN], 1, cuts=True) == GraphKey(4, 1, cuts=True)
    assert key_of(4, [TREE, CHAIN], 1, cuts=False) == GraphKey(4, 16, 3, 8, drafts=OWN)
    assert key_of(4, [CHAIN], 7, cuts=False) == GraphKey(4, 7, 3, 1, drafts=OWN), "the draft catches up"
    assert key_of(4, [CHAIN], 65, cuts=False) is None


def test_key_of_a_step_that_is_drafted_before_its_graph() -> None:
    assert key_outside(4, [PLAIN], cuts=False) == GraphKey(4, 1)
    key = key_outside(4, [CHAIN, TREE], cuts=True)
    assert (key.tokens_per_row, key.passes, key.outside, key.depth, key.drafts) == (16, 0, 3, 3, ())
    assert key_outside(2, [given_chain(5)], cuts=False).depth == 6, "forced tokens share a bucket of depths"


def test_graphs_of_the_plan_are_captured_at_once_and_others_after_repeated_use() -> None:
    engine = engine_of(networks(torch.float64), backend=EagerBackend(), rows=(1, 2))
    graphs = engine._graphs
    graphs._capture_after_steps = 3
    engine.set_plan(plan_of("chain:2"))
    tokens = [key.tokens for key in graphs._graphs]
    assert tokens == sorted(tokens, reverse=True), "the largest first"
    assert {(key.rows, key.passes, key.cuts) for key in graphs._graphs} == {
        (rows, passes, cuts) for rows in (1, 2) for passes in (0, 2) for cuts in (False, True)
    }
    texts(engine, [submit(0, sampled=False, tokens=12)])
    assert graphs.eager == {"prefill": 1}
    engine.add(submit(1, sampled=False, tokens=30))
    engine.step()
    engine.set_plan(plan_of("chain:3", version=2))
    before = len(graphs)
    while not engine.idle:
        engine.step()
    assert graphs.eager["new"] == 2, "twice eagerly, then it is captured"
    assert len(graphs) == before + 1


CPU, PADDING_SLOT = torch.device("cpu"), 9
SHORT, SMALL = tree_of(TreeShape.chain(2)), tree_of(TreeShape.levels(2, 1))
KEY = GraphKey(4, 6, passes=2, width=2, cuts=True, drafts=("",), features=Features(adjusts=8, history=64))


def requests(*slots: int, **sampling: Any) -> list[Request]:
    rows = [Request.of(submit(slot, sampled=True, tokens=9, **sampling), (), arrived_seconds=0.0) for slot in slots]
    for slot, request in zip(slots, rows, strict=True):
        request.slot = slot
    return rows


def catch_up(counts: tuple[int, ...], key_starts: tuple[int, ...]) -> DraftInputs:
    return DraftInputs((CatchUp(counts, key_starts),))


BLOCKED = requests(0, 1, min_tokens=4, stop_token_ids=(3,))
STEPS: dict[str, tuple[Any, ...]] = {
    "first": ((SHORT, SHORT), requests(0, 1), catch_up((1, 3), (1, 5)), None),
    "other catch-up": ((SHORT, SHORT), requests(0, 1), catch_up((2, 0), (1, 1)), None),
    "other trees": ((SHORT, SMALL), requests(0, 1), catch_up((1, 3), (1, 5)), None),
    "other slots": ((SHORT, SHORT), requests(1, 0), catch_up((1, 3), (1, 5)), None),
    "other sampling": ((SHORT, SHORT), requests(0, 1, presence_penalty=0.5), catch_up((1, 3), (1, 5)), None),
    "allowed": ((SHORT, SHORT), requests(0, 1, allowed_token_ids=(3, 5)), catch_up((1, 3), (1, 5)), None),
    "blocked": ((SHORT, SHORT), BLOCKED, catch_up((1, 3), (1, 5)), None),
    "fewer rows": ((SMALL,), requests(3), catch_up((4,), (2,)), None),
    "limits": ((SHORT, SHORT), requests(0, 1), catch_up((1, 3), (1, 5)), (0, 2)),
    "plain": ((PLAIN, SHORT, PLAIN), requests(2, 3, 4), catch_up((0, 1, 0), (1, 1, 1)), None),
}


def written(*steps: tuple[Any, ...]) -> dict[str, list[Any]]:
    inputs = StepInputs(KEY, PADDING_SLOT, CPU)
    for step in steps:
        inputs.write(*step)
    return {name: table.tolist() for name, table in inputs.at.items()}


@pytest.mark.parametrize("last", STEPS)
@pytest.mark.parametrize("before", STEPS)
def test_tables_are_those_of_the_last_step(before: str, last: str) -> None:
    assert written(STEPS[before], STEPS[last], STEPS[before], STEPS[last]) == written(STEPS[last])


def test_a_request_whose_parameters_change_is_written_again() -> None:
    (one,) = requests(0, min_tokens=4, stop_token_ids=(3,))
    inputs = StepInputs(KEY, PADDING_SLOT, CPU)
    inputs.write((SHORT,), [one], catch_up((1,), (1,)), None)
    assert inputs.at["min_tokens"][0] == 4
    one.sampling_params = replace(one.sampling_params, min_tokens=0)  # they have been emitted
    inputs.write((SHORT,), [one], catch_up((1,), (1,)), None)
    assert inputs.at["min_tokens"][0] == 0


def test_what_stays_the_same_is_not_copied_again(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[StagedTensor] = []
    queue = StagedTensor.queue
    monkeypatch.setattr(StagedTensor, "queue", lambda self, size=None: (copies.append(self), queue(self, size)))
    drafting, plain = StepInputs(KEY, PADDING_SLOT, CPU), StepInputs(GraphKey(2, 1), PADDING_SLOT, CPU)
    trees, rows, *_ = STEPS["first"]
    counts = []
    for inputs, these in ((drafting, trees), (plain, (PLAIN, PLAIN))):
        for _ in range(3):
            copies.clear()
            inputs.write(these, rows, catch_up((1, 3), (1, 5)), None)
            counts.append(len(copies))
    assert counts == [4, 0, 0, 3, 0, 0]


def test_masks_of_an_earlier_step_are_cleared() -> None:
    inputs = StepInputs(GraphKey(1, 2, features=Features(masks=True)), PADDING_SLOT, CPU)
    for masks in (None, HostMasks([3, 4], np.zeros((2, 1), np.uint32)), None):
        inputs.write((PLAIN,), requests(0), NO_DRAFTS, None, masks)
        assert inputs.at["mask_row"].tolist() == ([0, 0] if masks is None else masks.rows)
