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
ANSWER = {"role": "assistant", "content": "Rayleigh."}
LONG = {"role": "system", "content": "x" * 50_000}
BEGINNING = "y" * PART_CHARACTERS


def of(body: dict[str, Any], tenant: str = "a", task: str | None = None, route: str = CHAT) -> Affinity:
    return affinity_of(route, body, tenant=tenant, task=task)


def asked(content: Any) -> dict[str, Any]:
    """Return a body with one turn of a user."""
    return {"messages": [{"role": "user", "content": content}]}


@pytest.mark.parametrize(
    ("body", "other"),
    [
        (asked("Why?"), asked("How?")),
        ({"messages": [SYSTEM, USER]}, {"messages": [USER]}),
        ({"messages": [LONG, USER]}, {"messages": [LONG, {"role": "user", "content": "Why?"}]}),
        ({"messages": [USER], "cache_salt": "x"}, {"messages": [USER]}),
        ({"messages": [USER], "model": "m"}, {"messages": [USER]}),
        ({"prompt": "a"}, {"prompt": "b"}),
        ({"prompt": "\ud800"}, {"prompt": "\ud801"}),
        ({"prompt": [1, 2]}, {"prompt": [1, 3]}),
        ({"prompt": [[1, 2]]}, {"prompt": [[1, 3]]}),
        ({"prompt": ["a", "b"]}, {"prompt": ["b", "a"]}),
    ],
    ids=[
        "turn", "no system prompt", "turn behind a long system prompt", "salt", "model", "prompt", "lone surrogates",
        "tokens", "list of tokens", "order",
    ],
)  # fmt: skip
def test_other_beginnings_have_another_affinity(body: dict[str, Any], other: dict[str, Any]) -> None:
    assert of(body) != of(other)


@pytest.mark.parametrize(
    ("body", "other"),
    [
        ({"messages": [SYSTEM, USER]}, {"messages": [SYSTEM, USER, ANSWER, {"role": "user", "content": "And red?"}]}),
        (asked([{"type": "text", "text": one} for one in ("Why is the", "sky?")]), asked("Why is the\nsky?")),
        ({"prompt": BEGINNING + "a"}, {"prompt": BEGINNING + "b"}),
        (asked(BEGINNING + "a"), asked(BEGINNING + "b")),
        ({"prompt": [*range(PART_TOKENS), 1]}, {"prompt": [*range(PART_TOKENS), 2]}),
    ],
    ids=["later turns", "content in parts", "long prompt", "long turn", "many tokens"],
)
def test_equal_beginnings_have_one_affinity(body: dict[str, Any], other: dict[str, Any]) -> None:
    assert of(body) == of(other)


def test_tenants_tasks_and_routes_are_separate() -> None:
    body = {"messages": [USER]}
    keys = {of(body).key, of(body, tenant="b").key, of(body, task="code").key, of(body, route="/v1/responses").key}
    assert len(keys) == 4


def test_tenant_and_cache_salt_are_not_confused() -> None:
    assert of({"cache_salt": "bc"}, tenant="a").salt != of({"cache_salt": "c"}, tenant="ab").salt


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
