"""Informers: the store, relists, resumed watches and back-off, without an API server."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest

from specdecode_operator.api.v1alpha1 import GROUP
from specdecode_operator.errors import Gone, NotFound, Refused, Unavailable
from specdecode_operator.kube import informer as informer_module
from specdecode_operator.kube.informer import Informer, ObjectStore
from specdecode_operator.kube.kinds import PODS
from specdecode_operator.types import Key
from support.background import background

A, B = ("ns", "a"), ("ns", "b")


def item(name: str, version: int, parent: str = "a", *, uid: str = "", namespace: str = "ns") -> dict[str, Any]:
    labels = {f"{GROUP}/name": parent} if parent else {}
    metadata = {"name": name, "namespace": namespace, "uid": uid or name, "resourceVersion": str(version)}
    return {"metadata": {**metadata, "labels": labels}}


def page(version: int, *items: dict[str, Any]) -> dict[str, Any]:
    return {"metadata": {"resourceVersion": str(version)}, "items": list(items)}


class EndOfScriptError(Exception):
    """All lists and watches of a script were used."""


class ScriptedClient:
    """Client whose lists and watches come from a script, in turn; an exception in it is raised."""

    def __init__(self, lists: list[list[Any]], watches: list[list[Any]]) -> None:
        self.lists = lists
        self.watches = watches
        self.versions: list[str] = []

    async def pages(self, *_: Any, **__: Any) -> AsyncIterator[dict[str, Any]]:
        async for step in self._play(self.lists):
            yield step

    async def watch(self, *_: Any, version: str, **__: Any) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        self.versions.append(version)
        async for step in self._play(self.watches):
            yield step

    async def _play(self, script: list[list[Any]]) -> AsyncIterator[Any]:
        if not script:
            raise EndOfScriptError
        for step in script.pop(0):
            if isinstance(step, Exception):
                raise step
            yield step


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Record the pauses, which take no time."""
    recorded: list[float] = []

    async def sleep(seconds: float) -> None:
        recorded.append(seconds)

    monkeypatch.setattr(informer_module.asyncio, "sleep", sleep)
    return recorded


def version_of(resource: dict[str, Any]) -> str:
    return str(resource["metadata"]["resourceVersion"])


def informer_of(
    client: Any, changes: list[Key], namespaces: Sequence[str] = (), project: Callable[[Any], str] = version_of
) -> Informer[str]:
    return Informer(client, PODS, namespaces, labels="", project=project, metadata_only=True, on_change=changes.append)


async def play(
    lists: list[list[Any]], watches: list[list[Any]], project: Callable[[Any], str] = version_of
) -> tuple[Informer[str], list[Key], ScriptedClient]:
    client, changes = ScriptedClient(lists, watches), list[Key]()
    informer = informer_of(client, changes, project=project)
    with pytest.RaisesGroup(EndOfScriptError):
        await informer.run()
    return informer, changes, client


async def test_list_and_events_become_the_store(pauses: list[float]) -> None:
    events = [
        ("ADDED", item("r", 11, "b")),
        ("MODIFIED", item("p", 12)),
        ("DELETED", item("q", 13)),
        ("BOOKMARK", {"metadata": {"resourceVersion": "20"}}),
    ]
    informer, changes, client = await play([[page(9, item("p", 1)), page(10, item("q", 2))]], [events])
    assert informer.synced.is_set()
    assert (informer.get("ns", "p"), informer.get("ns", "q"), informer.get("ns", "r")) == ("12", None, "11")
    assert (informer.of(A), informer.of(B), informer.of(("ns", "c"))) == (("12",), ("11",), ())
    assert (set(informer.keys()), len(informer)) == ({A, B}, 2)
    assert changes == [A, A, B, A, A]
    assert client.versions == ["10", "20"], "the watch is resumed from the bookmark"
    assert pauses == [], "a normal end is no error"


async def test_a_relist_reports_differences_only(pauses: list[float]) -> None:
    before = page(5, item("same", 1, "a"), item("changed", 2, "b"), item("vanished", 3, "c"), item("replaced", 4, "d"))
    after = page(
        9, item("same", 1, "a"), item("changed", 7, "b"), item("added", 8, "e"), item("replaced", 4, "d", uid="2")
    )
    informer, changes, client = await play([[before], [after]], [[Gone("too old")]])
    assert sorted(name for _, name in changes[4:]) == ["b", "c", "d", "e"]
    assert informer.get("ns", "vanished") is None
    assert client.versions == ["5", "9"]
    assert pauses == [], "the first expired version needs no pause"


async def test_what_a_write_returns_during_a_relist_stays(pauses: list[float]) -> None:
    class WritingClient(ScriptedClient):
        async def pages(self, *_: Any, **__: Any) -> AsyncIterator[dict[str, Any]]:
            async for step in super().pages():
                yield step
            if not self.lists:
                informer.note(item("made", 10))

    informer = informer_of(WritingClient([[page(5)], [page(9)]], [[Gone("too old")]]), [])
    with pytest.RaisesGroup(EndOfScriptError):
        await informer.run()
    assert informer.get("ns", "made") == "10"


async def test_errors_back_off_and_progress_ends_that(pauses: list[float]) -> None:
    failures: list[list[Any]] = [[Unavailable("away")] for _ in range(8)]
    await play([*failures, [page(1)]], [[("ADDED", item("p", 2)), Unavailable("cut")]])
    for expected, pause in zip([1, 2, 4, 8, 16, 30, 30, 30, 1], pauses, strict=True):
        assert 0.5 * expected <= pause <= 1.5 * expected


async def test_watches_that_end_at_once_back_off_and_then_list_again(pauses: list[float]) -> None:
    """The version may be one that the server does not know, as after a restored backup."""
    _, _, client = await play([[page(5)], [page(2)]], [[], [], []])
    assert len(pauses) == 3
    assert client.versions == ["5", "5", "2", "2"]


async def test_versions_that_expire_again_and_again_back_off(pauses: list[float]) -> None:
    await play([[page(n)] for n in range(4)], [[Gone("old")] for _ in range(3)])
    assert len(pauses) == 2


async def test_a_kind_without_its_crd_is_named_and_waited_for(pauses: list[float]) -> None:
    informer, _, _ = await play([[NotFound("404", "the server could not find the requested resource")]], [])
    assert informer.refusal("ns") == "the server could not find the requested resource"
    assert not informer.answered.is_set()


async def test_a_refusal_ends_with_the_next_list(pauses: list[float]) -> None:
    refused = Refused("403", "pods is forbidden")
    informer, _, client = await play([[page(1)], [refused], [page(3)]], [[refused]])
    assert (informer.refusal("ns"), client.versions) == ("", ["1", "3"])


async def test_an_object_that_moves_changes_both_deployments(pauses: list[float]) -> None:
    informer, changes, _ = await play([[page(1, item("p", 1, "a"))]], [[("MODIFIED", item("p", 2, "b"))]])
    assert changes == [A, A, B]
    assert (informer.of(A), informer.of(B)) == ((), ("2",))


async def test_an_object_without_parent_is_stored_and_reported_to_none(pauses: list[float]) -> None:
    informer, changes, _ = await play([[page(1, item("p", 1, ""))]], [[("DELETED", item("p", 2, ""))]])
    assert (changes, len(informer)) == ([], 0)


async def test_an_object_that_cannot_be_read_harms_no_other(pauses: list[float]) -> None:
    def project(resource: dict[str, Any]) -> str:
        if resource["metadata"]["resourceVersion"] == "3":
            raise KeyError("spec")
        return "fine"

    lists, watches = [[page(1, item("p", 1), item("q", 2))]], [[("MODIFIED", item("p", 3))]]
    informer, changes, _ = await play(lists, watches, project)
    assert (informer.get("ns", "p"), informer.get("ns", "q")) == (None, "fine")
    assert changes == [A, A, A]


async def test_several_namespaces_are_one_store() -> None:
    class Client(ScriptedClient):
        async def pages(self, kind: Any, namespace: str, **_: Any) -> AsyncIterator[dict[str, Any]]:
            yield page(1, item("p", 1, namespace=namespace))

        async def watch(self, *_: Any, **__: Any) -> AsyncIterator[Any]:
            await asyncio.sleep(60)
            yield None

    changes = list[Key]()
    informers = informer_of(
        Client([], []), changes, ["one", "two"], project=lambda resource: resource["metadata"]["namespace"]
    )
    assert informers.last_contact == float("-inf")
    async with background(informers.run()):
        await asyncio.wait_for(informers.synced.wait(), 5)
        assert informers.last_contact > 0
        assert set(changes) == set(informers.keys()) == {("one", "a"), ("two", "a")}
        assert (informers.get("one", "p"), informers.of(("two", "a")), len(informers)) == ("one", ("two",), 2)
        assert (informers.get("three", "p"), informers.of(("three", "a"))) == (None, ())


def test_ten_thousand_pods_fit_in_few_megabytes() -> None:
    tracemalloc.start()
    store: ObjectStore[tuple[str, bool]] = ObjectStore()
    before, _ = tracemalloc.get_traced_memory()
    for number in range(10_000):
        deployment, namespace = f"deployment-{number // 10}", f"team-{number // 1000}"
        metadata = item(f"{deployment}-{number:x}", number, deployment, uid=f"{number:036}", namespace=namespace)
        store.put(metadata["metadata"], (f"10.0.0.{number}", True), (namespace, deployment))
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (after - before) / 2**20 < 10


def test_a_noted_object_is_not_replaced_by_the_older_one_of_a_late_event() -> None:
    store: ObjectStore[str] = ObjectStore()
    noted, late = (item("d", version, uid="u") for version in (7, 5))
    store.put(noted["metadata"], "new", ("ns", "d"))
    assert store.is_current(late["metadata"])
    assert store.is_current(noted["metadata"])
    assert not store.is_current(item("d", 8, uid="u")["metadata"])
    assert not store.is_current(item("d", 5, uid="another")["metadata"])


async def test_the_answer_to_a_write_replaces_nothing_that_the_watch_has_shown_since(pauses: list[float]) -> None:
    events = [
        ("ADDED", item("p", 10)),
        ("ADDED", item("q", 11)),
        ("MODIFIED", item("p", 12)),
        ("DELETED", item("q", 13)),
    ]
    informer, changes, _ = await play([[page(9)]], [events])
    before = len(changes)
    for late in (item("p", 10), item("q", 11)):
        informer.note(late)
    assert (informer.get("ns", "p"), informer.get("ns", "q")) == ("12", None)
    informer.note(item("q", 14))
    assert (informer.get("ns", "q"), len(changes)) == ("14", before), "an answer before its event is taken"
