"""Strategic merge of a user's pod template over the operator's.

Maps are merged by key, and lists by the field that identifies their items in Kubernetes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specdecode_operator.errors import SpecError

MERGE_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "ephemeralContainers": "name",
    "env": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "ports": "containerPort",
    "imagePullSecrets": "name",
    "resourceClaims": "name",
    "claims": "name",
    "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
}
"""Lists whose items are merged one by one, with the identifying field. Other lists of the overlay replace the base."""


def merged(base: Mapping[str, Any], overlay: Mapping[str, Any], path: str = "workers.template") -> dict[str, Any]:
    """Return ``overlay`` merged over ``base``; null removes a field.

    Args:
        base: Part of the operator's template.
        overlay: Part of the user's template.
        path: Place of the overlay in the spec, for errors.

    Raises:
        SpecError: An object or a list of the base would be replaced by a value of another type, or an item of a list
            has no identifying field. The message names the path.
    """
    result = dict(base)
    for key, value in overlay.items():
        place, known = f"{path}.{key}", result.get(key)
        if value is None:
            result.pop(key, None)
        elif isinstance(known, Mapping):
            result[key] = merged(known, _expect(value, Mapping, place, "an object"), place)
        elif isinstance(known, list):
            items = _expect(value, list, place, "a list")
            result[key] = _merged_items(known, items, MERGE_KEYS[key], place) if key in MERGE_KEYS else items
        elif isinstance(value, list) and key in MERGE_KEYS:
            result[key] = _merged_items([], value, MERGE_KEYS[key], place)
        else:
            result[key] = value
    return result


def _expect(value: Any, kind: type[Any], path: str, name: str) -> Any:
    if not isinstance(value, kind):
        raise SpecError(f"{path} must be {name}, not {value!r:.60}")
    return value


def _merged_items(base: list[Any], overlay: list[Any], key: str, path: str) -> list[Any]:
    """Merge lists of objects by ``key``. Items of the base stay in their order, new ones follow."""
    items = {_identity(item, key, f"{path}[{index}]"): item for index, item in enumerate(base)}
    for index, item in enumerate(overlay):
        place = f"{path}[{index}]"
        identity = _identity(item, key, place)
        known = items.get(identity)
        items[identity] = merged(known, item, place) if known else dict(item)
    return list(items.values())


def _identity(item: Any, key: str, path: str) -> str | int:
    if not isinstance(item, Mapping):
        raise SpecError(f"{path} must be an object with a {key}, not {item!r:.60}")
    if key not in item:
        raise SpecError(f"{path} needs a {key}: items are merged by it")
    identity = item[key]
    if not isinstance(identity, str | int):
        raise SpecError(f"{path}.{key} must be a text or a number, not {identity!r:.60}")
    return identity
