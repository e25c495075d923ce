"""SpecDecodeDeployment, version v1alpha1: desired state (spec) and observed state (status).

These models are the only source of the CRD, which ``crd.py`` generates, and of docs/reference/resource.md. ``kubectl
explain`` prints their descriptions. The rest of the operator imports them from this module.
"""

from __future__ import annotations

from typing import Any

from specdecode_operator.api.distillation import (
    AWS_REGION,
    DistillationCaptureSpec,
    DistillationSpec,
    DistillationStorageSpec,
    DistillationTriggerSpec,
    DraftRolloutSpec,
    without_devices,
)
from specdecode_operator.api.schema import (
    GROUP,
    KIND,
    MAX_NAME_LENGTH,
    NAME_LABEL,
    NAME_MESSAGE,
    NAME_PATTERN,
    PLURAL,
    VERSION,
    Anything,
    Api,
    ModelUri,
    Name,
    NameRef,
    SecretKeyRef,
    Text,
    container_in,
    object_in,
    objects_in,
    rule,
    rules,
)
from specdecode_operator.api.spec import (
    OPERATOR_FLAGS,
    AcceleratorSpec,
    ApiKeysRef,
    DrainSpec,
    EngineSpec,
    ModelSpec,
    PrefillSpec,
    ResourcesSpec,
    RouterSpec,
    ScalingSpec,
    Spec,
    StrategySpec,
    TrafficShareSpec,
    WorkersSpec,
)
from specdecode_operator.api.speculation import (
    DRAFT_MESSAGE,
    DRAFT_RULE,
    STABILITY,
    DepthSpec,
    DraftSpec,
    MergeSpec,
    NamedDraftSpec,
    ObjectiveSpec,
    SpeculationSpec,
    StabilityLimits,
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
    DraftLineageStatus,
    DraftRunEndStatus,
    DraftRunStatus,
    DraftStatus,
    DraftVersionStatus,
    MemoryStatus,
    ModelStatus,
    PrefillStatus,
    RouterStatus,
    SpeculationStatus,
    Status,
    TaskStatus,
    TrafficStatus,
)

COLUMNS: tuple[dict[str, Any], ...] = (
    {"name": "Ready", "type": "string", "jsonPath": ".status.ready"},
    {"name": "Mode", "type": "string", "jsonPath": ".spec.speculation.mode"},
    {"name": "Depth", "type": "integer", "jsonPath": ".status.speculation.depth"},
    {"name": "Accept", "type": "number", "jsonPath": ".status.speculation.acceptanceRate"},
    {"name": "Speedup", "type": "number", "jsonPath": ".status.speculation.speedup"},
    {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"},
    # The last column without -o wide: it has the message too, and may be long.
    {"name": "Reason", "type": "string", "jsonPath": ".status.reason"},
    {"name": "Model", "type": "string", "jsonPath": ".spec.model.uri", "priority": 1},
    {"name": "Draft", "type": "string", "jsonPath": ".status.draft.hash", "priority": 1},
    {"name": "URL", "type": "string", "jsonPath": ".status.url", "priority": 1},
    {"name": "Routers", "type": "string", "jsonPath": ".status.router.ready", "priority": 1},
    {"name": "Prefill", "type": "string", "jsonPath": ".status.prefill.ready", "priority": 1},
)
"""Columns of ``kubectl get``; those of priority 1 only with ``-o wide``."""
