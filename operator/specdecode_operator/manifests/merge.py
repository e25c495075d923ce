"""Strategic merge of a user's pod template over ours: maps by key, lists by the name that Kubernetes gives each."""

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
    "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
}
"""Lists whose items are merged one by one; every other list of the overlay replaces ours."""


def merged(base: Mapping[str, Any], overlay: Mapping[str, Any], path: str = "workers.template") -> dict[str, Any]:
    """``overlay`` over ``base``; null removes. Raises SpecError where a list item has no name to go by."""
    found = dict(base)
    for key, value in overlay.items():
        if value is None:
            found.pop(key, None)
        elif isinstance(value, Mapping) and isinstance(found.get(key), Mapping):
            found[key] = merged(found[key], value, f"{path}.{key}")
        elif isinstance(value, list) and key in MERGE_KEYS:
            found[key] = _list(found.get(key, []), value, MERGE_KEYS[key], f"{path}.{key}")
        else:
            found[key] = value
    return found


def _list(base: list[Any], overlay: list[Any], key: str, path: str) -> list[Any]:
    found = {item[key]: item for item in base}
    for index, item in enumerate(overlay):
        if not isinstance(item, Mapping) or key not in item:
            raise SpecError(f"{path}[{index}] needs a {key}: items are merged by it")
        known = found.get(item[key])
        found[item[key]] = merged(known, item, f"{path}[{index}]") if known else dict(item)
    return list(found.values())
