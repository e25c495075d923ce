"""Tests of the affinity of requests."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdecode_router.placement.affinity import PART_CHARACTERS, PART_TOKENS, Affinity, affinity_of

CHAT = "/v1/chat/completions"
SYSTEM = {"role": "system", "content": "You help."}
USER = {"role": "user", "content": "Why is the sky blue?"}


def of(body: dict[str, Any], tenant: str = "a", task: str | None = None, route: str = CHAT) -> Affinity:
    return affinity_of(route, body, tenant=tenant, task=task)


def test_later_turns_have_the_affinity_of_the_first() -> None:
    first = of({"messages": [SYSTEM, USER]})
    answer = {"role": "assistant", "content": "Rayleigh."}
    assert of({"messages": [SYSTEM, USER, answer, {"role": "user", "content": "And red?"}]}) == first


def test_conversations_behind_one_long_system_prompt_differ_by_their_first_user_turn() -> None:
    system = {"role": "system", "content": "x" * 50_000}
    turns = [{"role": "user", "content": text} for text in ("one", "two")]
    first, second = (of({"messages": [system, turn]}) for turn in turns)
    assert first != second


@pytest.mark.parametrize(
    ("body", "other"),
    [
        ({"messages": [USER]}, {"messages": [{"role": "user", "content": "Why?"}]}),
        ({"messages": [SYSTEM, USER]}, {"messages": [USER]}),
        ({"messages": [USER], "cache_salt": "x"}, {"messages": [USER]}),
        ({"messages": [USER], "model": "m"}, {"messages": [USER]}),
        ({"prompt": "a"}, {"prompt": "b"}),
        ({"prompt": [1, 2]}, {"prompt": [1, 3]}),
        ({"prompt": [[1, 2]]}, {"prompt": [[1, 3]]}),
        ({"prompt": ["a", "b"]}, {"prompt": ["b", "a"]}),
    ],
)
def test_other_beginnings_have_another_affinity(body: dict[str, Any], other: dict[str, Any]) -> None:
    assert of(body) != of(other)


def test_tenants_tasks_and_routes_are_separate() -> None:
    body = {"messages": [USER]}
    keys = {of(body).key, of(body, tenant="b").key, of(body, task="code").key, of(body, route="/v1/responses").key}
    assert len(keys) == 4


def test_tenant_and_cache_salt_are_not_confused() -> None:
    assert of({"cache_salt": "bc"}, tenant="a").salt != of({"cache_salt": "c"}, tenant="ab").salt


def test_content_in_parts_counts_by_its_text() -> None:
    parts = [{"type": "text", "text": "Why is the"}, {"type": "text", "text": "sky blue?"}]
    said = {"role": "user", "content": "Why is the\nsky blue?"}
    assert of({"messages": [{"role": "user", "content": parts}]}) == of({"messages": [said]})


def test_only_the_first_characters_and_tokens_count() -> None:
    beginning = "y" * PART_CHARACTERS
    assert of({"prompt": beginning + "a"}) == of({"prompt": beginning + "b"})
    assert of({"messages": [{"role": "user", "content": beginning + "a"}]}) == of(
        {"messages": [{"role": "user", "content": beginning + "b"}]}
    )
    ids = list(range(PART_TOKENS))
    assert of({"prompt": [*ids, 1]}) == of({"prompt": [*ids, 2]})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(
    messages=JSON | st.lists(st.fixed_dictionaries({"role": JSON, "content": JSON}), max_size=3),
    prompt=JSON,
    salt=JSON,
)
def test_no_body_raises(messages: Any, prompt: Any, salt: Any) -> None:
    of({"messages": messages, "cache_salt": salt, "model": prompt})
    of({"prompt": prompt})


def test_values_nested_deep_do_not_raise() -> None:
    nested: list[Any] = []
    for _ in range(10_000):
        nested = [nested]
    of({"messages": [{"role": nested, "content": nested}], "model": nested, "cache_salt": nested})
    of({"prompt": nested, "model": nested})


def test_lone_surrogates_are_hashed() -> None:
    assert of({"prompt": "\ud800"}) != of({"prompt": "\ud801"})
