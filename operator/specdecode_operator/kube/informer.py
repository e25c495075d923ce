"""In-memory copy of the objects of one kind, which a list and a watch keep current.

An informer holds only what its ``project`` function returns of each object, so ten thousand pods fit in a few
megabytes. A watch lasts about five minutes. It is resumed where it ended, also after an error; objects are listed again
only when the API server does not know that place any more, or has refused the watch.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from specdecode_operator.errors import ClusterError, Gone, Refused, Unavailable
from specdecode_operator.kube.client import KubeClient
from specdecode_operator.kube.kinds import Kind
from specdecode_operator.kube.object_store import ObjectStore
from specdecode_operator.types import Key

MIN_WATCH_SECONDS, MAX_WATCH_SECONDS = 240, 300
"""Length of one watch, drawn at random so that the watches of several kinds do not end together. The client notices a
dead connection earlier."""
MIN_RETRY_SECONDS, MAX_RETRY_SECONDS = 1.0, 30.0
"""Pause after an error; it doubles from error to error."""
SHORT_WATCH_SECONDS = 1.0
"""A watch that ends earlier than this without any event counts as an error."""
MAX_SHORT_WATCHES = 2
"""Such watches in a row after which objects are listed again: the server may not know the resource version."""

T = TypeVar("T")
log = logging.getLogger(__name__)


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
        """Sentence of the API server while it refuses the list, as without the right; empty if it does not."""
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
                if isinstance(error, Refused):
                    self.refusal = error.sentence
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
        self._notify(self._store.put(metadata, value))

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
