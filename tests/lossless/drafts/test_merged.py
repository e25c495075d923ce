"""Several drafts propose into one tree, and the text stays that of plain decoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec import structs

from specdecode_worker.contract import DraftState, MergedDraft, TaskMatch, TreeShape
from specdecode_worker.drafts.base import LoadedDraft
from specdecode_worker.engine import scheduler as prompt_shares
from specdecode_worker.engine.cuda_graphs import OutsideReason
from support.lossless.small_requests import plan_of, submit
from support.small_llama import texts

MIX = [TreeShape.parse(text) for text in ("chain:3", "tree:3,2,1", "none", "tree:4", "chain:1")]
TOKENS = 40
DRAFTS = {
    "head-lookup": ["copy", "ngram"],
    "head-suffix": ["eagle3", "suffix"],
    "block-lookup": ["dflash", "ngram-blind"],
    "medusa-lookup": ["medusa", "ngram"],
    "model-both": ["draft-model", "ngram", "suffix"],
    "suffix-lookup": ["suffix", "ngram"],
    "two-heads": ["eagle3", "copy"],
    "head-model-lookup": ["eagle3", "draft-model", "ngram"],
    "blocks": ["dflash", "peagle"],
}


def tasks_of(drafts: Sequence[str], count: int = 1, depth: int = 8) -> tuple[TaskMatch, ...]:
    """Return tasks whose trees merge all drafts of an engine."""
    merge = tuple(MergedDraft(draft=f"d{i}", depth=depth) for i in range(1, len(drafts)))
    return tuple(TaskMatch(name=f"t{i}", merge=merge) for i in range(count))


@pytest.mark.parametrize("pipelined", [False, True], ids=["", "pipelined"])
@pytest.mark.parametrize("drafts", DRAFTS.values(), ids=DRAFTS)
def test_mixed_shapes_equal_plain_decoding(make_engine: Any, plain: Any, drafts: list[str], pipelined: bool) -> None:
    """The text is the same with few slots and blocks, prompt chunks and a different shape for every request."""
    requests = [submit(i, sampled=i % 2 == 0, tokens=TOKENS, shapes=len(MIX)) for i in range(10)]
    names = [f"{name}-blind" if pipelined and name in ("ngram", "suffix") else name for name in drafts]
    engine = make_engine(
        names,
        max_num_seqs=5,
        blocks=14,
        budget=40,
        pipelined=pipelined,
        plan=plan_of(MIX, tasks=tasks_of(drafts, len(MIX))),
    )
    assert texts(engine, requests) == plain(requests)
    report = engine.report()
    assert engine.report().preemptions > 0
    assert {cell.draft for cell in report.acceptance} == {"d"}
    hits = {cell.draft: 0 for cell in report.credit}
    for cell in report.credit:
        hits[cell.draft] += sum(cell.ranks[:-1])
    assert set(hits) == {"d", *(f"{i}" for i in range(1, len(drafts)))}
    assert min(hits.values()) > 0


HEADS = {"heads": ["eagle3", "copy"], "blocks": ["dflash", "peagle"], "three": ["draft-model", "medusa", "eagle3"]}
LOOKUPS = {"lookup": ["copy", "ngram-blind"], "suffix": ["eagle3", "suffix-blind"]}


@pytest.mark.parametrize("drafts", [*HEADS, *LOOKUPS])
def test_graphs_run_merged_trees(make_engine: Any, plain: Any, drafts: str) -> None:
    """Several heads draft in the captured step; what looks tokens up proposes before it."""
    requests = [submit(i, sampled=i % 2 == 0, tokens=TOKENS, shapes=2) for i in range(6)]
    reports, emitted = [], [plain(requests)]
    for graphs in ((), (1, 2, 4, 8)):
        names = (HEADS | LOOKUPS)[drafts]
        engine = make_engine(names, graphs=graphs, plan=plan_of(MIX[:2], tasks=tasks_of(names, 2)))
        emitted.append(texts(engine, requests))
        reports.append(engine.report())
        if graphs:
            assert set(engine._graphs.outside) == ({OutsideReason.METHOD} if drafts in LOOKUPS else set())
    assert emitted[1] == emitted[2] == emitted[0]
    assert reports[0].accepted_tokens == reports[1].accepted_tokens > 0
    assert reports[0].acceptance == reports[1].acceptance
    assert reports[0].credit == reports[1].credit


def test_a_draft_that_proposes_alone_gets_credit_in_graphs_too(make_engine: Any) -> None:
    """The other draft of the task cannot propose, for example because it was swapped in and lacks states."""
    requests = [submit(i, sampled=i % 2 == 0, tokens=TOKENS, shapes=2) for i in range(4)]
    reports = []
    for graphs in ((), (1, 2, 4)):
        engine = make_engine(["eagle3", "copy"], graphs=graphs)
        engine._drafts._drafts["d1"].drafter.ready = lambda request: False
        engine.set_plan(plan_of(MIX[:2], tasks=tasks_of(["", ""], 2)))
        texts(engine, requests)
        reports.append(engine.report())
    assert reports[0].credit == reports[1].credit
    assert {cell.draft for cell in reports[1].credit} == {"d"}
    assert not engine._graphs.outside


def test_a_task_that_merges_a_lookup_decodes_plainly_beside_others(make_engine: Any, plain: Any) -> None:
    """The graph has the passes of the others' drafts alone."""
    tasks = (
        TaskMatch(name="t0"),
        TaskMatch(name="t1", draft="d1"),
        TaskMatch(name="t2", merge=(MergedDraft(draft="d2"),)),
    )
    shapes = [TreeShape.parse(text) for text in ("chain:3", "chain:3", "none")]
    engine = make_engine(["eagle3", "copy", "ngram-blind"], graphs=(1, 2, 4, 8), plan=plan_of(shapes, tasks=tasks))
    requests = [submit(i, sampled=i % 2 == 0, tokens=TOKENS, shapes=3) for i in range(6)]
    assert texts(engine, requests) == plain(requests)
    report = engine.report()
    assert report.accepted_tokens > 0
    assert report.credit == ()


def recorded(rank: Any, depths: set[int]) -> Any:
    """Return the function ``rank`` of a drafter, which then adds its depths to ``depths``."""

    def ranked(hidden: Any, at: Any, depth: int, sampler: Any) -> Any:
        depths.add(depth)
        return rank(hidden, at, depth, sampler)

    return ranked


def test_merged_drafts_accept_more_than_each_alone(make_engine: Any) -> None:
    """Half of the requests come again, so that suffix decoding knows their answers, and the head drafts the others."""
    requests = [submit(i, sampled=False, tokens=TOKENS) for i in range(6)]
    again = [structs.replace(request, request_id=f"again-{request.request_id}") for request in requests[:3]]
    rates, depths = [], set[int]()
    for drafts in (["copy"], ["suffix"], ["copy", "suffix"]):
        engine = make_engine(drafts)
        if len(drafts) > 1:
            head = engine._drafts._drafts[""].drafter
            head.rank = recorded(head.rank, depths)
        engine.set_plan(plan_of([TreeShape.chain(2)], tasks=tasks_of(drafts)))
        texts(engine, requests)
        texts(engine, again)
        report = engine.report()
        (cell,) = (cell for cell in report.tasks if cell.task == "t0")
        rates.append(cell.decode_tokens / cell.decode_steps)
    assert rates[2] > 1.2 * max(rates[:2])
    passes = {cell.draft_passes for cell in report.steps if not cell.prefill}
    assert passes <= {0, 2}, "the extension by suffix decoding needs no pass"
    assert depths == {0, 1}, "the head drafts the planned chain of two alone"


@pytest.mark.parametrize("graphs", [(), (1, 2, 4)], ids=["eager", "graphs"])
@pytest.mark.parametrize("draft", ["suffix", "copy", "draft-model", "dflash", "medusa"])
def test_equal_drafts_get_equal_credit(
    make_engine: Any, draft: str, graphs: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have the acceptance of the draft alone: a merged head follows the text, also after preemptions."""
    monkeypatch.setattr(prompt_shares, "STEP_SECONDS", 1e9)  # steps are the same on a slow machine
    requests = [submit(i, sampled=i % 2 == 0, tokens=TOKENS, shapes=2) for i in range(6)]
    cells = []
    for drafts in ([draft], [draft, draft]):
        engine = make_engine(
            drafts,
            max_num_seqs=4,
            blocks=12,
            budget=30,
            prefix_caching=False,
            graphs=graphs,
            plan=plan_of([TreeShape.parse("tree:3,2"), MIX[0]], tasks=tasks_of(drafts, 2, depth=0)),
        )
        texts(engine, requests)
        report = engine.report()
        cells.append(sorted((c.task, c.sampled, c.depth, c.parent, c.ranks) for c in report.acceptance))
        assert engine.report().preemptions > 0
    for name in ("d", "1"):
        own = sorted((c.task, c.sampled, c.depth, c.parent, c.ranks) for c in report.credit if c.draft == name)
        assert own == cells[1] == cells[0]
    assert sum(sum(ranks[:-1]) for *_, ranks in cells[0]) > 0


def test_drafts_are_swapped_while_they_are_merged(make_engine: Any, plain: Any, drafter: Any) -> None:
    requests = [submit(i, sampled=i % 2 == 0, tokens=90, shapes=2) for i in range(6)]
    engine = make_engine(["eagle3", "ngram"], plan=plan_of(MIX[:2], tasks=tasks_of(["", ""], 2)))
    swaps = {5: ("d1", "suffix", "s"), 9: ("", "copy", "new"), 14: ("d1", "ngram", "n")}

    def swap(steps: int) -> Any:
        if steps not in swaps:
            return ()
        name, method, identity = swaps[steps]
        emitted = engine.set_draft(name, LoadedDraft(drafter(engine, method), DraftState(hash=identity)))
        engine.set_plan(plan_of(MIX[:2], version=steps, draft=engine.draft.hash, tasks=tasks_of(["", ""], 2)))
        return emitted

    assert texts(engine, requests, swap) == plain(requests)
    assert {cell.draft for cell in engine.report().credit} >= {"d", "1", "s", "new", "n"}


@pytest.mark.parametrize("drafts", [["eagle3", "ngram"], ["eagle3", "copy"]], ids=["lookup", "two-heads"])
def test_plans_drop_drafts_and_take_them_back_while_requests_run(
    make_engine: Any, plain: Any, drafts: list[str]
) -> None:
    requests = [submit(i, sampled=i % 2 == 0, tokens=90, shapes=2) for i in range(6)]
    engine = make_engine(drafts, plan=plan_of(MIX[:2], tasks=tasks_of(drafts, 2)))
    counts = []

    def change(steps: int) -> None:
        if steps in (8, 16):
            counts.append(sum(sum(cell.ranks) for cell in engine.report().credit))
            running = drafts if steps == 16 else drafts[:1]
            engine.set_plan(plan_of(MIX[:2], version=steps, tasks=tasks_of(running, 2)))

    assert texts(engine, requests, change) == plain(requests)
    counts.append(sum(sum(cell.ranks) for cell in engine.report().credit))
    assert 0 < counts[0] == counts[1] < counts[2], "a draft that was dropped gets no credit"


def test_cached_prefixes_are_reused(make_engine: Any, plain: Any) -> None:
    """A merged head does not see the keys of a prefix that another request computed, and follows the text behind it."""
    requests = [submit(i, sampled=i % 2 == 0, tokens=TOKENS) for i in range(3, 6)]
    again = [structs.replace(request, request_id=f"again-{request.request_id}") for request in requests]
    engine = make_engine(["copy", "eagle3", "ngram"], plan=plan_of(MIX[1:2], tasks=tasks_of(["", "", ""])))
    first, second = texts(engine, requests), texts(engine, again)
    assert list(first.values()) == list(second.values()) == list(plain(requests).values())
    assert engine.report().prefix_hit_tokens > 0
