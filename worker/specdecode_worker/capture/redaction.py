"""The redaction hook: a function of the user's that sees every record before it is written."""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib import import_module
from operator import attrgetter
from typing import Any

from specdecode_worker.capture.counters import Dropped
from specdecode_worker.capture.errors import HookNotFound
from specdecode_worker.capture.record import Record

Hook = Callable[[Record], Record | None]

log = logging.getLogger(__name__)


def load_hook(name: str) -> Hook:
    """``module:function``. Raises HookNotFound; what the module itself raises on import is told in it."""
    module, _, path = name.partition(":")
    try:
        found: Any = attrgetter(path)(import_module(module))
    except Exception as error:  # whatever a user's module may raise
        raise HookNotFound(f"the redaction hook {name} cannot be imported: {type(error).__name__}: {error}") from None
    if not callable(found):
        raise HookNotFound(f"the redaction hook {name} is no function")
    hook: Hook = found
    return hook


def redacted(record: Record, hook: Hook | None) -> Record | Dropped:
    """What may be written. A hook that fails, or gives back anything else, drops the record: better none than a raw
    one."""
    if hook is None:
        return record
    try:
        found = hook(record)
    except Exception as error:  # whatever a user's function may raise; its message may hold what was to be hidden
        log.warning("the redaction hook raised %s; the record is dropped", type(error).__name__)
        return Dropped.redaction_error
    if found is None:
        return Dropped.redacted
    return found if isinstance(found, Record) else Dropped.redaction_error
