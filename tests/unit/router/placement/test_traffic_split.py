"""Shares of deployments: sizes, conversations that stay, failing trials, and continuations."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from specdecode_router.placement.affinity import Affinity
from specdecode_router.placement.traffic_split import TrafficSplit
from specdecode_router.workers.worker import Endpoint, WorkerView


def worker(deployment: str, number: int = 0, *, terminating: bool = False, **more: Any) -> WorkerView:
    name = f"{deployment}-{number}"
    return WorkerView(Endpoint(name, "", deployment=deployment, terminating=terminating), 0, **more)


OLD, NEW = worker("old", compatibility_key="k-old"), worker("new", compatibility_key="k-new")


def deployment_of(
    split: TrafficSplit,
    number: int,
    *workers: WorkerView,
    key: str = "",
    exclude: tuple[str, ...] = (),
    current: str = "",
) -> str | None:
    """Return the deployment that a conversation gets, None without a worker."""
    chosen = split.workers_for(
        workers or (OLD, NEW), Affinity("", "", number.to_bytes(16, "big")), key=key, exclude=frozenset(exclude),
        current=current,
    )  # fmt: skip
    names = {one.endpoint.deployment for one in chosen}
    assert len(names) <= 1
    return next(iter(names), None)


def deployments(percent: float, **more: Any) -> list[str | None]:
    split = TrafficSplit("old", {"new": percent})
    return [deployment_of(split, number, **more) for number in range(4000)]


@pytest.mark.parametrize("percent", [1, 10, 50, 90])
def test_shares_are_those_of_the_percents(percent: int) -> None:
    assert Counter(deployments(percent))["new"] / 40 == pytest.approx(percent, abs=2)


def test_a_larger_share_moves_conversations_in_one_direction() -> None:
    small, large = deployments(10), deployments(30)
    assert all(after == "new" for before, after in zip(small, large, strict=True) if before == "new")
    assert set(deployments(0)) == {"old"}
    assert set(deployments(100)) == {"new"}


def test_without_other_deployments_all_workers_are_candidates() -> None:
    workers = (worker(""), worker("", 1))
    split, anyone = TrafficSplit("old"), Affinity("", "", b"")
    assert split.workers_for(workers, anyone, key="", exclude=frozenset(), current="") == workers


def test_a_trial_without_a_usable_worker_costs_no_request() -> None:
    split = TrafficSplit("old", {"new": 100})
    assert deployment_of(split, 1, OLD) == "old"
    assert deployment_of(split, 1, OLD, worker("new", terminating=True)) == "old"
    assert deployment_of(split, 1, OLD, worker("new", suspect=True)) == "old"
    assert deployment_of(split, 1, exclude=("new-0",)) == "old"
    assert deployment_of(split, 1, worker("old", suspect=True), worker("new", suspect=True)) == "new"


def test_a_deployment_without_a_share_gets_nothing_even_alone() -> None:
    assert deployment_of(TrafficSplit("old", {"new": 0}), 1, NEW) is None
    assert deployment_of(TrafficSplit("old", {"new": 50}), 1, NEW) == "new"


def test_a_continuation_stays_with_its_compatibility_key() -> None:
    split = TrafficSplit("old", {"new": 50})
    unknown = worker("old", 1)
    for number in range(50):
        assert deployment_of(split, number, key="k-new", current="new") == "new"
        assert deployment_of(split, number, OLD, unknown, key="k-new", current="new") is None
        same = worker("old", 2, compatibility_key="k-new")
        assert deployment_of(split, number, OLD, same, key="k-new", current="new") == "old"


def test_a_deployment_with_another_model_name_gets_nothing(caplog: pytest.LogCaptureFixture) -> None:
    split = TrafficSplit("old", {"new": 100})
    workers = (worker("old", model="llama"), worker("new", model="llama-next"))
    assert {deployment_of(split, number, *workers) for number in range(20)} == {"old"}
    assert len(caplog.records) == 1
    assert "its model is called llama-next, not llama" in caplog.text
    assert deployment_of(split, 1, worker("old", model="llama"), worker("new", model="llama")) == "new"


def test_the_deployment_of_a_conversation_depends_on_no_worker() -> None:
    split = TrafficSplit("old", {"new": 50})
    few = [deployment_of(split, number) for number in range(200)]
    many = [deployment_of(split, number, OLD, worker("old", 1), NEW, worker("new", 1)) for number in range(200)]
    assert few == many
