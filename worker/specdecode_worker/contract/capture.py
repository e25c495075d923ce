"""Configuration of traffic capture, which is off by default. Drafts are distilled from captured requests."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from specdecode_worker.contract.wire import Received, TaskName, Written

LEAST_SHARE = 0.001
"""Least share of requests that may be captured, other than none.

A record represents 1/share requests. A smaller share would let a single record stand for most of the traffic.
"""


def _checked_share(share: float) -> float:
    if 0 < share < LEAST_SHARE:
        raise ValueError(f"a share is 0 or at least {LEAST_SHARE}")
    return share


Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False), AfterValidator(_checked_share)]


Consent = Literal["OptOut", "OptIn"]
"""``OptOut``: requests are captured unless the client forbids it. ``OptIn``: only if the client permits it."""


class CaptureConfig(Written):
    """Configuration of traffic capture.

    Requests are captured at random, with a share per task. A request may opt out.
    """

    dir: str
    """Folder of the segments. Several workers may share it."""
    max_bytes: int = Field(default=2**30, ge=2**16)
    """Bound of all segments in the folder, including those of other workers. The oldest are deleted first."""
    max_age_seconds: float = Field(default=14 * 86400, gt=0, allow_inf_nan=False)
    """Maximum age of a record."""
    share: Share = 1.0
    """Share of requests to capture for tasks that ``task_shares`` does not list."""
    task_shares: dict[TaskName, Share] = Field(default={}, max_length=16)
    redact: str | None = Field(default=None, pattern=r"^[\w.]+:[\w.]+$")
    """``module:function`` that receives every record and returns it, changed or not, or None to drop it."""


class CaptureRules(Received):
    """Capture as the plan switches it on, into ``capture_dir`` of the worker's configuration.

    They hold from the next request on. A worker whose configuration has a ``capture`` of its own ignores them.
    """

    share: Share = 0.05
    """Share of requests to capture for tasks that ``task_shares`` does not list."""
    task_shares: dict[TaskName, Share] = Field(default={}, max_length=16)
    max_bytes: int = Field(default=2**31, ge=2**16)
    """Bound of all segments of this worker. The oldest are deleted first."""
    max_age_seconds: float = Field(default=14 * 86400, gt=0, allow_inf_nan=False)
    redact: str | None = Field(default=None, pattern=r"^[\w.]+:[\w.]+$", max_length=256)
    consent: Consent = "OptOut"
    delete_before: float = Field(default=0, ge=0, allow_inf_nan=False)
    """Records of requests that finished before this time, in seconds since the epoch, are deleted.

    The operator sets it when a run is over, and when target or draft of the spec change.
    """


class CaptureReport(Received):
    """Captured requests that a worker has now."""

    conversations: int = Field(default=0, ge=0)
    """Stored records."""
    stored_bytes: int = Field(default=0, ge=0)
    oldest: float | None = Field(default=None, allow_inf_nan=False)
    """Time of the oldest stored record, in seconds since the epoch; None without one."""
    dropped: dict[str, int] = Field(default={}, max_length=32)
    """Records that were not kept since the worker's start, by reason."""
    problem: str | None = Field(default=None, max_length=1000)
    """Reason why requests are not captured although the plan says so; None if there is none."""
