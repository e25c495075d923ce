"""Configuration of traffic capture, which is off by default. Drafts are distilled from captured requests."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from specdecode_worker.contract.wire import TaskName, Written

LEAST_SHARE = 0.001
"""Least share of requests that may be captured, other than none.

A record represents 1/share requests. A smaller share would let a single record stand for most of the traffic.
"""


def _checked_share(share: float) -> float:
    if 0 < share < LEAST_SHARE:
        raise ValueError(f"a share is 0 or at least {LEAST_SHARE}")
    return share


Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False), AfterValidator(_checked_share)]


class CaptureConfig(Written):
    """Configuration of traffic capture.

    Requests are captured at random, with a share per task. A request may opt out.
    """

    dir: str
    """Folder of the segments. Several workers may share it."""
    max_bytes: int = Field(default=2**30, ge=2**16)
    """Bound of all segments in the folder, including those of other workers. The oldest are deleted first."""
    max_age_seconds: float = Field(default=14 * 86400, gt=0)
    """Maximum age of a record."""
    share: Share = 1.0
    """Share of requests to capture for tasks that ``task_shares`` does not list."""
    task_shares: dict[TaskName, Share] = Field(default={}, max_length=16)
    redact: str | None = Field(default=None, pattern=r"^[\w.]+:[\w.]+$")
    """``module:function`` that receives every record and returns it, changed or not, or None to drop it."""
