"""Draft models whose vocabulary is not the target's: acceptance where it can be compared, and what is never proposed.

The other modules of this folder compare the text, with the draft "foreign-model" of conftest.
"""

from __future__ import annotations

from typing import Any

import pytest

from specdecode_worker.contract import TreeShape

SHAPES = [TreeShape.parse(text) for text in ("chain:4", "tree:3,2,1,1", "none", "chain:1")]


@pytest.mark.parametrize("fields", [{}, {"coupled": False}], ids=["coupled", "mss"])
def test_a_permuted_draft_is_accepted_as_often(make_engine: Any, lossless: Any, fields: dict[str, Any]) -> None:
    """A draft with the target's tokens under other ids proposes the same tokens as one with the same ids."""
    plan_of, submit, texts = lossless
    outcomes = []
    for draft in ("draft-model", "permuted-model"):
        engine = make_engine(draft, **fields)
        engine.set_plan(plan_of(SHAPES))
        requests = [submit(i, sampled=i % 2 == 0, tokens=40, shapes=len(SHAPES)) for i in range(12)]
        emitted = texts(engine, requests)
        cells = [(cell.task, cell.depth, cell.ranks) for cell in engine.report().acceptance]
        outcomes.append((emitted, sorted(cells)))
    assert outcomes[0] == outcomes[1]


def test_unknown_tokens_are_never_proposed(make_engine: Any, lossless: Any, pair: Any) -> None:
    plan_of, submit, texts = lossless
    engine = make_engine("foreign-model")
    engine.set_plan(plan_of([TreeShape.parse("tree:8,2")]))
    drafts, proposed = engine._drafts.proposals, set[int]()
    propose = drafts.propose

    def recorded(*args: Any) -> Any:
        result = propose(*args)
        if result.ranked_BNK is not None:
            proposed.update(result.ranked_BNK[result.ranked_BNK >= 0].tolist())
        return result

    drafts.propose = recorded
    requests = [submit(i, sampled=i % 2 == 0, tokens=40) for i in range(8)]
    emitted = {token for text in texts(engine, requests).values() for token in text}
    known = set(pair.foreign.vocabulary.target_ids.tolist())
    assert proposed <= known
    assert len(known) == 49
    assert len(proposed) > 40
    assert emitted - known, "the target emits tokens that the draft lacks"
