"""Refusal of a training run by the spec and the phase, in the words of the operator and of the plugin. Pure."""

from __future__ import annotations

from specdecode_operator.api.v1alpha1 import Spec
from specdecode_operator.drafts.lifecycle_table import Phase


def obstacle_in_spec(spec: Spec) -> str:
    """Return why no training run can begin with this spec; empty if one can."""
    if spec.speculation.method != "eagle3" or spec.speculation.draft is None:
        return f"speculation.method is {spec.speculation.method}; only eagle3 drafts can be trained"
    if spec.distillation.capture is None:
        return "distillation.capture is absent, so there are no requests to train from"
    if spec.distillation.storage is None:
        return "distillation.storage is absent; name a claim that all workers can mount, or a bucket"
    if spec.speculation.mode == "Off":
        return "speculation.mode is Off, so no draft is used"
    return ""


def obstacle_in_phase(phase: str) -> str:
    """Return why no training run can begin in this phase; empty if one can."""
    if phase in (Phase.SERVING, Phase.COOLDOWN):
        return ""
    return f"the phase is {phase}; a run begins in phase {Phase.SERVING} or {Phase.COOLDOWN}"
