"""Suffix decoding learns from ended answers of the same tenant, and the text stays that of plain decoding."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from msgspec import structs

from specdecode_worker.contract import DraftState, TreeShape
from specdecode_worker.drafts.base import LoadedDraft
from support.lossless.small_requests import plan_of, submit
from support.small_llama import texts

TOKENS = 40


@pytest.fixture
def engine_of(make_engine: Any) -> Any:
    return partial(make_engine, "suffix", plan=plan_of([TreeShape.chain(6)]))


def requests(prefix: str, *, salt: str = "", sampled: bool = False) -> Any:
    one = [submit(i, sampled=sampled, tokens=TOKENS) for i in range(4)]
    return [structs.replace(r, request_id=f"{prefix}{r.request_id}", cache_salt=salt) for r in one]


def answers(engine: Any, submits: Any) -> tuple[list[list[int]], int]:
    """Return the answers, and the number of tokens that were accepted for them."""
    before = engine.report().accepted_tokens
    return list(texts(engine, submits).values()), engine.report().accepted_tokens - before


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_answers_of_a_tenant_are_drafted_again(make_engine: Any, engine_of: Any, sampled: bool) -> None:
    engine = engine_of()
    wanted, _ = answers(make_engine(None), requests("", sampled=sampled))
    first, accepted = answers(engine, requests("a", sampled=sampled))
    again, accepted_again = answers(engine, requests("b", sampled=sampled))
    assert first == again == wanted
    # Every token but the first ones of an answer, and one a step that needs no draft, is accepted.
    assert accepted_again > accepted + 2 * TOKENS
    other, accepted_other = answers(engine, requests("c", salt="other", sampled=sampled))
    assert (other, accepted_other) == (wanted, accepted), "another tenant's answers are not drafted"


@pytest.mark.parametrize("replaced", [False, True])
def test_texts_of_ended_and_cancelled_requests_are_dropped(engine_of: Any, drafter: Any, replaced: bool) -> None:
    """A trial of another draft replaces it for a block of requests, which may end before it comes back."""
    engine = engine_of()
    submits = requests("a")
    for one in submits:
        engine.add(one)
    for _ in range(6):
        engine.step()
    suffix = engine._drafts.loaded().drafter
    assert {one.id for one in suffix._texts} == {one.request_id for one in submits}
    engine.abort(submits[0].request_id)
    if replaced:
        engine.set_draft("", LoadedDraft(drafter(engine, "copy"), DraftState(hash="other")))
    while not engine.idle:
        engine.step()
    assert len(suffix._texts) == 0
