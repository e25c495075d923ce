"""Lists of pods that are not asked for again, and the changes that end that."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any, cast

from specdecode_operator.api.v1alpha1 import GROUP
from specdecode_operator.controller.handlers import watch_children
from specdecode_operator.errors import Unavailable
from specdecode_operator.kube.client import PODS, KubeClient
from specdecode_operator.kube.pod_cache import PodCache
from specdecode_operator.types import Key, Worker

A, B = ("ns", "a"), ("other", "b")
FOUND = (Worker(name="p", uid="p", address="10.0.0.1", ready=True),)


def read(pods: PodCache, key: Key) -> bool:
    """Whether the pods had to be listed."""
    if pods.known(key) is not None:
        return False
    pods.listed(key, FOUND)
    return True


def test_nothing_is_kept_that_nobody_watches() -> None:
    pods = PodCache()
    assert [read(pods, A), read(pods, A)] == [True, True]
    pods.begins("ns")
    assert [read(pods, A), read(pods, A)] == [True, False]
    assert [read(pods, B), read(pods, B)] == [True, True], "of another namespace"
    pods.ends("ns")
    assert [read(pods, A), read(pods, A)] == [True, True]


def test_a_change_ends_what_is_known_and_what_is_being_listed() -> None:
    pods = PodCache()
    pods.begins(None)
    assert [read(pods, A), read(pods, B)] == [True, True]
    pods.changed(A)
    assert [read(pods, A), read(pods, B)] == [True, False]
    pods.changed(A)
    assert pods.known(A) is None
    pods.changed(A)
    pods.listed(A, FOUND)
    assert pods.known(A) is None, "the list may be from before the change"


def test_a_list_from_before_the_watch_is_not_kept() -> None:
    pods = PodCache()
    assert pods.known(A) is None
    pods.begins(None)
    pods.listed(A, FOUND)
    assert pods.known(A) is None


class Scripted:
    """A cluster with one list and one watch, after which it is away."""

    def __init__(self, pods: PodCache) -> None:
        self.pods = pods
        self.before: list[bool] = []

    async def pages(self, *_: Any, **__: Any) -> AsyncIterator[dict[str, Any]]:
        self.before.append(read(self.pods, A) and read(self.pods, A))
        yield {"items": [], "metadata": {"resourceVersion": "7"}}
        if len(self.before) > 1:
            raise RuntimeError("enough")

    async def watch(self, *_: Any, **__: Any) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        assert [read(self.pods, A), read(self.pods, A)] == [True, False]
        yield "MODIFIED", {"metadata": {"name": "p", "namespace": "ns", "labels": {f"{GROUP}/name": "a"}}}
        assert [read(self.pods, A), read(self.pods, A)] == [True, False]
        raise Unavailable("gone")


async def test_the_watch_tells_and_its_end_is_the_end() -> None:
    pods, added = PodCache(), list[Key]()
    scripted = Scripted(pods)
    with contextlib.suppress(RuntimeError):
        await watch_children(cast("KubeClient", scripted), PODS, None, added.append, pods)
    assert added == [A]
    assert scripted.before == [True, True], "between two watches everything is listed"
