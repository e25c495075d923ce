"""The event that the hanging redaction hook waits for."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from support.worker import redaction_hooks


@pytest.fixture
def held() -> Iterator[threading.Event]:
    """Yield the event until which the hook `redaction_hooks.hanging` does not return."""
    redaction_hooks.HELD.clear()
    yield redaction_hooks.HELD
    redaction_hooks.HELD.set()
