"""Redaction hook: a function of the user that receives every record before it is written."""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib import import_module
from operator import attrgetter
from typing import Any

from specdecode_worker.capture.counters import Dropped
from specdecode_worker.capture.errors import HookNotFound
from specdecode_worker.capture.record import Record, encode

Hook = Callable[[Record], Record | None]

log = logging.getLogger(__name__)


def load_hook(name: str) -> Hook:
    """Import the hook named ``module:function``.

    Raises:
        HookNotFound: the import fails or the result is not callable. The message contains the exception of the module.
    """
    module, _, path = name.partition(":")
    try:
        function: Any = attrgetter(path)(import_module(module))
    except Exception as error:  # a user's module may raise any exception
        raise HookNotFound(f"the redaction hook {name} cannot be imported: {type(error).__name__}: {error}") from None
    if not callable(function):
        raise HookNotFound(f"the redaction hook {name} is no function")
    hook: Hook = function
    return hook


def apply_hook(record: Record, hook: Hook | None) -> Record | Dropped:
    """Return the record to write, or the reason to drop it.

    A hook that fails or returns anything but a record drops the record, so that no unredacted record is written.
    """
    if hook is None:
        return record
    try:
        redacted = hook(record)
    except Exception as error:  # any type is possible; the message is not logged, since it may contain the text to hide
        log.warning("the redaction hook raised %s; the record is dropped", type(error).__name__)
        return Dropped.redaction_error
    if redacted is None:
        return Dropped.redacted
    return redacted if isinstance(redacted, Record) else Dropped.redaction_error


def redact_and_encode(record: Record, hook: Hook | None) -> tuple[Record, bytes] | Dropped:
    """Return the record to write with its encoding, or the reason to drop it."""
    redacted = apply_hook(record, hook)
    if isinstance(redacted, Dropped):
        return redacted
    try:
        return redacted, encode(redacted)
    except (TypeError, ValueError):  # the hook set a field to a type that a record cannot hold
        return Dropped.redaction_error
