"""Informers: lists and watches of one kind, and what is stored of its objects."""

from __future__ import annotations

import asyncio
import logging
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from specdecode_operator.api.v1alpha1 import NAME_LABEL
from specdecode_operator.errors import ClusterError, Gone, NotFound, Refused, Unavailable
from specdecode_operator.kube.client import KubeClient
from specdecode_operator.kube.kinds import Kind
from specdecode_operator.types import Key

log = logging.getLogger(__name__)

# Store of an informer: what is kept of each object, indexed by name and by the deployment that it belongs to.

T = TypeVar("T")


class StoredObject(NamedTuple, Generic[T]):
    """One object in the store."""

    value: T
    uid: str
    version: str
    key: Key | None


def parent_key(item: Mapping[str, Any]) -> Key | None:
    """Return the key of the deployment that an object belongs to, by ``spec.deploymentRef`` or its label."""
    metadata = item["metadata"]
    reference = (item.get("spec") or {}).get("deploymentRef")
    name = reference["name"] if reference else (metadata.get("labels") or {}).get(NAME_LABEL)
    return (metadata["namespace"], name) if name else None


class ObjectStore(Generic[T]):
    """Objects by namespace and name, and by key."""

    def __init__(self) -> None:
        self._objects: dict[tuple[str, str], StoredObject[T]] = {}
        self._by_key: dict[Key, dict[tuple[str, str], StoredObject[T]]] = {}

    def __len__(self) -> int:
        return len(self._objects)

    def get(self, namespace: str, name: str) -> T | None:
        stored = self._objects.get((namespace, name))
        return None if stored is None else stored.value

    def of(self, key: Key) -> tuple[T, ...]:
        """Return the values with this key, in the order of their names."""
        return tuple(stored.value for _, stored in sorted(self._by_key.get(key, {}).items(), key=lambda item: item[0]))

    def keys(self) -> tuple[Key, ...]:
        return tuple(self._by_key)

    def names(self) -> set[tuple[str, str]]:
        """Return namespace and name of every object."""
        return set(self._objects)

    def is_current(self, metadata: Mapping[str, Any]) -> bool:
        """Return whether this version of the object is stored, or a newer one that a write returned."""
        stored = self._objects.get((metadata["namespace"], metadata["name"]))
        return (
            stored is not None
            and stored.uid == metadata["uid"]
            and is_shown(metadata["resourceVersion"], stored.version)
        )

    def put(self, metadata: Mapping[str, Any], value: T, key: Key | None) -> tuple[Key, ...]:
        """Store an object. Return the keys that are affected: two if the object moved to another deployment."""
        place = sys.intern(metadata["namespace"]), metadata["name"]
        before = self.remove(*place)
        if key is not None:
            key = sys.intern(key[0]), sys.intern(key[1])
        stored = StoredObject(value, metadata["uid"], metadata["resourceVersion"], key)
        self._objects[place] = stored
        if key is not None:
            self._by_key.setdefault(key, {})[place] = stored
        return tuple(dict.fromkeys([*before, *([key] if key else [])]))

    def remove(self, namespace: str, name: str) -> tuple[Key, ...]:
        """Remove an object. Return the keys that are affected, at most one."""
        stored = self._objects.pop((namespace, name), None)
        if stored is None or stored.key is None:
            return ()
        siblings = self._by_key[stored.key]
        del siblings[namespace, name]
        if not siblings:
            del self._by_key[stored.key]
        return (stored.key,)


def is_shown(version: str, by: str) -> bool:
    """Return whether a resource version is not newer than another. Versions that are no numbers must be equal."""
    return int(version) <= int(by) if version.isdecimal() and by.isdecimal() else version == by


# In-memory copy of the objects of one kind, which a list and a watch keep current.
#
# An informer holds only what its ``project`` function returns of each object, so ten thousand pods fit in a few
# megabytes. A watch lasts about five minutes. It is resumed where it ended, also after an error; objects are listed
# again only when the API server does not know that place any more, or has refused the watch.

MIN_WATCH_SECONDS, MAX_WATCH_SECONDS = 240, 300
"""Length of one watch, drawn at random so that the watches of several kinds do not end together. The client notices a
dead connection earlier."""
MIN_RETRY_SECONDS, MAX_RETRY_SECONDS = 1.0, 30.0
"""Pause after an error; it doubles from error to error."""
SHORT_WATCH_SECONDS = 1.0
"""A watch that ends earlier than this without any event counts as an error."""
MAX_SHORT_WATCHES = 2
"""Such watches in a row after which objects are listed again: the server may not know the resource version."""


@dataclass(slots=True)
class _Source:
    """State of the lists and watches of one namespace, or of all of them."""

    namespace: str | None
    version: str = ""
    """Resource version from which the next watch goes on; empty if a list must come first."""
    is_listed: bool = False
    is_answered: bool = False
    """The first list is complete or refused."""
    refusal: str = ""
    """Sentence of the API server while it refuses the list, without the right or the CRD; empty if it does not."""
    last_contact: float = float("-inf")
    """Time of the last answer or event of the API server, in seconds of the monotonic clock."""
    short_watches: int = 0
    pause: float = MIN_RETRY_SECONDS
    has_progressed: bool = True

    def note_progress(self) -> None:
        """Note that the API server sent something."""
        self.last_contact = time.monotonic()
        self.pause, self.has_progressed, self.short_watches = MIN_RETRY_SECONDS, True, 0


class Informer(ObjectStore[T]):
    """Store of the objects of one kind in some namespaces, or in all of them, which is kept current."""

    def __init__(
        self,
        client: KubeClient,
        kind: Kind,
        namespaces: Sequence[str],
        *,
        labels: str,
        project: Callable[[dict[str, Any]], T],
        metadata_only: bool,
        on_change: Callable[[Key], None],
    ) -> None:
        """Prepare an informer; nothing is read before ``run``.

        Args:
            client: Client of the API server.
            kind: Kind of the objects.
            namespaces: Their namespaces; none of them means all.
            labels: Label selector, empty for all objects.
            project: Function that takes an object as the API server sends it, and returns what is stored of it.
            metadata_only: Ask the API server for metadata instead of whole objects.
            on_change: Called with the key of an object that was added, changed or removed, after the store changed.
        """
        super().__init__()
        self.synced = asyncio.Event()
        """Set when the first list of every namespace is complete."""
        self.answered = asyncio.Event()
        """Set when the first list of every namespace is complete or refused."""
        self._client = client
        self._kind = kind
        self._labels = labels
        self._project = project
        self._metadata_only = metadata_only
        self._on_change = on_change
        self._sources = {namespace: _Source(namespace) for namespace in (tuple(namespaces) or (None,))}

    @property
    def last_contact(self) -> float:
        """Time of the oldest last contact of all namespaces, in seconds of the monotonic clock."""
        return min(source.last_contact for source in self._sources.values())

    @property
    def problem(self) -> str:
        """Reason why a first list is not complete: refused, or not answered yet. Empty if all lists are complete."""
        waiting = [source for source in self._sources.values() if not source.is_listed]
        return next((source.refusal for source in waiting if source.refusal), "no answer yet" if waiting else "")

    def refusal(self, namespace: str) -> str:
        """Return why the API server refuses to list a namespace; empty if it does not."""
        source = self._sources.get(namespace, self._sources.get(None))
        return "" if source is None else source.refusal

    def note(self, item: dict[str, Any]) -> None:
        """Take an object that a write returned, without the call of ``on_change``.

        An answer that comes after its watch event is dropped: later events may have changed or removed the object.
        """
        metadata = item["metadata"]
        source = self._sources.get(metadata["namespace"], self._sources.get(None))
        if source is None or not is_shown(metadata["resourceVersion"], source.version):
            self.put(metadata, self._project(item), parent_key(item))

    async def run(self) -> None:
        """Keep the store current for ever."""
        async with asyncio.TaskGroup() as group:
            for source in self._sources.values():
                group.create_task(self._follow(source))

    async def _follow(self, source: _Source) -> None:
        """Keep the objects of one source current for ever."""
        while True:
            try:
                if not source.version:
                    await self._relist(source)
                await self._watch(source)
            except ClusterError as error:
                if isinstance(error, Gone | Refused):
                    source.version = ""
                if isinstance(error, Refused | NotFound):
                    source.refusal = error.sentence
                if isinstance(error, Refused):
                    self._note_answer(source)
                await self._back_off(source, error)

    def _note_answer(self, source: _Source) -> None:
        source.is_answered = True
        if all(one.is_answered for one in self._sources.values()):
            self.answered.set()
        if all(one.is_listed for one in self._sources.values()):
            self.synced.set()

    async def _relist(self, source: _Source) -> None:
        """Make the store equal to a list, and go on from its resource version."""
        before = self.names()  # what a write returns from now on may be newer than the list
        listed: set[tuple[str, str]] = set()
        version = ""
        pages = self._client.pages(self._kind, source.namespace, labels=self._labels, metadata_only=self._metadata_only)
        async for page in pages:
            source.last_contact = time.monotonic()
            version = page["metadata"]["resourceVersion"]
            for item in page.get("items") or []:
                listed.add((item["metadata"]["namespace"], item["metadata"]["name"]))
                self._take(item)
        for namespace, name in before - listed:
            if source.namespace in (None, namespace):
                self._notify(self.remove(namespace, name))
        source.version, source.short_watches, source.refusal, source.is_listed = version, 0, "", True
        self._note_answer(source)

    async def _watch(self, source: _Source) -> None:
        """Follow one watch to its end."""
        started = time.monotonic()
        events = 0
        stream = self._client.watch(
            self._kind,
            source.namespace,
            labels=self._labels,
            version=source.version,
            metadata_only=self._metadata_only,
            seconds=random.randint(MIN_WATCH_SECONDS, MAX_WATCH_SECONDS),
            bookmarks=True,
        )
        async for event, item in stream:
            events += 1
            source.note_progress()
            source.version = item["metadata"]["resourceVersion"]
            if event == "DELETED":
                self._notify(self.remove(item["metadata"]["namespace"], item["metadata"]["name"]))
            elif event != "BOOKMARK":
                self._take(item)
        if not events and time.monotonic() - started < SHORT_WATCH_SECONDS:
            source.short_watches += 1
            if source.short_watches >= MAX_SHORT_WATCHES:
                source.version = ""
            raise Unavailable(f"watch of {self._kind.plural}: ended at once")
        source.note_progress()

    def _take(self, item: dict[str, Any]) -> None:
        metadata = item["metadata"]
        if self.is_current(metadata):
            return
        try:
            value = self._project(item)
        except Exception:
            # One object with unexpected content must not end the copy of all others.
            log.exception("%s %s/%s cannot be read", self._kind.kind, metadata["namespace"], metadata["name"])
            self._notify(self.remove(metadata["namespace"], metadata["name"]))
            return
        self._notify(self.put(metadata, value, parent_key(item)))

    def _notify(self, keys: tuple[Key, ...]) -> None:
        for key in keys:
            self._on_change(key)

    async def _back_off(self, source: _Source, error: ClusterError) -> None:
        """Sleep before the next attempt. A resource version that expired after a working watch needs no pause."""
        had_progressed, source.has_progressed = source.has_progressed, False
        if isinstance(error, Gone) and had_progressed:
            log.info("%s: listing again: %s", self._kind.plural, error)
            return
        log.warning("%s: %s: %s", self._kind.plural, "watching again" if source.version else "listing again", error)
        await asyncio.sleep(source.pause * random.uniform(0.5, 1.5))
        source.pause = min(MAX_RETRY_SECONDS, source.pause * 2)
