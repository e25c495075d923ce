"""A replayed step over static tensors emits the same text and accepts the same drafts as an eager step.

Graphs run through EagerBackend here, which repeats exactly the calls that a CUDA graph would hold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from specdecode_worker.contract import DraftState, Report, SyntheticKnobs, TaskMatch, TreeShape
from specdecode_worker.engine.drafts.draft_registry import LoadedDraft
from specdecode_worker.engine.engine import Engine
from specdecode_worker.engine.ipc.messages import Submit
from specdecode_worker.engine.step.device_state import STATE_RING_POSITIONS

BUCKETS = (1, 2, 4, 8)
CHAIN, TREE, NONE = TreeShape.chain(3), TreeShape.parse("tree:2,2,1"), TreeShape(())
TOKENS = 24

Text = dict[str, list[int]]
SAMPLED = pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "seeded"])


def serve(
    engine: Engine,
    requests: Sequence[Submit],
    every: int,
    between: Callable[[Engine, int], None] | None = None,
    called_steps: int = 60,
) -> Text:
    """Run the requests, one more every ``every`` steps, so that the batch grows and shrinks through the buckets.

    ``between`` is called before each of the first ``called_steps`` steps.
    """
    tokens_by_request: Text = {request.request_id: [] for request in requests}
    coming, steps = list(reversed(requests)), 0
    while coming or not engine.idle:
        if coming and steps % every == 0:
            engine.add(coming.pop())
        steps += 1
        if between is not None and steps < called_steps:
            between(engine, steps)
        for new in engine.step():
            tokens_by_request[new.request_id] += new.tokens
    engine.check()
    return tokens_by_request


@pytest.fixture
def plain(make_engine: Any, lossless: Any) -> Callable[[Sequence[Submit]], Text]:
    """Return a function that decodes with an engine without draft and graphs.

    test_engine compares that engine with dense passes.
    """
    _, _, texts = lossless
    return lambda requests: texts(make_engine(None), requests)


def acceptance(report: Report) -> Any:
    cells = sorted((cell.depth, cell.parent, cell.sampled, cell.ranks) for cell in report.acceptance)
    return report.drafts, report.accepted_tokens, cells


@SAMPLED
@pytest.mark.parametrize(
    ("draft", "shape"),
    [("copy", NONE), ("copy", CHAIN), ("copy", TREE), ("eagle3", CHAIN), ("draft-model", CHAIN)],
    ids=str,
)
def test_growing_and_shrinking_batches(
    make_engine: Any, lossless: Any, plain: Any, draft: str, shape: TreeShape, sampled: bool
) -> None:
    plan_of, submit, _ = lossless
    requests = [submit(i, sampled=sampled, tokens=TOKENS) for i in range(7)]
    reports = []
    for graphs in (BUCKETS, ()):
        engine = make_engine(draft, graphs=graphs)
        engine.set_plan(plan_of([shape]))
        assert serve(engine, requests, every=3) == plain(requests)
        reports.append(acceptance(engine.report()))
        if graphs:
            made = engine._graphs
            assert made.replayed > sum(made.eager.values())
            assert set(made.eager) <= {"prefill", "catch-up"}
            assert {key.rows for key in made._graphs} == set(BUCKETS)
    assert reports[0] == reports[1]


@pytest.mark.parametrize(
    "shapes",
    [(NONE, NONE), (CHAIN, NONE), (NONE, TREE), (CHAIN, TREE)],
    ids=["plain", "the first drafts", "the second drafts", "both draft"],
)
@pytest.mark.parametrize("kinds", [("copy", "eagle3"), ("eagle3", "draft-model")], ids=str)
def test_several_loaded_drafts_keep_graphs(
    make_engine: Any, lossless: Any, plain: Any, kinds: tuple[str, str], shapes: Sequence[TreeShape]
) -> None:
    """Steps in which at most one of the drafts runs are replayed, rows of the other draft among them."""
    plan_of, submit, _ = lossless
    requests = [submit(i, sampled=i % 2 == 0, tokens=TOKENS, shapes=2) for i in range(7)]
    tasks = tuple(TaskMatch(name=f"t{i}", draft="d1" if i else None) for i in range(2))
    acceptances = []
    for graphs in (BUCKETS, ()):
        engine = make_engine(list(kinds), graphs=graphs)
        engine.set_plan(plan_of(shapes, tasks=tasks))
        assert serve(engine, requests, every=3) == plain(requests)
        acceptances.append(acceptance(engine.report()))
        if graphs:
            made = engine._graphs
            assert made.replayed > sum(made.eager.values()) or NONE not in shapes
            assert set(made.eager) <= {"prefill", "catch-up"} | ({"draft"} if NONE not in shapes else set())
            assert {key.draft for key in made._graphs} == ({"", "d1"} if set(shapes) != {NONE} else {""})
    assert acceptances[0] == acceptances[1]


@pytest.mark.parametrize("draft", ["copy", "eagle3", "draft-model", "foreign-model"])
def test_all_features_together(make_engine: Any, lossless: Any, plain: Any, draft: str) -> None:
    """The text is the same with all features combined.

    Chains, trees and plain rows in one batch, greedy and seeded, pipelined steps, prompt chunks, preemptions and prefix
    cache hits.
    """
    plan_of, submit, _ = lossless
    shapes = [CHAIN, TREE, NONE, TreeShape.chain(1)]
    requests = [submit(i, sampled=i % 2 == 0, tokens=20, shapes=4) for i in range(6)]
    wanted = plain(requests)
    engine = make_engine(draft, max_num_seqs=6, blocks=60, budget=48, pipelined=True, graphs=(2, 4, 6))
    engine.set_plan(plan_of(shapes))
    for _ in range(2):
        assert serve(engine, requests, every=2, between=preempt_every_six_steps) == wanted
    report, made = engine.report(), engine._graphs
    assert engine.preemptions > 5
    assert report.prefix_hit_tokens > 0
    assert report.accepted_tokens > 0
    assert made.replayed > 10
    assert len({key.tokens for key in made._graphs}) > 2


def preempt_every_six_steps(engine: Engine, step: int) -> None:
    """Preempt a running request every six steps."""
    scheduler = engine._scheduler
    if step % 6 == 5 and scheduler.running:
        scheduler._preempt(scheduler.running[step % len(scheduler.running)])


@SAMPLED
def test_steps_without_a_graph_run_eagerly(make_engine: Any, lossless: Any, plain: Any, sampled: bool) -> None:
    """Steps with penalties or logprobs run eagerly, other steps are replayed, and the text is the same."""
    plan_of, submit, _ = lossless
    requests = [submit(i, sampled=sampled, tokens=12 if i % 2 else 40) for i in range(6)]
    asked = [
        Submit(
            request_id=one.request_id,
            prompt=one.prompt,
            sampling=_changed_sampling(one, {1: {"presence_penalty": 1.0}, 3: {"logprobs": 2}}.get(i, {})),
            task=one.task,
        )
        for i, one in enumerate(requests)
    ]
    engine = make_engine("copy", graphs=BUCKETS)
    engine.set_plan(plan_of([TREE]))
    assert serve(engine, asked, every=4) == plain(asked)
    made = engine._graphs
    assert made.eager["processors"] > 0
    assert made.eager["logprobs"] > 0
    assert made.replayed > 0


def _changed_sampling(one: Submit, changed: dict[str, Any]) -> Any:
    import msgspec

    return msgspec.structs.replace(one.sampling, **changed)


def test_knobs_guard_and_exploration_do_not_change_the_text(make_engine: Any, lossless: Any, plain: Any) -> None:
    plan_of, submit, texts = lossless
    engine = make_engine("copy", graphs=BUCKETS)
    engine.set_plan(plan_of([CHAIN], guard=True, explore=0.5, max_depth=6))
    engine.set_synthetic(SyntheticKnobs(acceptance=(0.8, 0.5)))
    requests = [submit(i, sampled=i % 2 == 0, tokens=TOKENS) for i in range(8)]
    assert texts(engine, requests) == plain(requests)
    assert engine._graphs.replayed > 0


@pytest.mark.parametrize("draft", ["peagle", "dflash"])
@pytest.mark.parametrize("pipelined", [False, True], ids=["direct", "pipelined"])
def test_parallel_draft_with_captured_plain_steps(
    make_engine: Any, lossless: Any, plain: Any, pipelined: bool, draft: str
) -> None:
    """Steps that a parallel draft takes part in run eagerly, plain steps are replayed, and the draft keeps up."""
    plan_of, submit, texts = lossless
    drafting = [submit(i, sampled=i % 2 == 0, tokens=30, shapes=2) for i in (0, 2, 4)]
    alone = submit(1, sampled=True, tokens=150, shapes=2)
    engine = make_engine(draft, graphs=BUCKETS, pipelined=pipelined)
    engine.set_plan(plan_of([CHAIN, NONE]))
    made, lags = engine._graphs, []
    assert texts(engine, drafting) == plain(drafting)
    assert engine.report().accepted_tokens > 0
    assert made.eager["draft"] > 0

    def note_lag(engine: Engine, _: int) -> None:
        lags.extend(request.draft.lag for request in engine._scheduler.running)

    assert serve(engine, [alone], every=1, between=note_lag, called_steps=150) == plain([alone])
    assert made.replayed > 100
    assert {key.passes for key in made._graphs} == {0}
    assert max(lags) <= STATE_RING_POSITIONS, "a draft that lags further loses its keys"


def test_draft_swap_discards_the_old_drafts_graphs(make_engine: Any, lossless: Any, plain: Any, drafter: Any) -> None:
    plan_of, submit, _ = lossless
    engine = make_engine("eagle3", graphs=BUCKETS, pipelined=True)
    requests = [submit(i, sampled=i % 2 == 0, tokens=60) for i in range(4)]
    tokens_by_request: Text = {request.request_id: [] for request in requests}
    engine.set_plan(plan_of([CHAIN]))
    for request in requests:
        engine.add(request)
    steps = 0
    while not engine.idle:
        new = engine.step()
        steps += 1
        if steps == 8:
            assert len(engine._graphs) > 0
            new += engine.set_draft("", LoadedDraft(drafter(engine, "draft-model"), DraftState(hash="new")))
            assert len(engine._graphs) == 0
            engine.set_plan(plan_of([CHAIN], version=2, draft="new"))
        for tokens in new:
            tokens_by_request[tokens.request_id] += tokens.tokens
    assert tokens_by_request == plain(requests)
    assert {cell.draft for cell in engine.report().acceptance} == {"d", "new"}
