"""Informers of one kind in several namespaces with one reading interface."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, Generic, TypeVar

from specdecode_operator.kube.client import KubeClient
from specdecode_operator.kube.informer import Informer
from specdecode_operator.kube.kinds import Kind
from specdecode_operator.types import Key

T = TypeVar("T")


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
