"""What was read of a deployment's pods, for as long as a watch says that it is still so.

A list of pods is the dearest thing that a look asks of the API server, which goes through all of the namespace for the
ten that it wants. Pods change seldom, and the watch that makes a look of every change says when.
"""

from __future__ import annotations

from specdecode_operator.types import Key, Worker


class PodCache:
    """Workers without reports, by deployment. Nothing is kept of a namespace that is not watched from before the list
    was asked for, and nothing beyond a change that came meanwhile."""

    def __init__(self) -> None:
        self._watched: set[str | None] = set()
        self._asked: set[Key] = set()
        self._known: dict[Key, tuple[Worker, ...]] = {}

    def begins(self, namespace: str | None) -> None:
        """A watch of that namespace, or of all of them, tells every change from now on."""
        self._drop(namespace)
        self._watched.add(namespace)

    def ends(self, namespace: str | None) -> None:
        self._watched.discard(namespace)
        self._drop(namespace)

    def changed(self, key: Key) -> None:
        self._known.pop(key, None)
        self._asked.discard(key)

    def known(self, key: Key) -> tuple[Worker, ...] | None:
        """What still holds; None when the pods have to be listed, which begins now."""
        found = self._known.get(key)
        if found is None and (None in self._watched or key[0] in self._watched):
            self._asked.add(key)
        return found

    def listed(self, key: Key, workers: tuple[Worker, ...]) -> None:
        """The end of that."""
        if key in self._asked:
            self._asked.discard(key)
            self._known[key] = workers

    def _drop(self, namespace: str | None) -> None:
        for key in [key for key in (*self._known, *self._asked) if namespace in (None, key[0])]:
            self.changed(key)
