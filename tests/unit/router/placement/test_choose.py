"""Tests of the choice of a worker: stability, shares by speed, bounded load, and the rules of eligibility."""

from __future__ import annotations

import dataclasses
import math
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdecode_router.placement.affinity import Affinity
from specdecode_router.placement.choose import LOAD_FACTOR, PlacementOutcome, load_of, place
from specdecode_router.workers.worker import Endpoint, WorkerView


def worker(name: str, in_flight: int = 0, *, terminating: bool = False, **more: Any) -> WorkerView:
    endpoint = Endpoint(name, f"http://{name}:8001", terminating=terminating)
    return WorkerView(endpoint, in_flight, **more)


def affinity(number: int, task: str = "") -> Affinity:
    return Affinity("", task, number.to_bytes(8, "big"))


def name_of(workers: Sequence[WorkerView], key: Affinity, **more: Any) -> str:
    placement = place(workers, key, **more)
    return placement.worker.endpoint.name


NAMES = st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=8, unique=True)


@given(names=NAMES, speeds=st.lists(st.floats(0.1, 10), min_size=9, max_size=9), joining=st.text(min_size=9))
def test_a_worker_that_joins_or_leaves_moves_only_its_own_keys(
    names: list[str], speeds: list[float], joining: str
) -> None:
    workers = [worker(name, speed=speed) for name, speed in zip(names, speeds[1:], strict=False)]
    grown = [*workers, worker(joining, speed=speeds[0])]
    for number in range(30):
        before, after = name_of(workers, affinity(number)), name_of(grown, affinity(number))
        assert after in (before, joining)


@given(names=NAMES, seed=st.integers(0, 1000), loads=st.lists(st.integers(0, 20), min_size=8, max_size=8))
def test_choice_does_not_depend_on_the_order_of_workers(names: list[str], seed: int, loads: list[int]) -> None:
    workers = [worker(name, load) for name, load in zip(names, loads, strict=False)]
    mixed = random.Random(seed).sample(workers, len(workers))
    assert place(workers, affinity(seed)) == place(mixed, affinity(seed))


def test_keys_are_shared_by_speed() -> None:
    workers = [worker("a", speed=1), worker("b", speed=2), worker("c", speed=5)]
    counts = Counter(name_of(workers, affinity(number)) for number in range(8000))
    assert counts["a"] == pytest.approx(1000, rel=0.1)
    assert counts["b"] == pytest.approx(2000, rel=0.1)
    assert counts["c"] == pytest.approx(5000, rel=0.1)


@given(
    loads=st.lists(st.integers(0, 50), min_size=1, max_size=8),
    speeds=st.lists(st.floats(0.1, 10), min_size=8, max_size=8),
    number=st.integers(0, 100),
)
def test_no_worker_gets_more_than_its_bound(loads: list[int], speeds: list[float], number: int) -> None:
    workers = [worker(f"w{i}", load, speed=speeds[i]) for i, load in enumerate(loads)]
    placement = place(workers, affinity(number))
    chosen = placement.worker
    share = chosen.speed / sum(speeds[: len(loads)])
    assert load_of(chosen) + 1 <= math.ceil(LOAD_FACTOR * (sum(loads) + 1) * share + 1e-9)


@pytest.mark.parametrize("load", ["in_flight", "requests"], ids=["own requests", "reported"])
def test_the_next_worker_of_the_rank_takes_over_from_a_loaded_one(load: str) -> None:
    idle = [worker(name) for name in "abcd"]
    first = name_of(idle, affinity(7))
    second = name_of(idle, affinity(7), exclude=frozenset({first}))
    loaded = [worker(name, **{load: 9 if name == first else 2}) for name in "abcd"]
    placement = place(loaded, affinity(7))
    assert (placement.worker.endpoint.name, placement.outcome) == (second, PlacementOutcome.spill)
    assert place(idle, affinity(7)).outcome is PlacementOutcome.affinity  # type: ignore[union-attr]


def test_a_full_batch_is_avoided_while_another_worker_has_a_free_row() -> None:
    for number in range(20):
        workers = [worker("a", 4, max_num_seqs=4), worker("b", 4, max_num_seqs=8)]
        assert name_of(workers, affinity(number)) == "b"
    full = [worker("a", 4, max_num_seqs=4), worker("b", 4, max_num_seqs=4)]
    assert {name_of(full, affinity(number)) for number in range(20)} == {"a", "b"}


def test_nothing_is_chosen_without_an_eligible_worker() -> None:
    assert place([], affinity(1)) is None
    assert place([worker("a", terminating=True)], affinity(1)) is None
    assert place([worker("a")], affinity(1), exclude=frozenset({"a"})) is None


def test_suspects_come_last() -> None:
    for number in range(20):
        assert name_of([worker("a", 50), worker("b", suspect=True)], affinity(number)) == "a"
    assert name_of([worker("b", suspect=True)], affinity(1)) == "b"


def test_a_continuation_needs_the_compatibility_key() -> None:
    other, unknown, equal = (worker(name, compatibility_key=key) for name, key in (("o", "x"), ("u", ""), ("e", "k")))
    suspect = dataclasses.replace(equal, suspect=True)
    for number in range(20):
        assert name_of([other, unknown, equal], affinity(number), compatibility_key="k") == "e"
        assert name_of([other, unknown], affinity(number), compatibility_key="k") == "u"
        assert name_of([other, unknown, suspect], affinity(number), compatibility_key="k") == "e"
        assert place([other], affinity(number), compatibility_key="k") is None


def test_tasks_go_to_the_workers_that_the_plan_assigns() -> None:
    code = worker("code", tasks=frozenset({"code"}))
    chat = worker("chat", tasks=frozenset({"chat"}))
    both = worker("both")
    for number in range(20):
        assert name_of([code, chat, both], affinity(number, "code")) == "code"
        assert name_of([code, chat, both], affinity(number, "sql")) == "both"
        assert name_of([chat], affinity(number, "code")) == "chat"
    loaded = dataclasses.replace(code, in_flight=9)
    assert name_of([loaded, chat, both], affinity(1, "code")) == "both"


def test_a_worker_that_evicted_the_prefix_loses_its_rank() -> None:
    workers = [worker(name) for name in "abcd"]
    first = name_of(workers, affinity(3))
    other = next(name for name in "abcd" if name != first)
    assert name_of(workers, affinity(3), expected={first: 900, other: 1000}) == first
    assert name_of(workers, affinity(3), expected={first: 100, other: 1000}) == other
    assert name_of(workers, affinity(3), expected={other: 1000}) == other
    assert name_of(workers, affinity(3), expected={"gone": 1000}) == first
