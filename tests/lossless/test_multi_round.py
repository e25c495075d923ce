"""The engine with ``--sampler mss``: greedy text equals plain text, and sampled text has the target's distribution."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from msgspec.structs import replace
from scipy.stats import chi2

from specdecode_worker.contract import SyntheticKnobs, TreeShape
from specdecode_worker.core.messages import Submit
from specdecode_worker.engine.engine import ShapeSelector
from specdecode_worker.sampling import sampler as multi_round
from specdecode_worker.sampling.params import Sampling
from support.lossless.plain_decoding import PlainDecoding
from support.lossless.small_requests import acceptance, plan_of
from support.small_llama import texts
from support.tiers import by_effort

SHAPES = [TreeShape.parse(text) for text in ("tree:3,2", "chain:3", "none")]
PROMPT = (7, 19, 3, 44)
REQUESTS = by_effort(quick=800, full=2400, nightly=2400)
CUT, TOKENS = 3, 3


def submit(index: int, **sampling: Any) -> Submit:
    fields = {"max_tokens": TOKENS + 1, "seed": index, "temperature": 1.0, "top_k": CUT, **sampling}
    return Submit(request_id=str(index), prompt=PROMPT, sampling=Sampling(**fields), task=f"t{index % len(SHAPES)}")


def run(engine: Any, requests: list[Submit]) -> list[list[int]]:
    return list(texts(engine, requests).values())


def p_value(reference: PlainDecoding, answers: list[list[int]], request: Submit) -> float:
    """Return the chi-square p-value of the first three tokens against the probabilities from dense passes."""
    chances: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(TOKENS):
        grown = {}
        for begin, chance in chances.items():
            p = reference.logp(request, list(begin))[0].exp()
            grown |= {(*begin, int(t)): chance * float(p[t]) for t in torch.nonzero(p)[:, 0]}
        chances = grown
    seen = dict.fromkeys(chances, 0)
    for answer in answers:
        if tuple(answer[:TOKENS]) not in seen:
            return 0.0
        seen[tuple(answer[:TOKENS])] += 1
    pairs = [(seen[key], chance * len(answers)) for key, chance in chances.items()]
    rare = [sum(column) for column in zip(*(pair for pair in pairs if pair[1] < 5), strict=True)]
    cells = [pair for pair in pairs if pair[1] >= 5] + ([(rare[0], rare[1])] if rare else [])
    return float(chi2.sf(sum((o - e) ** 2 / e for o, e in cells), len(cells) - 1))


def sampled_answers(make_engine: Any, *, draft: str = "copy", cuts: bool = False, **sampling: Any) -> list[list[int]]:
    engine = make_engine(draft, max_num_seqs=48, blocks=200, coupled=False, plan=plan_of(SHAPES))
    if cuts:
        engine.set_synthetic(SyntheticKnobs(acceptance=(0.7, 0.5)))
    return run(engine, [submit(i, **sampling) for i in range(REQUESTS)])


PENALTIES = {"presence_penalty": 1.0, "repetition_penalty": 1.3, "logit_bias": ((5, 1.0),)}


@pytest.mark.parametrize(
    ("draft", "cuts", "fields"),
    [
        pytest.param("copy", False, {}, id="whole", marks=pytest.mark.core),
        pytest.param("copy", True, {}, id="cut-short"),
        pytest.param("peagle", False, {}, id="parallel"),
        pytest.param("copy", False, PENALTIES, id="penalised"),
    ],
)
def test_sampled_text_follows_the_target_distribution(
    make_engine: Any, reference: PlainDecoding, draft: str, cuts: bool, fields: dict[str, Any]
) -> None:
    answers = sampled_answers(make_engine, draft=draft, cuts=cuts, **fields)
    assert p_value(reference, answers, submit(0, **fields)) > 1e-3


def test_wrong_distribution_is_detected(
    make_engine: Any, reference: PlainDecoding, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test detects a planted bug: proposals verified as if they had been drawn from a sharper distribution."""
    right = multi_round.multi_round

    def planted(parents: Any, tokens: Any, logp: Any, logq: Any, *rest: Any, **flags: Any) -> Any:
        sharper = None if logq is None else torch.log_softmax(2 * logq, dim=-1)
        return right(parents, tokens, logp, sharper, *rest, **flags)

    monkeypatch.setattr(multi_round, "multi_round", planted)
    assert p_value(reference, sampled_answers(make_engine), submit(0)) < 1e-6


@pytest.mark.parametrize("draft", ["copy", "peagle", "dflash"])
def test_greedy_text_in_a_mixed_batch_equals_plain_text(make_engine: Any, reference: PlainDecoding, draft: str) -> None:
    engine = make_engine(draft, coupled=False, plan=plan_of(SHAPES))
    fields: dict[str, Any] = {"max_tokens": 30, "top_k": 0, "frequency_penalty": 0.5}
    requests = [submit(i, temperature=0.0 if i % 2 else 0.9, **fields) for i in range(8)]
    answers = run(engine, requests)
    for request, answer in zip(requests, answers, strict=True):
        assert len(answer) == 30
        assert (answer == reference.text(request)) or request.sampling.temperature > 0
    report = engine.report()
    assert report.accepted_tokens > 0
    assert run(engine, requests) == answers, "the same seed, batch and shapes give the same text"


GRAPHS = (1, 2, 4, 8)
GRAPH_SHAPES = [TreeShape.parse(text) for text in ("tree:3,2", "chain:3", "none", "tree:2,2,1")]


def counted(make_engine: Any, draft: str, graphs: tuple[int, ...], **sampling: Any) -> Any:
    """Return the texts and the acceptance of a mixed batch, with shadow passes and cut paths."""
    engine = make_engine(draft, coupled=False, graphs=graphs, pipelined=True, plan=plan_of(GRAPH_SHAPES, explore=0))
    engine.set_synthetic(SyntheticKnobs(acceptance=(0.9, 0.7)))
    fields: dict[str, Any] = {"max_tokens": 24, "top_p": 0.95, **sampling}
    requests = [
        replace(submit(i, temperature=0.0 if i % 3 == 1 else 0.9, top_k=0 if i % 2 else 9, **fields), task=f"t{i % 4}")
        for i in range(8)
    ]
    answers, report = run(engine, requests), engine.report()
    if graphs:
        assert set(engine._graphs.eager) == {"prefill"}
        assert any(key.features.rounds == 4 for key in engine._graphs._graphs), "three siblings"
    assert report.accepted_tokens > 0
    return answers, acceptance(report)


@pytest.mark.parametrize("draft", ["copy", "eagle3", "draft-model", "peagle"])
@pytest.mark.parametrize("feature", ["none", "penalties"])
def test_graphs_have_the_text_of_eager_steps(
    make_engine: Any, draft: str, feature: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ShapeSelector, "_shadow_depth", lambda _: 5)
    fields: dict[str, Any] = {"presence_penalty": 0.5, "logit_bias": ((5, 1.0),)} if feature == "penalties" else {}
    assert counted(make_engine, draft, GRAPHS, **fields) == counted(make_engine, draft, (), **fields)
