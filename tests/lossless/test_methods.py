"""Every draft method emits the text of plain decoding: alone, in a batch, with other methods, and when swapped.

Plain text comes from the engine without a draft, which test_engine compares with dense passes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from specdecode_worker.contract import FEATURES, DraftState, TaskMatch, TreeShape, draft_passes
from specdecode_worker.drafts.base import LoadedDraft
from support.lossless.small_requests import DRAFTS, plan_of, submit
from support.small_llama import texts
from support.tiers import by_effort

METHODS = (*DRAFTS, "suffix-blind")
PIPELINED = [(method, True) for method in METHODS if method not in ("ngram", "suffix")]
"""Nothing is foreseen for the other two while steps are launched ahead."""
LEAST = {"draft-model": 1.5}
"""Minimum tokens per step for the test of a method to be meaningful. Other methods only need some accepted tokens."""
SHAPES = {"chain": "chain:4", "tree": "tree:3,2,1,1"}
MIX = [
    TreeShape.parse(text) for text in ("none", "chain:1", "chain:6", "tree:4,2,1", "tree:8", "tree:2,2,2", "chain:3")
]
TOKENS = 40


def single_shapes() -> Iterator[Any]:
    """Yield (method, batch, shape, sampled): all shapes for requests together, and one of two for one at a time."""
    every = [(shape, sampled) for shape in SHAPES for sampled in (False, True)]
    for number, method in enumerate(METHODS):
        # A draft on a device of its own is a process, which is too slow for the core.
        marks = () if method.startswith("own") else pytest.mark.core
        for shape, sampled in every:
            name = f"{method}-{shape}-{'sampled' if sampled else 'greedy'}"
            yield pytest.param(method, 8, shape, sampled, marks=marks, id=f"{name}-8")
            if by_effort(quick=False, full=sampled == number % 2, nightly=True) and (shape == "tree") == sampled:
                yield pytest.param(method, 1, shape, sampled, id=f"{name}-1")


@pytest.mark.parametrize(("method", "batch", "shape", "sampled"), list(single_shapes()))
def test_single_shape_equals_plain_decoding(
    make_engine: Any, plain: Any, method: str, batch: int, shape: str, sampled: bool
) -> None:
    engine = make_engine(method, max_num_seqs=batch, plan=plan_of([TreeShape.parse(SHAPES[shape])]))
    requests = [submit(i, sampled=sampled, tokens=TOKENS) for i in range(8)]
    assert texts(engine, requests) == plain(requests)
    report = engine.report()
    assert report.accepted_tokens > 0
    assert 1 + report.accepted_tokens / report.drafts >= LEAST.get(method, 1.0)


@pytest.mark.parametrize(("method", "pipelined"), [(method, False) for method in METHODS] + PIPELINED)
def test_mixed_shapes_equal_plain_decoding(make_engine: Any, plain: Any, method: str, pipelined: bool) -> None:
    """The text is the same with few slots and blocks, prompt chunks and a different shape for every request."""
    engine = make_engine(method, max_num_seqs=5, blocks=24, budget=40, pipelined=pipelined, plan=plan_of(MIX))
    requests = [submit(i, sampled=i % 2 == 0, tokens=TOKENS, shapes=len(MIX)) for i in range(14)]
    assert texts(engine, requests) == plain(requests)
    assert engine.report().accepted_tokens > 0


@pytest.mark.parametrize("first", ["eagle3", "peagle", "dflash"])
@pytest.mark.parametrize("pipelined", [False, True], ids=["", "pipelined"])
def test_different_draft_for_each_task(make_engine: Any, plain: Any, pipelined: bool, first: str) -> None:
    """Three methods draft in one batch, each for its own tasks, and accepted tokens are counted for the right draft."""
    engine = make_engine([first, "draft-model", "ngram-blind"], pipelined=pipelined)
    tasks = tuple(TaskMatch(name=f"t{i}", draft=draft) for i, draft in enumerate((None, "d1", "d2", "unknown")))
    engine.set_plan(plan_of([MIX[3], MIX[2], MIX[6], MIX[1]], tasks=tasks))
    requests = [submit(i, sampled=i % 2 == 0, tokens=TOKENS, shapes=4) for i in range(12)]
    assert texts(engine, requests) == plain(requests)
    drafts_by_task = {(cell.task, cell.draft) for cell in engine.report().acceptance}
    assert drafts_by_task == {("t0", "d"), ("t1", "1"), ("t2", "2"), ("t3", "d")}


@pytest.mark.parametrize("graphs", [(), (2,)], ids=["eager", "graphs"])
def test_a_draft_catches_up_its_own_rows_only(make_engine: Any, graphs: tuple[int, ...]) -> None:
    """A row that paused its draft is not caught up by the draft of another row.

    Its own draft would lack the keys of the tokens in between, and propose worse once the row drafts again.
    """
    tasks = (TaskMatch(name="t0"), TaskMatch(name="t1", draft="d1"))
    other, paused = submit(0, sampled=False, tokens=150, shapes=2), submit(1, sampled=False, tokens=150, shapes=2)
    accepted = []
    for others in ([other], []):
        engine = make_engine(
            ["copy", "copy"], graphs=graphs, plan=plan_of([TreeShape.chain(1), TreeShape(())], tasks=tasks)
        )
        for request in [*others, paused]:
            engine.add(request)
        tokens, last = 0, None
        while not engine.idle:
            for new in engine.step():
                if new.request_id == paused.request_id:
                    tokens, last = tokens + len(new.tokens), new
            if tokens == 70:
                engine.set_plan(plan_of([TreeShape.chain(1), TreeShape.chain(3)], version=2, tasks=tasks))
        accepted.append((last.drafts, last.accepted))
    assert accepted[0] == accepted[1]
    assert accepted[0][1] > 0


@pytest.mark.parametrize("pipelined", [False, True], ids=["", "pipelined"])
@pytest.mark.parametrize(
    ("first", "then"),
    [
        *(("eagle3", then) for then in ("draft-model", "ngram-blind", "copy", "peagle", "dflash", "own-model")),
        ("own-eagle3", "copy"),
    ],
)
def test_draft_swap_during_requests(
    make_engine: Any, plain: Any, drafter: Any, first: str, then: str, pipelined: bool
) -> None:
    """The text is the same when the draft is swapped for another one during all requests, and back."""
    shapes = [MIX[2], MIX[3], MIX[4]]
    engine = make_engine(first, pipelined=pipelined, plan=plan_of(shapes))
    requests = [submit(i, sampled=i % 2 == 0, tokens=90, shapes=3) for i in range(6)]

    def swap(steps: int) -> Any:
        if steps not in (6, 14):
            return ()
        method, name = (then, "new") if steps == 6 else (first, "d")
        emitted = engine.set_draft("", LoadedDraft(drafter(engine, method), DraftState(hash=name)))
        engine.set_plan(plan_of(shapes, version=steps, draft=name))
        return emitted

    assert texts(engine, requests, swap) == plain(requests)
    cells = engine.report().acceptance
    assert {cell.draft for cell in cells} == {"d", "new"}
    hits = sum(sum(cell.ranks[:-1]) for cell in cells if cell.draft == "new" and cell.depth == 1)
    assert hits > 0, "the new draft must have been of use to running requests"


@pytest.mark.parametrize(("method", "passes"), [("eagle3", 4), ("peagle", 1), ("dflash", 1)])
def test_steps_run_and_report_the_passes_of_the_method(
    make_engine: Any, pair: Any, method: Any, passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass reads the weights of the head and of its output matrix once. At most one more runs over the prompt."""
    head, calls = {"eagle3": pair.eagle, "peagle": pair.peagle, "dflash": pair.dflash}[method], Counter[str]()

    def counted(name: str) -> Any:
        run = getattr(head, name)

        def call(*args: Any) -> Any:
            calls[name] += 1
            return run(*args)

        return call

    for name in ("forward", "logits"):
        monkeypatch.setattr(head, name, counted(name))
    engine = make_engine(method, max_num_seqs=1, plan=plan_of([TreeShape.chain(4)]))
    texts(engine, [submit(4, sampled=False, tokens=TOKENS)])
    cells = [cell for cell in engine.report().steps if cell.draft_passes]
    ran = sum(cell.draft_passes * cell.count for cell in cells)
    assert {cell.draft_passes for cell in cells} == {passes} == {draft_passes(method, 4)}
    assert ran == sum(cell.x[FEATURES.index("draft_passes")] for cell in cells) > 10
    assert calls["logits"] == ran
    assert 0 <= calls["forward"] - ran <= 1


@pytest.mark.parametrize(("method", "graphs"), [("peagle", ()), ("dflash", (1, 2, 4, 8))], ids=["eager", "graphs"])
def test_shadow_nodes_of_a_parallel_draft_need_no_further_pass(
    make_engine: Any, method: str, graphs: tuple[int, ...]
) -> None:
    engine = make_engine(method, graphs=graphs, plan=plan_of([TreeShape.chain(1)], explore=0.5, max_depth=2))
    texts(engine, [submit(i, sampled=False, tokens=90) for i in range(8)])
    report = engine.report()
    assert {cell.depth for cell in report.acceptance if sum(cell.ranks)} == {1, 2}
    assert {cell.draft_passes for cell in report.steps} <= {0, 1}
    assert not graphs or set(engine._graphs.eager) == {"prefill"}
