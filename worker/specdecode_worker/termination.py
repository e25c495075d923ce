"""The last words of a container, where Kubernetes looks for them (``terminationMessagePath``).

They stand in ``kubectl describe pod`` and in the container's status, which outlive the log of a pod that is gone.
Used by every command that may end a pod for a reason that a person, or the operator, should read.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

ENV_PATH = "SPECDECODE_TERMINATION_LOG"
"""Overrides Kubernetes' default path."""
DEFAULT_PATH = "/dev/termination-log"
MAX_BYTES = 4096
"""Kubernetes keeps no more."""


def write_termination_message(text: str) -> None:
    """Leaves ``text``, its first MAX_BYTES bytes, unless something stands there already: who spoke first was nearest
    to the cause. Never fails, and does nothing outside a pod: the default path is written only where it exists."""
    given = os.environ.get(ENV_PATH)
    path = Path(given or DEFAULT_PATH)
    if given is None and not path.is_file():
        return
    words = text.encode(errors="replace")[:MAX_BYTES].decode(errors="ignore")
    with contextlib.suppress(OSError):
        if not path.exists() or path.stat().st_size == 0:
            path.write_text(words)
