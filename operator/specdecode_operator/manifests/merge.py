"""Strategic merge of a user's pod template over the operator's.

Maps are merged by key, and lists by the field that identifies their items in Kubernetes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specdecode_operator.errors import SpecError

MERGE_KEYS = {
    "containers": ("name",),
    "initContainers": ("name",),
    "ephemeralContainers": ("name",),
    "env": ("name",),
    "volumes": ("name",),
    "volumeMounts": ("mountPath",),
    "volumeDevices": ("devicePath",),
    "ports": ("containerPort", "protocol"),
    "imagePullSecrets": ("name",),
    "resourceClaims": ("name",),
    "claims": ("name",),
    "hostAliases": ("ip",),
    "topologySpreadConstraints": ("topologyKey", "whenUnsatisfiable"),
}
"""Lists whose items are merged one by one, with the identifying fields. Other lists of the overlay replace the base."""
_DEFAULTS = {"protocol": "TCP"}
"""Values of identifying fields that an item may leave out."""
_HANDLERS = frozenset({"exec", "httpGet", "tcpSocket", "grpc", "sleep"})
_VARIABLE_SOURCES = frozenset({"fieldRef", "resourceFieldRef", "configMapKeyRef", "secretKeyRef", "fileKeyRef"})
_ONE_OF = {
    "env": frozenset({"value", "valueFrom"}),
    "valueFrom": _VARIABLE_SOURCES,
    "startupProbe": _HANDLERS,
    "readinessProbe": _HANDLERS,
    "livenessProbe": _HANDLERS,
    "postStart": _HANDLERS,
    "preStop": _HANDLERS,
    "resourceClaims": frozenset({"resourceClaimName", "resourceClaimTemplateName"}),
}
"""Fields of which an object may have one, by the field that holds the object or the list of objects. In a volume these
are all fields but its name."""


def merged(base: Mapping[str, Any], overlay: Mapping[str, Any], path: str = "workers.template") -> dict[str, Any]:
    """Return ``overlay`` merged over ``base``; null removes a field.

    Where Kubernetes allows one of several fields, such as the handlers of a probe or the sources of a volume, the
    overlay's field replaces the base's.

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
            users = _expect(value, Mapping, place, "an object")
            result[key] = merged(_without_alternatives(known, users, key), users, place)
        elif isinstance(known, list):
            items = _expect(value, list, place, "a list")
            result[key] = _merged_items(known, items, key, place) if key in MERGE_KEYS else items
        elif isinstance(value, list) and key in MERGE_KEYS:
            result[key] = _merged_items([], value, key, place)
        else:
            result[key] = value
    return result


def _without_alternatives(base: Mapping[str, Any], overlay: Mapping[str, Any], holder: str) -> dict[str, Any]:
    """Return ``base`` without the fields that exclude a field of ``overlay``."""
    group = frozenset({*base, *overlay} - {"name"}) if holder == "volumes" else _ONE_OF.get(holder, frozenset())
    given = {key for key in group if overlay.get(key) is not None}
    return {key: value for key, value in base.items() if not given or key not in group or key in given}


def _expect(value: Any, kind: type[Any], path: str, name: str) -> Any:
    if not isinstance(value, kind):
        raise SpecError(f"{path} must be {name}, not {value!r:.60}")
    return value


def _merged_items(base: list[Any], overlay: list[Any], holder: str, path: str) -> list[Any]:
    """Merge lists of objects by their identifying fields. Items of the base keep their order, new ones follow."""
    keys = MERGE_KEYS[holder]
    items = {_identity(item, keys, f"{path}[{index}]"): item for index, item in enumerate(base)}
    for index, item in enumerate(overlay):
        place = f"{path}[{index}]"
        identity = _identity(item, keys, place)
        known = items.get(identity)
        items[identity] = merged(_without_alternatives(known, item, holder), item, place) if known else dict(item)
    return list(items.values())


def _identity(item: Any, keys: tuple[str, ...], path: str) -> tuple[str | int, ...]:
    if not isinstance(item, Mapping):
        raise SpecError(f"{path} must be an object with a {keys[0]}, not {item!r:.60}")
    return tuple(_identifying(item.get(key, _DEFAULTS.get(key)), key, path) for key in keys)


def _identifying(value: Any, key: str, path: str) -> str | int:
    if value is None:
        raise SpecError(f"{path} needs a {key}: items are merged by it")
    if not isinstance(value, str | int):
        raise SpecError(f"{path}.{key} must be a text or a number, not {value!r:.60}")
    return value
