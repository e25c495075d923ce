"""Store of an informer: what is kept of each object, indexed by name and by the deployment that it belongs to."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Generic, NamedTuple, TypeVar

from specdecode_operator.api.v1alpha1 import GROUP
from specdecode_operator.types import Key

NAME_LABEL = f"{GROUP}/name"
"""Label with the name of the deployment that an object belongs to."""

T = TypeVar("T")


class StoredObject(NamedTuple, Generic[T]):
    """One object in the store."""

    value: T
    uid: str
    version: str
    key: Key | None


def parent_key(metadata: Mapping[str, Any]) -> Key | None:
    """Return the key of the deployment that an object belongs to by its label, or None."""
    name = (metadata.get("labels") or {}).get(NAME_LABEL)
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
        """Return whether exactly this version of the object is stored."""
        stored = self._objects.get((metadata["namespace"], metadata["name"]))
        return stored is not None and (stored.uid, stored.version) == (metadata["uid"], metadata["resourceVersion"])

    def put(self, metadata: Mapping[str, Any], value: T) -> tuple[Key, ...]:
        """Store an object. Return the keys that are affected: two if the object moved to another deployment."""
        place = sys.intern(metadata["namespace"]), metadata["name"]
        before = self.remove(*place)
        key = parent_key(metadata)
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
