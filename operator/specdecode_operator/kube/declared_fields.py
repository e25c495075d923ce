"""Fields that the API server's CRD declares: a CRD that is older than the operator lacks fields of its status.

A server-side apply with one undeclared field is refused as a whole, whatever the field validation of the request, so
such fields are left out.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

REMEMBER_SECONDS = 600.0
"""Time after which undeclared fields are sent again, in case the CRD was upgraded."""

_UNDECLARED = re.compile(r"(?:^|\s)\.status\.(\S+): field not declared in schema")
_ELEMENT = re.compile(r"\[[^\]]*\]")

log = logging.getLogger(__name__)

Path = tuple[str, ...]


class DeclaredFields:
    """Status fields that the API server refused, which are left out of later writes."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._undeclared: dict[Path, float] = {}
        """Time until which a field is left out."""

    def declared(self, status: Mapping[str, Any]) -> dict[str, Any]:
        """Return the status without the fields that are known to be undeclared."""
        now = self._clock()
        self._undeclared = {path: until for path, until in self._undeclared.items() if now < until}
        remaining: Any = dict(status)
        for path in self._undeclared:
            remaining = _without(remaining, path)
        return dict(remaining)

    def note_refusal(self, message: str) -> bool:
        """Note the fields that the message of the API server names as undeclared. Return whether one is new."""
        paths = {tuple(_ELEMENT.sub("", text).split(".")) for text in _UNDECLARED.findall(message)}
        new = paths - self._undeclared.keys()
        if new:
            names = ", ".join(sorted("status." + ".".join(path) for path in new))
            log.warning("the CRD is older than this operator and lacks %s: upgrade the CRD; it is left out", names)
        self._undeclared.update(dict.fromkeys(new, self._clock() + REMEMBER_SECONDS))
        return bool(new)


def _without(value: Any, path: Path) -> Any:
    """Return the value without the field at ``path``. In lists, the field is left out of every element."""
    if isinstance(value, (list, tuple)):
        return [_without(item, path) for item in value]
    if not isinstance(value, Mapping) or path[0] not in value:
        return value
    if len(path) == 1:
        return {name: item for name, item in value.items() if name != path[0]}
    return {**value, path[0]: _without(value[path[0]], path[1:])}
