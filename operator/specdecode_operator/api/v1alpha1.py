"""SpecDecodeDeployment, version v1alpha1: desired state (spec) and observed state (status).

These models are the only source of the CRD, which ``crd.py`` generates, and of docs/api.md. ``kubectl explain`` prints
their descriptions. The rest of the operator imports them from this module.
"""

from __future__ import annotations

from typing import Any

from specdecode_operator.api.devices import AcceleratorSpec, ResourceClaimSpec, ResourcesSpec
from specdecode_operator.api.distillation import (
    DistillationCaptureSpec,
    DistillationJobSpec,
    DistillationS3Spec,
    DistillationSpec,
    DistillationStorageSpec,
    DistillationTriggerSpec,
)
from specdecode_operator.api.draft_status import (
    DraftLineageStatus,
    DraftRunEndStatus,
    DraftRunStatus,
    DraftStatus,
    DraftTrialStatus,
    DraftVersionStatus,
)
from specdecode_operator.api.engine import OPERATOR_FLAGS, EngineSpec
from specdecode_operator.api.rollout import DraftCandidateSpec, DraftRolloutSpec, RolloutsSpec, seconds_of
from specdecode_operator.api.router import RouterSpec, SuspicionSpec, TracingSpec, TrafficShareSpec
from specdecode_operator.api.schema import (
    DRAFT_COMMAND_ANNOTATION,
    GROUP,
    KIND,
    MAX_NAME_LENGTH,
    NAME_MESSAGE,
    NAME_PATTERN,
    PAUSED_ANNOTATION,
    PIN_ANNOTATION,
    PLURAL,
    VERSION,
    Anything,
    Api,
    ModelUri,
    Name,
    Text,
    is_valid_name,
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
    TlsSpec,
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
    TreeSpec,
)
from specdecode_operator.api.status import (
    CapacityStatus,
    Cause,
    Condition,
    ConditionType,
    Decision,
    MemoryStatus,
    ModelStatus,
    RouterStatus,
    SpeculationStatus,
    Status,
    TaskStatus,
    TrafficStatus,
)
from specdecode_operator.api.tasks.task_spec import MergeSpec, TaskDepthSpec, TaskSpec
from specdecode_operator.api.workers import ApiKeysSecretRef, EnvVarSpec, RolloutSpec, WorkersSpec

__all__ = [
    "COLUMNS",
    "DRAFT_COMMAND_ANNOTATION",
    "DRAFT_MESSAGE",
    "DRAFT_RULE",
    "GROUP",
    "KIND",
    "MAX_NAME_LENGTH",
    "NAME_MESSAGE",
    "NAME_PATTERN",
    "OPERATOR_FLAGS",
    "PAUSED_ANNOTATION",
    "PIN_ANNOTATION",
    "PLURAL",
    "VERSION",
    "AcceleratorSpec",
    "Anything",
    "Api",
    "ApiKeysSecretRef",
    "CapacityStatus",
    "Cause",
    "Condition",
    "ConditionType",
    "Decision",
    "DepthSpec",
    "DistillationCaptureSpec",
    "DistillationJobSpec",
    "DistillationS3Spec",
    "DistillationSpec",
    "DistillationStorageSpec",
    "DistillationTriggerSpec",
    "DraftCandidateSpec",
    "DraftLineageStatus",
    "DraftRolloutSpec",
    "DraftRunEndStatus",
    "DraftRunStatus",
    "DraftSpec",
    "DraftStatus",
    "DraftTrialStatus",
    "DraftVersionStatus",
    "DrainSpec",
    "EngineSpec",
    "EnvVarSpec",
    "HysteresisSpec",
    "MemoryStatus",
    "MergeSpec",
    "ModelCacheSpec",
    "ModelSpec",
    "ModelStatus",
    "ModelUri",
    "Name",
    "NamedDraftSpec",
    "ObjectiveSpec",
    "ResourceClaimSpec",
    "ResourcesSpec",
    "RolloutSpec",
    "RolloutsSpec",
    "RouterSpec",
    "RouterStatus",
    "ScalingSpec",
    "SecretKeyRef",
    "Spec",
    "SpecDecodeDeployment",
    "SpeculationSpec",
    "SpeculationStatus",
    "Status",
    "StorageSpec",
    "SuspicionSpec",
    "TaskDepthSpec",
    "TaskSpec",
    "TaskStatus",
    "Text",
    "TlsSpec",
    "TracingSpec",
    "TrafficShareSpec",
    "TrafficStatus",
    "TreeSpec",
    "WorkersSpec",
    "is_valid_name",
    "rule",
    "rules",
    "seconds_of",
]


class SpecDecodeDeployment(Api):
    """Model that is served with speculative decoding tuned from measurements."""

    spec: Spec
    status: Status | None = None


COLUMNS: tuple[dict[str, Any], ...] = (
    {"name": "Ready", "type": "string", "jsonPath": ".status.ready"},
    {"name": "Replicas", "type": "integer", "jsonPath": ".status.replicas"},
    {"name": "Model", "type": "string", "jsonPath": ".spec.model.uri"},
    {"name": "Mode", "type": "string", "jsonPath": ".spec.speculation.mode"},
    {"name": "Depth", "type": "integer", "jsonPath": ".status.speculation.depth"},
    {"name": "Accept", "type": "number", "jsonPath": ".status.speculation.acceptanceRate"},
    {"name": "Speedup", "type": "number", "jsonPath": ".status.speculation.speedup"},
    {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"},
    {"name": "Draft", "type": "string", "jsonPath": ".status.draft.hash", "priority": 1},
    {"name": "URL", "type": "string", "jsonPath": ".status.url", "priority": 1},
    {"name": "Routers", "type": "string", "jsonPath": ".status.router.ready", "priority": 1},
    {"name": "Reason", "type": "string", "jsonPath": ".status.reason", "priority": 1},
)
"""Columns of ``kubectl get``; those of priority 1 only with ``-o wide``."""
