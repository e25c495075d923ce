"""Informers: lists and watches of one kind, and what is stored of its objects."""

from __future__ import annotations

import asyncio
import logging
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, Generic, NamedTuple, TypeVar

from specdecode_operator.api.v1alpha1 import GROUP
from specdecode_operator.errors import ClusterError, Gone, NotFound, Refused, Unavailable
from specdecode_operator.kube.client import KubeClient
from specdecode_operator.kube.kinds import Kind
from specdecode_operator.types import Key

log = logging.getLogger(__name__)

# Store of an informer: what is kept of each object, indexed by name and by the deployment that it belongs to.

NAME_LABEL = f"{GROUP}/name"
"""Label with the name of the deployment that an object belongs to."""

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
        if stored is None or stored.uid != metadata["uid"]:
            return False
        versions = metadata["resourceVersion"], stored.version
        are_numbers = all(version.isdecimal() for version in versions)
        return int(versions[0]) <= int(versions[1]) if are_numbers else versions[0] == versions[1]

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


class Informer(Generic[T]):
    """Copy of the objects of one kind in one namespace, or in all of them."""

    def __init__(
        self,
        client: KubeClient,
        kind: Kind,
        namespace: str | None,
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
            namespace: Their namespace, or None for all namespaces.
            labels: Label selector, empty for all objects.
            project: Function that takes an object as the API server sends it, and returns what is stored of it.
            metadata_only: Ask the API server for metadata instead of whole objects.
            on_change: Called with the key of an object that was added, changed or removed, after the store changed.
        """
        self.synced = asyncio.Event()
        """Set when the first list is complete."""
        self.answered = asyncio.Event()
        """Set when the first list is complete or refused."""
        self.refusal = ""
        """Sentence of the API server while it refuses the list, without the right or the CRD; empty if it does not."""
        self.last_contact = float("-inf")
        """Time of the last answer or event of the API server, in seconds of the monotonic clock."""
        self._client = client
        self._kind = kind
        self._namespace = namespace
        self._labels = labels
        self._project = project
        self._metadata_only = metadata_only
        self._on_change = on_change
        self._store: ObjectStore[T] = ObjectStore()
        self._version = ""
        """Resource version from which the next watch goes on; empty if a list must come first."""
        self._short_watches = 0
        self._pause = MIN_RETRY_SECONDS
        self._progressed = True

    def get(self, namespace: str, name: str) -> T | None:
        """Return what is stored of one object, or None."""
        return self._store.get(namespace, name)

    def of(self, key: Key) -> tuple[T, ...]:
        """Return what is stored of the objects with this key, in the order of their names."""
        return self._store.of(key)

    def keys(self) -> tuple[Key, ...]:
        """Return the keys that have objects."""
        return self._store.keys()

    def __len__(self) -> int:
        return len(self._store)

    async def run(self) -> None:
        """Keep the copy current for ever."""
        while True:
            try:
                if not self._version:
                    await self._relist()
                await self._watch()
            except ClusterError as error:
                if isinstance(error, Gone | Refused):
                    self._version = ""
                if isinstance(error, Refused | NotFound):
                    self.refusal = error.sentence
                if isinstance(error, Refused):
                    self.answered.set()
                await self._back_off(error)

    async def _relist(self) -> None:
        """Make the store equal to a list, and go on from its resource version."""
        listed: set[tuple[str, str]] = set()
        version = ""
        pages = self._client.pages(self._kind, self._namespace, labels=self._labels, metadata_only=self._metadata_only)
        async for page in pages:
            self.last_contact = time.monotonic()
            version = page["metadata"]["resourceVersion"]
            for item in page.get("items") or []:
                listed.add((item["metadata"]["namespace"], item["metadata"]["name"]))
                self._put(item)
        for namespace, name in self._store.names() - listed:
            self._notify(self._store.remove(namespace, name))
        self._version = version
        self._short_watches = 0
        self.refusal = ""
        self.synced.set()
        self.answered.set()

    async def _watch(self) -> None:
        """Follow one watch to its end."""
        started = time.monotonic()
        events = 0
        stream = self._client.watch(
            self._kind,
            self._namespace,
            labels=self._labels,
            version=self._version,
            metadata_only=self._metadata_only,
            seconds=random.randint(MIN_WATCH_SECONDS, MAX_WATCH_SECONDS),
            bookmarks=True,
        )
        async for event, item in stream:
            events += 1
            self._saw_progress()
            self._version = item["metadata"]["resourceVersion"]
            if event == "DELETED":
                self._notify(self._store.remove(item["metadata"]["namespace"], item["metadata"]["name"]))
            elif event != "BOOKMARK":
                self._put(item)
        if not events and time.monotonic() - started < SHORT_WATCH_SECONDS:
            self._short_watches += 1
            if self._short_watches >= MAX_SHORT_WATCHES:
                self._version = ""
            raise Unavailable(f"watch of {self._kind.plural}: ended at once")
        self._saw_progress()

    def note(self, item: dict[str, Any]) -> None:
        """Take an object that a write returned, without the call of ``on_change``."""
        self._store.put(item["metadata"], self._project(item), parent_key(item))

    def _put(self, item: dict[str, Any]) -> None:
        metadata = item["metadata"]
        if self._store.is_current(metadata):
            return
        try:
            value = self._project(item)
        except Exception:
            # One object with unexpected content must not end the copy of all others.
            log.exception("%s %s/%s cannot be read", self._kind.kind, metadata["namespace"], metadata["name"])
            self._notify(self._store.remove(metadata["namespace"], metadata["name"]))
            return
        self._notify(self._store.put(metadata, value, parent_key(item)))

    def _notify(self, keys: tuple[Key, ...]) -> None:
        for key in keys:
            self._on_change(key)

    def _saw_progress(self) -> None:
        self.last_contact = time.monotonic()
        self._pause = MIN_RETRY_SECONDS
        self._progressed = True
        self._short_watches = 0

    async def _back_off(self, error: ClusterError) -> None:
        """Sleep before the next attempt. A resource version that expired after a working watch needs no pause."""
        if isinstance(error, Gone) and self._progressed:
            log.info("%s: listing again: %s", self._kind.plural, error)
            self._progressed = False
            return
        log.warning("%s: %s: %s", self._kind.plural, "watching again" if self._version else "listing again", error)
        self._progressed = False
        await asyncio.sleep(self._pause * random.uniform(0.5, 1.5))
        self._pause = min(MAX_RETRY_SECONDS, self._pause * 2)


# Informers of one kind in several namespaces with one reading interface.


class InformerSet(Generic[T]):
    """One informer for each watched namespace. It is read like a single informer."""

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
        """Prepare the informers; without namespaces, a single one for all namespaces of the cluster.

        The other arguments are those of Informer.
        """
        self.synced = asyncio.Event()
        """Set when the first list of every namespace is complete."""
        self._informers = {
            namespace: Informer(
                client,
                kind,
                namespace,
                labels=labels,
                project=project,
                metadata_only=metadata_only,
                on_change=on_change,
            )
            for namespace in (tuple(namespaces) or (None,))
        }

    @property
    def last_contact(self) -> float:
        """Time of the oldest last contact of all namespaces, in seconds of the monotonic clock."""
        return min(informer.last_contact for informer in self._informers.values())

    async def wait_answered(self) -> None:
        """Wait until the first list of every namespace is complete or refused."""
        for informer in self._informers.values():
            await informer.answered.wait()

    @property
    def problem(self) -> str:
        """Reason why a first list is not complete: refused, or not answered yet. Empty if all lists are complete."""
        waiting = [informer for informer in self._informers.values() if not informer.synced.is_set()]
        return next((informer.refusal for informer in waiting if informer.refusal), "no answer yet" if waiting else "")

    @property
    def is_answered(self) -> bool:
        """True once the first list of every namespace is complete or refused."""
        return all(informer.answered.is_set() for informer in self._informers.values())

    def refusal(self, namespace: str) -> str:
        """Return why the API server refuses to list a namespace; empty if it does not."""
        informer = self._informer(namespace)
        return "" if informer is None else informer.refusal

    def get(self, namespace: str, name: str) -> T | None:
        """Return what is stored of one object, or None."""
        informer = self._informer(namespace)
        return None if informer is None else informer.get(namespace, name)

    def note(self, item: dict[str, Any]) -> None:
        """Take an object that a write returned."""
        informer = self._informer(item["metadata"]["namespace"])
        if informer is not None:
            informer.note(item)

    def of(self, key: Key) -> tuple[T, ...]:
        """Return what is stored of the objects with this key, in the order of their names."""
        informer = self._informer(key[0])
        return () if informer is None else informer.of(key)

    def keys(self) -> tuple[Key, ...]:
        """Return the keys that have objects."""
        return tuple(chain.from_iterable(informer.keys() for informer in self._informers.values()))

    def __len__(self) -> int:
        return sum(len(informer) for informer in self._informers.values())

    async def run(self) -> None:
        """Keep the copies of all namespaces current for ever."""
        async with asyncio.TaskGroup() as group:
            for informer in self._informers.values():
                group.create_task(informer.run())
            for informer in self._informers.values():
                await informer.synced.wait()
            self.synced.set()

    def _informer(self, namespace: str) -> Informer[T] | None:
        return self._informers.get(namespace, self._informers.get(None))
