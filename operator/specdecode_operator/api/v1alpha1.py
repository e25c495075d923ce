"""SpecDecodeDeployment, version v1alpha1: what users write (spec) and what they read (status).

These models are the single source of the CRD: ``crd.py`` makes crds/*.yaml of them. Descriptions are what ``kubectl
explain`` prints. One file a half of the resource; this is the name under which the rest of the operator knows them.
"""

from __future__ import annotations

from typing import Any

from specdecode_operator.api.schema import (
    GROUP,
    KIND,
    MAX_NAME_LENGTH,
    PAUSED_ANNOTATION,
    PIN_ANNOTATION,
    PLURAL,
    VERSION,
    Anything,
    Api,
    ModelUri,
    Name,
    Text,
    rule,
    rules,
)
from specdecode_operator.api.spec import (
    DrainSpec,
    ModelCacheSpec,
    ModelSpec,
    ScalingSpec,
    SecretKeyRef,
    Spec,
    StorageSpec,
    WorkersSpec,
)
from specdecode_operator.api.speculation import (
    DRAFT_MESSAGE,
    DRAFT_RULE,
    DepthSpec,
    DraftSpec,
    HysteresisSpec,
    NamedDraftSpec,
    ObjectiveSpec,
    SpeculationSpec,
    TaskDepthSpec,
    TaskSpec,
    TreeSpec,
)
from specdecode_operator.api.status import (
    CapacityStatus,
    Cause,
    Condition,
    ConditionType,
    Decision,
    DraftStatus,
    MemoryStatus,
    ModelStatus,
    SpeculationStatus,
    Status,
    TaskStatus,
    TrafficStatus,
)

__all__ = [
    "COLUMNS",
    "DRAFT_MESSAGE",
    "DRAFT_RULE",
    "GROUP",
    "KIND",
    "MAX_NAME_LENGTH",
    "PAUSED_ANNOTATION",
    "PIN_ANNOTATION",
    "PLURAL",
    "VERSION",
    "Anything",
    "Api",
    "CapacityStatus",
    "Cause",
    "Condition",
    "ConditionType",
    "Decision",
    "DepthSpec",
    "DraftSpec",
    "DraftStatus",
    "DrainSpec",
    "HysteresisSpec",
    "MemoryStatus",
    "ModelCacheSpec",
    "ModelSpec",
    "ModelStatus",
    "ModelUri",
    "Name",
    "NamedDraftSpec",
    "ObjectiveSpec",
    "ScalingSpec",
    "SecretKeyRef",
    "Spec",
    "SpecDecodeDeployment",
    "SpeculationSpec",
    "SpeculationStatus",
    "Status",
    "StorageSpec",
    "TaskDepthSpec",
    "TaskSpec",
    "TaskStatus",
    "Text",
    "TrafficStatus",
    "TreeSpec",
    "WorkersSpec",
    "rule",
    "rules",
]


class SpecDecodeDeployment(Api):
    """A model served with speculative decoding that tunes itself."""

    spec: Spec
    status: Status | None = None


COLUMNS: tuple[dict[str, Any], ...] = (
    {"name": "Ready", "type": "string", "jsonPath": ".status.ready"},
    {"name": "Replicas", "type": "integer", "jsonPath": ".status.replicas"},
    {"name": "Depth", "type": "integer", "jsonPath": ".status.speculation.depth"},
    {"name": "Accept", "type": "number", "jsonPath": ".status.speculation.acceptanceRate"},
    {"name": "Speedup", "type": "number", "jsonPath": ".status.speculation.speedup"},
    {"name": "Draft", "type": "string", "jsonPath": ".status.draft.hash"},
    {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"},
    {"name": "Reason", "type": "string", "jsonPath": ".status.reason", "priority": 1},
)
