"""Tests of the weighted fair queue and of its two priority classes."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdecode_router.queueing.fair_queue import INTERACTIVE_RUN, FairQueue, PriorityQueue
from specdecode_router.queueing.tenants import Tenant

EQUAL = {"a": 1.0, "b": 1.0, "c": 1.0}


def always(tenant: Tenant) -> bool:
    return True


def drain(queue: PriorityQueue[str], count: int = 10_000) -> list[str]:
    items = []
    while len(items) < count and (item := queue.pop(always)) is not None:
        items.append(item)
    return items


def serve(queue: FairQueue[str], weights: dict[str, float], count: int = 10_000, output: int = 10) -> list[str]:
    """Run up to ``count`` requests one after the other. The name of a tenant is the first letter of its requests."""
    items: list[str] = []
    while len(items) < count and (item := queue.pop(always)) is not None:
        tenant = Tenant(item[0], weights[item[0]])
        queue.settle(tenant, queue.start(tenant, 0), 0, output)
        items.append(item)
    return items


def filled(lines: dict[str, tuple[float, int]]) -> FairQueue[str]:
    """Return a queue with a number of requests for each tenant, by name: weight and number."""
    queue: FairQueue[str] = FairQueue()
    for name, (weight, count) in lines.items():
        for index in range(count):
            queue.push(Tenant(name, weight), f"{name}{index}")
    return queue


@given(weights=st.lists(st.sampled_from([0.5, 1.0, 2.0, 3.0, 5.0]), min_size=2, max_size=5))
def test_turns_are_proportional_to_weights(weights: list[float]) -> None:
    names = [chr(ord("a") + index) for index in range(len(weights))]
    queue = filled({name: (weight, 300) for name, weight in zip(names, weights, strict=True)})
    counts = Counter(item[0] for item in serve(queue, dict(zip(names, weights, strict=True)), 200))
    for name, weight in zip(names, weights, strict=True):
        assert counts[name] == pytest.approx(200 * weight / sum(weights), abs=len(weights) + 1)


def test_a_tenant_that_was_away_saved_up_no_turns() -> None:
    queue = filled({"a": (1, 100)})
    serve(queue, EQUAL, 50)
    for index in range(50):
        queue.push(Tenant("b"), f"b{index}")
    assert Counter(item[0] for item in serve(queue, EQUAL, 20)) == {"a": 10, "b": 10}


def test_turns_are_by_tokens_and_not_by_requests() -> None:
    """Prompts of b are ten times as long, and so are the outputs of c, which cost twice as much."""
    queue = filled(dict.fromkeys("abc", (1, 2000)))
    tokens = {"a": (100, 10), "b": (1000, 10), "c": (100, 100)}
    used = dict.fromkeys("abc", 0)
    for _ in range(2000):
        item = queue.pop(always)
        prompt, output = tokens[item[0]]
        queue.settle(Tenant(item[0]), queue.start(Tenant(item[0]), prompt), prompt, output)
        used[item[0]] += prompt + 2 * output
    assert max(used.values()) < 1.02 * min(used.values())


def test_a_tenant_does_not_get_all_places_while_its_first_requests_run() -> None:
    queue = filled({"a": (1, 100), "b": (1, 100)})
    started = []
    for _ in range(20):
        item = queue.pop(always)
        queue.start(Tenant(item[0]), 0)
        started.append(item[0])
    assert Counter(started) == {"a": 10, "b": 10}


def test_a_request_without_output_costs_nothing_and_teaches_nothing() -> None:
    queue = filled({"a": (1, 3), "b": (1, 3)})
    a, b = Tenant("a"), Tenant("b")
    queue.settle(a, queue.start(a, 100), 100, 50)
    queue.settle(b, queue.start(b, 100), 100, 50)
    for _ in range(20):
        queue.settle(a, queue.start(a, 100), 0, 0)
    assert queue.start(a, 0) == queue.start(b, 0) == 2 * 50
    assert queue.pop(always) == "a0"


def test_a_removed_request_uses_up_no_turn() -> None:
    queue = filled({"a": (1, 3), "b": (1, 3)})
    queue.remove("a", "a0")
    queue.remove("a", "gone")
    assert serve(queue, EQUAL) == ["a1", "b0", "a2", "b1", "b2"]


def test_a_tenant_at_its_limit_is_passed_over() -> None:
    queue = filled({"a": (1, 2), "b": (1, 2)})
    assert queue.pop(lambda tenant: tenant.name != "a") == "b0"
    assert queue.pop(lambda tenant: False) is None
    assert serve(queue, EQUAL) == ["a0", "b1", "a1"]


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["push", "pop", "remove", "limit", "free"]), st.sampled_from("abc"), st.booleans()),
        max_size=60,
    )
)
def test_every_request_leaves_once_and_in_the_order_of_its_tenant(steps: list[tuple[str, str, bool]]) -> None:
    queue: PriorityQueue[str] = PriorityQueue()
    waiting: dict[tuple[str, bool], list[str]] = {(name, batch): [] for name in "abc" for batch in (False, True)}
    limited: set[str] = set()
    for number, (step, name, batch) in enumerate(steps):
        line = waiting[name, batch]
        if step == "push":
            line.append(f"{name}{number:03}")
            queue.of(batch=batch).push(Tenant(name), line[-1])
        elif step == "remove" and line:
            queue.of(batch=batch).remove(name, line.pop())
        elif step == "limit":
            limited.add(name)
        elif step == "free":
            limited.discard(name)
        elif step == "pop":
            item = queue.pop(lambda tenant: tenant.name not in limited)
            runnable = [line[0] for (owner, _), line in waiting.items() if line and owner not in limited]
            assert (item in runnable) if runnable else item is None
            if item is not None:
                next(line for line in waiting.values() if line and line[0] == item).pop(0)
        assert len(queue) == sum(map(len, waiting.values()))
        assert queue.length_of(name) == len(waiting[name, False]) + len(waiting[name, True])


def test_interactive_requests_come_first_and_batch_is_not_starved() -> None:
    queue: PriorityQueue[str] = PriorityQueue()
    for index in range(40):
        queue.of(batch=False).push(Tenant("a"), f"interactive{index}")
        queue.of(batch=True).push(Tenant("b"), f"batch{index}")
    order = [item.rstrip("0123456789") for item in drain(queue, 32)]
    assert order == [*["interactive"] * INTERACTIVE_RUN, "batch"] * 4


def test_a_batch_request_that_comes_late_does_not_overtake() -> None:
    queue: PriorityQueue[str] = PriorityQueue()
    for index in range(40):
        queue.of(batch=False).push(Tenant("a"), f"i{index}")
    drain(queue, 20)
    queue.of(batch=True).push(Tenant("b"), "batch")
    assert drain(queue).index("batch") == INTERACTIVE_RUN


def test_share_counts_each_waiting_tenant_once() -> None:
    queue: PriorityQueue[str] = PriorityQueue()
    assert queue.share_of(Tenant("a")) == 1
    queue.of(batch=False).push(Tenant("a"), "1")
    queue.of(batch=False).push(Tenant("b", weight=3), "2")
    queue.of(batch=True).push(Tenant("b", weight=3), "3")
    assert queue.share_of(Tenant("a")) == 0.25


def test_the_tenant_with_the_most_waiting_requests_by_weight_makes_room() -> None:
    queue: PriorityQueue[str] = PriorityQueue()
    heavy, light, newcomer = Tenant("heavy", 4), Tenant("light"), Tenant("new")
    assert queue.excess_over(newcomer) is None
    for index in range(4):
        queue.of(batch=False).push(heavy, f"heavy{index}")
    for index in range(3):
        queue.of(batch=False).push(light, f"light{index}")
    assert queue.excess_over(newcomer) == "light2"
    assert queue.excess_over(heavy) == "light2"
    assert queue.excess_over(light) is None
    queue.of(batch=True).push(light, "batch")
    assert queue.excess_over(newcomer) == "batch"
