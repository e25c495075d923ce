"""Termination message of the container, at Kubernetes' ``terminationMessagePath``.

``kubectl describe pod`` and the container status show the message, also when the log of the pod is lost. Every command
that can end a pod for a reason that a user or the operator should read writes one.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

ENV_PATH = "SPECDECODE_TERMINATION_LOG"
"""Environment variable that overrides the default path of Kubernetes."""
DEFAULT_PATH = "/dev/termination-log"
MAX_BYTES = 4096
"""Maximum size of a termination message in Kubernetes."""


def write_termination_message(text: str) -> None:
    """Write ``text``, truncated to MAX_BYTES, as the termination message unless one exists already.

    The first message is kept because it is the closest to the cause. The function never fails. Outside a pod it does
    nothing: the default path is written only if it exists.
    """
    given = os.environ.get(ENV_PATH)
    path = Path(given or DEFAULT_PATH)
    if given is None and not path.is_file():
        return
    words = text.encode(errors="replace")[:MAX_BYTES].decode(errors="ignore")
    with contextlib.suppress(OSError):
        if not path.exists() or path.stat().st_size == 0:
            path.write_text(words)
