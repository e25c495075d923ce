"""What a worker keeps of the traffic that it serves, where somebody asked for that; drafts are distilled from it."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from specdecode_worker.contract.wire import TaskName, Written

Share = Annotated[float, Field(ge=0, le=1)]


class CaptureConfig(Written):
    """Requests are captured by chance, each task with a share of its own; a request may ask not to be."""

    dir: str
    """Folder of the segments; several workers may share it."""
    max_bytes: int = Field(default=2**30, ge=2**16)
    """Of all segments in the folder, whoever wrote them; the oldest make room."""
    max_age_seconds: float = Field(default=14 * 86400, gt=0)
    """No record stays longer."""
    share: Share = 1.0
    """Of the requests of every task that ``task_shares`` does not name."""
    task_shares: dict[TaskName, Share] = Field(default={}, max_length=16)
    redact: str | None = Field(default=None, pattern=r"^[\w.]+:[\w.]+$")
    """``module:function`` that is given every record and returns it, changed or not, or None to drop it."""
