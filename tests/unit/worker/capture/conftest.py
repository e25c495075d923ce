"""Import path of the test records and of the redaction hooks."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

# `captured` is imported by these tests; `redaction_hooks` is imported by name, like a user's hook.


@pytest.fixture
def held() -> Iterator[threading.Event]:
    """Yield the event until which the hook `redaction_hooks.hanging` does not return."""
    from support.worker import redaction_hooks

    redaction_hooks.HELD.clear()
    yield redaction_hooks.HELD
    redaction_hooks.HELD.set()
