"""Speculative text equals plain text with every processor on, because processors follow the paths of the tree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from specdecode_worker.contract import TreeShape
from specdecode_worker.core.messages import Sampling, Submit
from specdecode_worker.sampling import params as tables
from specdecode_worker.sampling import sampler
from support.lossless.plain_decoding import PlainDecoding

TOKENS, VOCABULARY = 30, 61
PROCESSORS: dict[str, dict[str, Any]] = {
    "min_p": {"min_p": 0.15},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.9},
    "repetition": {"repetition_penalty": 1.5},
    "logit_bias": {"logit_bias": ((5, 3.0), (9, -100.0), (17, 2.0), (33, 1.5))},
    "min_tokens": {"min_tokens": 14, "stop_token_ids": tuple(range(0, VOCABULARY, 3))},
}
PROCESSORS["all"] = {name: value for fields in PROCESSORS.values() for name, value in fields.items()}
PROCESSORS["all"] |= {"top_k": 30, "top_p": 0.95, "repetition_penalty": 1.2, "presence_penalty": 0.4}
ONLY_SAMPLED = ("min_p",)
CASES = [(name, sampled) for name in PROCESSORS for sampled in (False, True) if sampled or name not in ONLY_SAMPLED]
SHAPES = [TreeShape.parse(text) for text in ("chain:4", "tree:4,2,1", "tree:2,2,2", "0,0,1,1,2", "none", "chain:1")]


def request(index: int, name: str | None, *, sampled: bool, task: int = 0) -> Submit:
    generator = torch.Generator().manual_seed(index)
    prompt = torch.randint(0, VOCABULARY, (1 + 11 * index % 40,), generator=generator).tolist()
    fields = dict(PROCESSORS[name]) if name else {}
    sampling = Sampling(
        max_tokens=TOKENS, seed=700 + index, temperature=(1.0, 0.7, 1.3)[index % 3] if sampled else 0.0, **fields
    )
    return Submit(request_id=f"{index}", prompt=tuple(prompt), sampling=sampling, task=f"t{task}")


def run(engine: Any, requests: Sequence[Submit]) -> dict[str, list[int]]:
    tokens_by_request: dict[str, list[int]] = {r.request_id: [] for r in requests}
    for submit in requests:
        engine.add(submit)
    while not engine.idle:
        for new in engine.step():
            tokens_by_request[new.request_id] += new.tokens
    engine.check()
    return tokens_by_request


@pytest.fixture(scope="module")
def plain(pair: Any) -> PlainDecoding:
    return PlainDecoding(pair.target)


@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
@pytest.mark.parametrize(("name", "sampled"), CASES, ids=lambda v: v if isinstance(v, str) else ("greedy", "seeded")[v])
def test_single_sequences_equal_plain_decoding(
    make_engine: Any, lossless: Any, plain: PlainDecoding, shape: TreeShape, name: str, sampled: bool
) -> None:
    plan_of, *_ = lossless
    engine = make_engine("copy", max_num_seqs=1)
    engine.set_plan(plan_of([shape]))
    requests = [request(i, name, sampled=sampled) for i in range(3)]
    wanted = {r.request_id: plain.text(r) for r in requests}
    assert run(engine, requests) == wanted
    without = [plain.text(request(i, None, sampled=sampled)) for i in range(3)]
    assert list(wanted.values()) != without, "the processor must change something"
    report = engine.report()
    assert 1 + report.accepted_tokens / report.drafts >= 1.2, "paths must be walked to test anything"


MIXED = [(i, name, bool(i % 2) or name in ONLY_SAMPLED) for i, name in enumerate([*PROCESSORS, None, "all", "all"])]


def mixed_batch() -> list[Submit]:
    """Return requests with every processor, greedy and sampled, in mixed shapes, and one without processors."""
    return [request(i, name, sampled=sampled, task=i % len(SHAPES)) for i, name, sampled in MIXED]


@pytest.mark.parametrize(
    "draft", ["copy", "eagle3", "peagle", "dflash", "medusa", "draft-model", "foreign-model", "ngram", "suffix"]
)
def test_mixed_batch_equals_plain_decoding(make_engine: Any, lossless: Any, plain: PlainDecoding, draft: str) -> None:
    plan_of, *_ = lossless
    engine = make_engine(draft, max_num_seqs=10)
    engine.set_plan(plan_of(SHAPES))
    assert run(engine, mixed_batch()) == {r.request_id: plain.text(r) for r in mixed_batch()}


@pytest.mark.parametrize("draft", ["copy", "eagle3", "medusa", "peagle"])
def test_mixed_batch_in_graphs_equals_plain_decoding(
    make_engine: Any, lossless: Any, plain: PlainDecoding, draft: str
) -> None:
    """The draft proposes as in eager steps, under the same processors."""
    plan_of, *_ = lossless
    reports = []
    for graphs in ((4, 10), ()):
        engine = make_engine(draft, max_num_seqs=10, graphs=graphs)
        engine.set_plan(plan_of(SHAPES))
        assert run(engine, mixed_batch()) == {r.request_id: plain.text(r) for r in mixed_batch()}
        report = engine.report()
        reports.append((report.drafts, report.accepted_tokens))
        if graphs:
            assert set(engine._graphs.eager) == {"prefill"}
            assert {key.features.adjusts for key in engine._graphs._graphs} >= {8, 64}
    assert reports[0] == reports[1]


@pytest.mark.parametrize("graphs", [(), (4, 10)], ids=["calls", "graphs"])
@pytest.mark.parametrize("bug", ["blind-to-the-tree", "prompt-is-answer", "stops-late", "short-history"])
def test_planted_bugs_are_detected(
    make_engine: Any,
    lossless: Any,
    plain: PlainDecoding,
    bug: str,
    graphs: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan_of, *_ = lossless
    engine = make_engine("copy", max_num_seqs=10, graphs=graphs)
    engine.set_plan(plan_of(SHAPES))
    if bug == "blind-to-the-tree":
        monkeypatch.setattr(sampler.StepSampler, "_counted", lambda _, counts, rows: counts.answer_BV[rows.sequence_R])
    elif bug == "short-history":
        right = sampler.count_tokens
        monkeypatch.setattr(sampler, "count_tokens", lambda texts, prompt, _, size: right(texts, prompt, 8, size))
    else:
        _plant_in_tables(bug, monkeypatch)
    assert run(engine, mixed_batch()) != {r.request_id: plain.text(r) for r in mixed_batch()}


def _plant_in_tables(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write other values to the tables of sampling parameters."""
    wrong = {
        "prompt-is-answer": tables.Column("prompt_tokens", 0, lambda _: 0, adjusts=True),
        "stops-late": tables.Column(
            "min_tokens", 0, lambda params: params.min_tokens + 2 if params.blocks else 0, adjusts=True
        ),
    }[bug]
    monkeypatch.setattr(sampler, "tables_of", sampler.tables_of.__wrapped__)  # without the tables of other tests
    monkeypatch.setattr(tables, "COLUMNS", tuple(wrong if one.name == wrong.name else one for one in tables.COLUMNS))


@pytest.mark.parametrize("pipelined", [False, True], ids=["in-turn", "pipelined"])
def test_chunks_and_preemptions(make_engine: Any, lossless: Any, plain: PlainDecoding, pipelined: bool) -> None:
    """Tokens emitted before a preemption still count as the answer, although they are recomputed like a prompt."""
    plan_of, *_ = lossless
    engine = make_engine("copy", max_num_seqs=5, blocks=10, budget=24, pipelined=pipelined)
    engine.set_plan(plan_of(SHAPES))
    assert run(engine, mixed_batch()) == {r.request_id: plain.text(r) for r in mixed_batch()}
    assert engine.preemptions > 0, "the test must make the blocks run out"
