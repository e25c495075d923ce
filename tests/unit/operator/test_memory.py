"""The state ConfigMap: bounded, readable by the next operator, of use only to its own deployment."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fleet import loop_over

from specdecode_operator.state.learned import (
    MAX_STATE_BYTES,
    LearnedState,
    RowState,
    StepTimeCell,
    TemplateState,
    parse_state,
    render_state,
)
from specdecode_operator.state.session import PackedSession
from specdecode_operator.telemetry.counters import PAIRS, K


def crowded() -> LearnedState:
    """More than any deployment should ever have to remember."""
    length = 4 + 2 * K + len(PAIRS)
    costs = tuple(
        StepTimeCell(
            tokens_bucket=1 << bucket,
            draft_passes=depth,
            prefill=False,
            context_bucket=context,
            values=tuple(float(f"{123456.789 * (bucket + 1) / (index + depth + 1):.6g}") for index in range(length)),
            at=1e9,
        )
        for bucket in range(12)
        for depth in range(9)
        for context in range(3)
    )
    rows = tuple(
        RowState(concurrency=c, context=x, task=t, depth=3, since=1e9, off_until=1e9, patience=3600)
        for c in range(11)
        for x in range(3)
        for t in ("a" * 32, "b" * 32)
    )
    template = TemplateState(spec_hash="h", template={"x": "y" * 19_000}, image="i")
    return LearnedState(uid="u", costs=costs, rows=rows, template=template)


def test_the_bound_holds_and_the_most_visited_cells_stay() -> None:
    learned = crowded()
    data = render_state(learned)
    assert sum(len(text.encode()) for text in data.values()) < MAX_STATE_BYTES
    found = parse_state(data, "u")
    assert found is not None
    assert found.rows == learned.rows, "rows are never dropped"
    assert found.template == learned.template
    left, gone = set(found.costs), set(learned.costs) - set(found.costs)
    assert left
    assert min(cell.values[0] for cell in left) >= max(cell.values[0] for cell in gone)


def test_a_state_comes_back_as_it_was() -> None:
    loop = loop_over()
    loop.polls(8)
    assert parse_state(render_state(loop.memory.learned), "u1") == loop.memory.learned


def test_a_memory_rests_and_comes_back_as_it_was() -> None:
    loop = loop_over()
    loop.polls(8)
    learned = loop.memory.learned.model_copy(update={"template": crowded().template})
    memory = replace(loop.memory, learned=learned, published_at=7.0, found=False)
    resting = PackedSession.of(memory)
    assert resting.memory == memory
    assert len(resting.packed) < len(learned.model_dump_json()) / 3


def test_a_namesake_of_another_uid_starts_afresh() -> None:
    assert parse_state(render_state(LearnedState(uid="old")), "new") is None


def test_a_newer_operators_fields_are_ignored() -> None:
    data = render_state(LearnedState(uid="u", draft="d"))
    data["memory.json"] = data["memory.json"].replace('"format":1', '"format":2,"mood":"good"')
    found = parse_state(data, "u")
    assert found is not None
    assert found.draft == "d"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"rows": 7}'])
def test_garbage_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match="valid"):
        parse_state({"memory.json": text}, "u")
