"""Scheduling does not change the text: prefix reuse, prompt chunks, preemption and pipelined steps.

The reference text comes from an engine that does none of these. Acceptance is checked too: a draft that continues from
a cached prefix must rank every token as it would without the cache.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from specdecode_worker.contract import Report, TreeShape
from specdecode_worker.core.messages import Submit
from specdecode_worker.engine.engine import Engine
from specdecode_worker.sampling.params import Sampling
from support.lossless.small_requests import plan_of
from support.small_llama import emitted
from support.tiers import covering
from support.worker.accounts import check_engine

CHAIN, TREE, NONE = TreeShape.chain(3), TreeShape.parse("tree:3,2,1"), TreeShape(())
TOPICS = 4
AT_LEAST = 100


def make_request(index: int, *, sampled: bool, prompt: int = 64, new: int = 8, shapes: int = 1) -> Submit:
    """Return request ``index``, which shares its first 40 to 60 tokens with every fourth other and ends differently."""
    topic, own = Random(index % TOPICS), Random(1000 + index)
    common = [topic.randrange(61) for _ in range(60)][: 40 + index % 20]
    tail = [own.randrange(61) for _ in range(prompt - len(common))]
    params = {"temperature": 0.9, "top_p": 0.95} if sampled else {"temperature": 0.0}
    sampling = Sampling(max_tokens=new, seed=index, **params)
    return Submit(request_id=str(index), prompt=(*common, *tail), sampling=sampling, task=f"t{index % shapes}")


def serve(
    engine: Engine, requests: list[Submit], between: Callable[[Engine], None] = check_engine
) -> tuple[dict[str, list[int]], Counter[str]]:
    """Run the requests and return (texts, cached tokens of each).

    Arrivals are spread, so that requests meet others in every state. ``between`` runs before every step.
    """

    def checked(_: int) -> None:
        check_engine(engine)
        between(engine)

    by_request = emitted(engine, requests, checked, every=2)
    assert engine.report().kv_tokens_used == 0, "idle, and a block is neither free nor cached"
    texts = {name: [token for new in parts for token in new.tokens] for name, parts in by_request.items()}
    return texts, Counter({name: parts[-1].cached_tokens for name, parts in by_request.items()})


SAMPLED = pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "seeded"])
SHAPES = pytest.mark.parametrize("shape", [CHAIN, TREE], ids=str)
BATCH = pytest.mark.parametrize("batch", [1, 8])


@pytest.mark.core
@SAMPLED
@SHAPES
@BATCH
def test_reused_prefixes(make_engine: Any, plain: Any, batch: int, shape: Any, sampled: bool) -> None:
    engine = make_engine("copy", max_num_seqs=batch, blocks=60, plan=plan_of([shape]))
    requests = [make_request(i, sampled=sampled, new=5) for i in range(AT_LEAST + TOPICS + 4)]
    tokens_by_request, cached = serve(engine, requests)
    assert tokens_by_request == plain(requests)
    hits = [tokens for tokens in cached.values() if tokens]
    assert len(hits) >= AT_LEAST
    report = engine.report()
    assert report.prefix_hit_tokens == sum(hits) == sum(cell.cached_tokens for cell in report.traffic)
    assert report.prefix_query_tokens == sum(len(one.prompt) for one in requests)
    assert report.accepted_tokens > report.drafts / 3, "the draft must be good enough to test anything"


@pytest.mark.parametrize(("batch", "shape", "sampled"), covering([1, 8], [CHAIN, TREE], [False, True]), ids=str)
def test_prompts_in_chunks(make_engine: Any, plain: Any, batch: int, shape: Any, sampled: bool) -> None:
    engine = make_engine("copy", max_num_seqs=batch, budget=20, prefix_caching=False, plan=plan_of([shape]))
    requests = [make_request(i, sampled=sampled) for i in range(36)]
    tokens_by_request, _ = serve(engine, requests)
    assert tokens_by_request == plain(requests)
    assert engine.report().prefill_chunks >= AT_LEAST + len(requests)


def preempt_running(engine: Engine) -> None:
    """Preempt a running request before every step, which is far more often than a full block pool would cause."""
    scheduler = engine._scheduler
    if scheduler.running and scheduler.counters.preemptions < AT_LEAST:
        scheduler._preempt(Random(scheduler.counters.preemptions).choice(scheduler.running))


@SAMPLED
@BATCH
def test_preemptions(make_engine: Any, plain: Any, batch: int, sampled: bool) -> None:
    """In one case all computed blocks are lost; in the other the requests find some of them in the prefix cache."""
    requests = [make_request(i, sampled=sampled, prompt=46, new=12, shapes=2) for i in range(20)]
    preemptions = 0
    for caching in (False, True):
        engine = make_engine("copy", max_num_seqs=batch, budget=64, prefix_caching=caching, plan=plan_of([CHAIN, TREE]))
        tokens_by_request, _ = serve(engine, requests, between=preempt_running)
        assert tokens_by_request == plain(requests)
        preemptions += engine.report().preemptions
    assert preemptions >= AT_LEAST


@pytest.mark.parametrize("pipelined", [False, True], ids=["direct", "pipelined"])
def test_all_features_together_when_blocks_run_out(make_engine: Any, plain: Any, pipelined: bool) -> None:
    """Sixteen blocks serve eight requests that need three or four each: chains, trees and plain, greedy and seeded."""
    engine = make_engine(
        "copy", max_num_seqs=8, blocks=1 + 16, budget=24, pipelined=pipelined, plan=plan_of([CHAIN, TREE, NONE])
    )
    requests = [make_request(i, sampled=i % 2 == 1, prompt=44 + i % 3, new=12, shapes=3) for i in range(120)]
    tokens_by_request, cached = serve(engine, requests, between=preempt_running)
    assert tokens_by_request == plain(requests)
    assert engine.report().preemptions >= AT_LEAST
    assert sum(tokens > 0 for tokens in cached.values()) >= AT_LEAST
    assert engine.report().prefill_chunks >= len(requests) + AT_LEAST


def ranks(report: Report) -> Counter[Any]:
    """Return the counts of the ranks that the draft gave the emitted tokens, and the number of steps."""
    counts: Counter[Any] = Counter(drafts=report.drafts, accepted=report.accepted_tokens)
    for cell in report.acceptance:
        counts.update({(cell.depth, cell.parent, rank): n for rank, n in enumerate(cell.ranks)})
    return counts


@pytest.mark.parametrize(
    ("draft", "shape", "sampled"),
    covering(["copy", "eagle3", "peagle", "dflash", "draft-model"], [CHAIN, TREE], [False, True]),
    ids=str,
)
def test_prefix_hit_does_not_change_draft_ranks(make_engine: Any, draft: str, shape: Any, sampled: bool) -> None:
    """The first slot behind the prefix reads the stored state of the block before; the others are in found blocks."""
    rank_counts = []
    for caching in (False, True):
        engine = make_engine(draft, prefix_caching=caching, plan=plan_of([shape]))
        serve(engine, [make_request(0, sampled=sampled)])
        before = ranks(engine.report())
        first = make_request(4, sampled=sampled, new=40)
        text, hit = serve(engine, [first])
        turn = Submit(
            request_id="turn", prompt=(*first.prompt, *text["4"], 5, 6), sampling=first.sampling, task=first.task
        )
        _, hits = serve(engine, [turn])
        assert (hit["4"], hits["turn"]) == ((32, 96) if caching else (0, 0))
        after = ranks(engine.report())
        after.subtract(before)
        rank_counts.append(after)
    assert rank_counts[0] == rank_counts[1]
    assert rank_counts[0]["drafts"] > 20
