"""A replayed step over static tensors emits the same text and accepts the same drafts as an eager step.

Graphs run through EagerBackend here, which repeats exactly the calls that a CUDA graph would hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from specdecode_worker.contract import DraftState, MergedDraft, TaskMatch, TreeShape
from specdecode_worker.core.device_state import STATE_RING_POSITIONS
from specdecode_worker.drafts.base import LoadedDraft
from specdecode_worker.engine.cuda_graphs import Captured, EagerBackend, Work
from support.lossless.small_requests import acceptance, plan_of, submit
from support.small_llama import texts
from support.tiers import covering
from support.worker.watched_steps import WatchingBackend

BUCKETS = (1, 2, 4, 8)
CHAIN, TREE, NONE = TreeShape.chain(3), TreeShape.parse("tree:2,2,1"), TreeShape(())
TOKENS = 24


@pytest.mark.parametrize(
    ("draft", "shape", "sampled"),
    [
        *covering(["copy", "medusa", "peagle", "dflash"], [NONE, CHAIN, TREE], [False, True]),
        ("eagle3", CHAIN, True),
        ("draft-model", CHAIN, False),
        ("medusa", TreeShape.chain(6), True),
    ],
    ids=str,
)
def test_growing_and_shrinking_batches(
    make_engine: Any, plain: Any, draft: str, shape: TreeShape, sampled: bool
) -> None:
    requests = [submit(i, sampled=sampled, tokens=TOKENS) for i in range(7)]
    reports = []
    for graphs in (BUCKETS, ()):
        engine = make_engine(draft, graphs=graphs, plan=plan_of([shape]))
        assert texts(engine, requests, every=3) == plain(requests)
        reports.append(acceptance(engine.report()))
        if graphs:
            made = engine._graphs
            assert made.replayed > sum(made.eager.values())
            assert made.eager == {"prefill": 1}, "the first prompt; the others run beside a graph"
            assert made.mixed == len(requests) - 1
            assert {key.rows for key in made._graphs} == set(BUCKETS)
            assert not set(made.outside) - {"catch-up"}, "all methods here draft in the graph"
    assert reports[0] == reports[1]


@pytest.mark.parametrize(
    "shapes",
    [(NONE, NONE), (CHAIN, NONE), (NONE, TREE), (CHAIN, TREE)],
    ids=["plain", "the first drafts", "the second drafts", "both draft"],
)
@pytest.mark.parametrize("kinds", [("copy", "eagle3"), ("eagle3", "draft-model"), ("dflash", "peagle")], ids=str)
def test_several_loaded_drafts_keep_graphs(
    make_engine: Any, plain: Any, kinds: tuple[str, str], shapes: Sequence[TreeShape]
) -> None:
    """Steps are replayed with the passes of all drafts that run in them."""
    requests = [submit(i, sampled=i % 2 == 0, tokens=TOKENS, shapes=2) for i in range(7)]
    tasks = tuple(TaskMatch(name=f"t{i}", draft="d1" if i else None) for i in range(2))
    acceptances = []
    for graphs in (BUCKETS, ()):
        engine = make_engine(list(kinds), graphs=graphs, plan=plan_of(shapes, tasks=tasks))
        assert texts(engine, requests, every=3) == plain(requests)
        acceptances.append(acceptance(engine.report()))
        if graphs:
            made = engine._graphs
            assert made.replayed > sum(made.eager.values())
            assert set(made.eager) <= {"prefill"}
            assert not set(made.outside) - {"catch-up"}
            ran = {name for key, graph in made._graphs.items() if graph.replays for name in key.drafts}
            assert ran == {name for name, shape in zip(("", "d1"), shapes, strict=True) if shape != NONE}
            both = any(len(key.drafts) == 2 and graph.replays for key, graph in made._graphs.items())
            assert both == (NONE not in shapes)
    assert acceptances[0] == acceptances[1]


@pytest.mark.core
@pytest.mark.parametrize("draft", ["copy", "eagle3", "draft-model", "medusa", "peagle", "dflash"])
def test_all_features_together(make_engine: Any, plain: Any, draft: str) -> None:
    """Chains, trees and plain rows, greedy and seeded, pipelined steps, prompt chunks, preemptions and cache hits."""
    shapes = [CHAIN, TREE, NONE, TreeShape.chain(1)]
    requests = [submit(i, sampled=i % 2 == 0, tokens=20, shapes=4) for i in range(6)]
    wanted = plain(requests)
    engine = make_engine(
        draft, max_num_seqs=6, blocks=60, budget=48, pipelined=True, graphs=(2, 4, 6), plan=plan_of(shapes)
    )
    scheduler = engine._scheduler

    def preempt(steps: int) -> None:
        if steps % 6 == 4 and steps < 60 and scheduler.running:
            scheduler._preempt(scheduler.running[steps % len(scheduler.running)])

    for _ in range(2):
        assert texts(engine, requests, preempt, every=2) == wanted
    report, made = engine.report(), engine._graphs
    assert engine.report().preemptions > 5
    assert report.prefix_hit_tokens > 0
    assert report.accepted_tokens > 0
    assert made.replayed > 10
    assert len({key.tokens for key in made._graphs}) > 2


@pytest.mark.parametrize("pipelined", [False, True], ids=["direct", "pipelined"])
@pytest.mark.parametrize("draft", ["ngram-blind", "suffix-blind", "own-eagle3", "own-model"])
def test_other_methods_draft_before_the_graph(make_engine: Any, plain: Any, draft: str, pipelined: bool) -> None:
    """Methods whose passes are not captured draft before the graph; text and acceptance equal those of eager steps."""
    requests = [submit(i, sampled=i % 2 == 0, tokens=TOKENS, shapes=3) for i in range(7)]
    acceptances = []
    for graphs in (BUCKETS, ()):
        engine = make_engine(draft, graphs=graphs, pipelined=pipelined, plan=plan_of([CHAIN, TREE, NONE]))
        assert texts(engine, requests, every=3) == plain(requests)
        acceptances.append(acceptance(engine.report()))
        if graphs:
            assert set(engine._graphs.eager) == {"prefill"}
            assert engine._graphs.outside["method"] > 5
    assert acceptances[0] == acceptances[1]
    assert acceptances[0][1] > 0, "drafts must be accepted to test anything"


@pytest.mark.parametrize("drafts", ["peagle", "dflash", ["eagle3", "copy"], ["dflash", "peagle"]], ids=str)
def test_drafts_in_the_step_can_be_captured(make_engine: Any, drafts: Any) -> None:
    """Their passes wait for nothing, and two steps of one key make the same calls over the same tensors."""
    engine, backend = make_engine(drafts, graphs=(2, 4)), WatchingBackend()
    engine._graphs._backend = backend
    tasks = () if isinstance(drafts, str) else (TaskMatch(name="t0", merge=(MergedDraft(draft="d1"),)),)
    engine.set_plan(plan_of([TREE], tasks=tasks))
    texts(engine, [submit(i, sampled=i % 2 == 0, tokens=9 + 3 * i) for i in range(4)])
    assert not set(engine._graphs.outside) - {"catch-up"}
    assert max(map(len, backend.traces)) > 3
    backend.check()


@pytest.mark.parametrize("draft", ["peagle", "dflash"])
@pytest.mark.parametrize("pipelined", [False, True], ids=["direct", "pipelined"])
def test_parallel_draft_with_captured_plain_steps(make_engine: Any, plain: Any, pipelined: bool, draft: str) -> None:
    """A parallel draft catches up before the graph of a plain step."""
    drafting = [submit(i, sampled=i % 2 == 0, tokens=30, shapes=2) for i in (0, 2, 4)]
    alone = submit(1, sampled=True, tokens=150, shapes=2)
    engine = make_engine(draft, graphs=BUCKETS, pipelined=pipelined, plan=plan_of([CHAIN, NONE]))
    made, lags = engine._graphs, []
    assert texts(engine, drafting) == plain(drafting)
    assert engine.report().accepted_tokens > 0
    assert not set(made.outside) - {"catch-up"}

    def note_lag(_: int) -> None:
        lags.extend(request.draft.lag for request in engine._scheduler.running)

    assert texts(engine, [alone], note_lag) == plain([alone])
    assert made.replayed > 100
    assert {key.passes for key in made._graphs} == {0, 3}
    assert made.outside["catch-up"] > 0
    assert max(lags) <= STATE_RING_POSITIONS, "a draft that lags further loses its keys"


class RunningBackend(EagerBackend):
    """Backend that runs the work at its capture, on padding rows alone, as that of CUDA graphs does."""

    def capture(self, work: Work) -> Captured:
        work()
        return Captured(work)


KINDS = {"eagle3": (False, False), "peagle": (True, False), "dflash": (False, True)}
"""Whether the graphs of a method have mask slots behind the roots, and whether they have blocks."""


@pytest.mark.parametrize(("first", "then"), [("eagle3", "dflash"), ("dflash", "peagle"), ("peagle", "eagle3")])
def test_a_swap_captures_no_graph_of_another_kind_of_draft(
    make_engine: Any, plain: Any, drafter: Any, first: str, then: str
) -> None:
    """The most used graphs are captured again, with the passes of the new draft."""
    engine = make_engine(first, graphs=BUCKETS, pipelined=True)
    engine._graphs._backend = RunningBackend()
    engine.set_plan(plan_of([CHAIN]))
    requests = [submit(i, sampled=i % 2 == 0, tokens=60) for i in range(4)]

    def swap(steps: int) -> Any:
        if steps != 8:
            return ()
        assert any(graph.replays for key, graph in engine._graphs._graphs.items() if key.passes)
        emitted = engine.set_draft("", LoadedDraft(drafter(engine, then), DraftState(hash="new")))
        kinds = {(key.catch_up_per_row > 0, key.block) for key in engine._graphs._graphs if key.passes}
        assert kinds <= {KINDS[then]}
        engine.set_plan(plan_of([CHAIN], version=2, draft="new"))
        return emitted

    assert texts(engine, requests, swap) == plain(requests)
    assert {cell.draft for cell in engine.report().acceptance} == {"d", "new"}
