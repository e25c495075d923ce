"""Phases of a deployment's drafts, and ways of a candidate into service."""

from __future__ import annotations

from enum import StrEnum


class Phase(StrEnum):
    """Phase of a deployment's drafts."""

    SERVING = "Serving"
    COLLECTING = "Collecting"
    DISTILLING = "Distilling"
    CANARY = "Canary"
    PROMOTING = "Promoting"
    ROLLING_BACK = "RollingBack"
    COOLDOWN = "Cooldown"


class Mode(StrEnum):
    """Way of a candidate into service (spec: draftRollout.mode)."""

    CANARY = "Canary"
    DIRECT = "Direct"
    """The verdict of the training Job is enough."""
    MANUAL = "Manual"
    """A user promotes, once the canary test says that the candidate is better."""
