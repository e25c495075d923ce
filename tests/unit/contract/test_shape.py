"""Tests of draft trees: text forms, derived values and refused input."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from specdecode_worker.contract import MAX_NODES, TreeShape


@st.composite
def shapes(draw: st.DrawFn) -> TreeShape:
    parents: list[int] = []
    for node in range(1, draw(st.integers(0, 20)) + 1):
        parents.append(draw(st.integers(parents[-1] if parents else 0, node - 1)))
    return TreeShape(tuple(parents))


@pytest.mark.parametrize(
    ("text", "parents"),
    [
        ("none", ()),
        ("chain:0", ()),
        ("chain:3", (0, 1, 2)),
        ("tree:2,2", (0, 0, 1, 1, 2, 2)),
        ("tree:3,1", (0, 0, 0, 1, 2, 3)),
        ("0,0,1", (0, 0, 1)),
    ],
)
def test_text_forms(text: str, parents: tuple[int, ...]) -> None:
    assert TreeShape.parse(text).parents == parents


@given(shapes())
def test_text_and_json_round_trip(shape: TreeShape) -> None:
    assert TreeShape.parse(str(shape)) == shape
    assert TreeShape.model_validate_json(shape.model_dump_json()) == shape


@given(shapes())
def test_depths_and_ranks_follow_the_parents(shape: TreeShape) -> None:
    for node, parent in enumerate(shape.parents, start=1):
        assert shape.depths[node] == shape.depths[parent] + 1
        assert list(shape.children(parent))[shape.ranks[node]] == node
    assert shape.is_chain == (shape.depth == shape.nodes)


@pytest.mark.parametrize(
    "bad", ["chain:x", "tree:0", "tree:9,9", "1", "0,2", "0,1,0", "nonsense", f"chain:{MAX_NODES + 1}"]
)
def test_invalid_shape_is_refused_with_the_reason(bad: str) -> None:
    with pytest.raises(ValidationError) as caught:
        TreeShape.parse(bad)
    assert any(word in str(caught.value) for word in ("tree", "parent", "order", "nodes"))
