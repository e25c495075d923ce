"""Graph keys: the steps that share a graph, and the steps that run eagerly."""

from __future__ import annotations

import pytest
import torch

from specdecode_worker.contract import EngineConfig, TreeShape
from specdecode_worker.engine.cuda_graphs import EagerBackend
from specdecode_worker.engine.memory import graph_rows
from specdecode_worker.engine.step_tables import (
    GraphKey,
    key_of,
    key_outside,
    row_buckets,
)
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
